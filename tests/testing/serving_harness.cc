// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/serving_harness.h"

#include <algorithm>
#include <utility>

#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane::testing {
namespace {

int64_t BlocksOf(int64_t tokens) {
  return (tokens + kTestBlockSize - 1) / kTestBlockSize;
}

}  // namespace

const StepEntry* FindEntry(const Step& step, RequestId id) {
  for (const StepEntry& entry : step.entries) {
    if (entry.request == id) return &entry;
  }
  return nullptr;
}

std::vector<RequestId> IdsOf(const Step& step) {
  std::vector<RequestId> ids;
  for (const StepEntry& entry : step.entries) ids.push_back(entry.request);
  return ids;
}

ServingHarness::ServingHarness(int64_t num_blocks,
                               const SchedulerOptions& options)
    : options_(options) {
  KvPoolOptions pool_options;
  pool_options.layout = {.dtype = DType::kF32,
                         .num_layers = 1,
                         .num_kv_heads = 1,
                         .head_size = 32,
                         .v_head_size = 32,
                         .block_size = static_cast<int>(kTestBlockSize)};
  pool_options.num_blocks = num_blocks;
  pool_options.huge_pages = HugePages::kOff;
  pool_options.shuffle = true;
  pool_options.seed = 7;
  // One runtime for all harnesses: a random test makes hundreds.
  pool_ = MakePool(pool_options, OneWorker());
  Result<std::unique_ptr<Scheduler>> scheduler =
      Scheduler::Create(options, pool_.get());
  VARLANE_EXPECT_OK(scheduler);
  scheduler_ = std::move(scheduler).value();
  slots_.resize(static_cast<size_t>(num_blocks * kTestBlockSize), {-1, -1});
}

Admission ServingHarness::Submit(const Request& request, int64_t eos_after) {
  const Result<Admission> admission = scheduler_->Submit(request);
  VARLANE_EXPECT_OK(admission);
  if (!admission.ok()) return {};
  if (admission->kind != Admission::Kind::kNeverFits) {
    History& history = histories_[request.id] = History();
    history.request = request;
    history.eos_after = eos_after;
  }
  return *admission;
}

void ServingHarness::Cancel(RequestId id) {
  VARLANE_EXPECT_OK(scheduler_->Cancel(id));
  histories_.at(id).cancelled = true;
}

bool ServingHarness::RunStep() {
  if (Schedule().empty()) return false;
  Complete();
  return true;
}

const Step& ServingHarness::Schedule() {
  VARLANE_EXPECT_OK(scheduler_->Schedule(&step_));
  CheckArrays();
  for (size_t i = 0; i < step_.entries.size(); ++i) CheckEntry(i);
  CheckStats();
  // A request is served once a step, and something is always served.
  std::vector<RequestId> ids = IdsOf(step_);
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::adjacent_find(ids.begin(), ids.end()), ids.end());
  EXPECT_EQ(step_.empty(), scheduler_->idle());
  VARLANE_EXPECT_OK(pool_->CheckInvariants());
  return step_;
}

// What section 4 of the design says about the arrays, whatever the requests.
void ServingHarness::CheckArrays() const {
  const size_t n = step_.entries.size();
  ASSERT_EQ(step_.cu_seqlens_q.size(), n + 1);
  ASSERT_EQ(step_.seq_lens.size(), n);
  ASSERT_EQ(step_.block_tables.size(), n * step_.block_table_stride);
  EXPECT_EQ(step_.cu_seqlens_q[0], 0);
  EXPECT_EQ(step_.cu_seqlens_q[n], step_.total_q());
  EXPECT_LE(step_.total_q(), options_.token_budget);
  EXPECT_LE(static_cast<int64_t>(n), options_.max_seqs);
  int64_t max_blocks = 0;
  for (size_t i = 0; i < n; ++i) {
    const StepEntry& entry = step_.entries[i];
    EXPECT_GE(entry.count, 1);
    EXPECT_EQ(step_.cu_seqlens_q[i + 1] - step_.cu_seqlens_q[i], entry.count);
    EXPECT_EQ(step_.seq_lens[i], entry.begin + entry.count);
    max_blocks = std::max(max_blocks, BlocksOf(step_.seq_lens[i]));
    if (i > 0 && step_.entries[i - 1].is_prefill) {
      EXPECT_TRUE(entry.is_prefill) << "a decode stands behind a prefill";
    }
    if (!entry.is_prefill) {
      EXPECT_EQ(entry.count, 1);
    }
    if (entry.is_prefill && options_.max_chunk > 0) {
      EXPECT_LE(entry.count, options_.max_chunk);
    }
  }
  EXPECT_EQ(step_.block_table_stride, max_blocks);
}

// What the request's own past says about its entry, and that the cache, read
// through its block table, holds exactly its tokens.
void ServingHarness::CheckEntry(size_t i) {
  const StepEntry& entry = step_.entries[i];
  ASSERT_TRUE(histories_.contains(entry.request)) << entry.request;
  History& history = histories_[entry.request];
  EXPECT_TRUE(history.live()) << "request " << entry.request;
  if (entry.begin == 0 && history.next > 0) {
    ++history.restarts;
    history.next = 0;
  }
  EXPECT_EQ(entry.begin, history.next) << "request " << entry.request;
  const int64_t end = entry.begin + entry.count;
  const int64_t known = history.request.prompt_tokens + history.generated;
  EXPECT_LE(end, known);
  EXPECT_EQ(entry.samples, end == known);
  EXPECT_EQ(entry.is_prefill, known - entry.begin > 1);
  history.next = end;
  (entry.is_prefill ? expected_.prefill_tokens : expected_.decode_tokens) +=
      entry.count;
  expected_.recomputed_tokens +=
      std::max<int64_t>(0, std::min(history.ever_fed, end) - entry.begin);
  history.ever_fed = std::max(history.ever_fed, end);
  if (entry.is_prefill) history.chunks.push_back(entry.count);
  if (history.first_step < 0) history.first_step = num_steps_;
  history.last_step = num_steps_;

  const int32_t* table = &step_.block_tables[i * step_.block_table_stride];
  const auto slot_of = [&](int64_t position) {
    const int64_t block = table[position / kTestBlockSize];
    EXPECT_GE(block, 0);
    EXPECT_LT(block, pool_->capacity_blocks());
    return block * kTestBlockSize + position % kTestBlockSize;
  };
  for (int64_t position = entry.begin; position < end; ++position) {
    const int64_t row = step_.cu_seqlens_q[i] + position - entry.begin;
    ASSERT_EQ(step_.slot_mapping[row], slot_of(position));
    slots_[slot_of(position)] = {entry.request, position};
  }
  for (int64_t position = 0; position < end; ++position) {
    ASSERT_EQ(slots_[slot_of(position)],
              std::make_pair(entry.request, position));
  }
  for (int64_t k = BlocksOf(end); k < step_.block_table_stride; ++k) {
    EXPECT_EQ(table[k], -1);
  }
}

void ServingHarness::CheckStats() const {
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_EQ(stats.prefill_tokens, expected_.prefill_tokens);
  EXPECT_EQ(stats.decode_tokens, expected_.decode_tokens);
  EXPECT_EQ(stats.recomputed_tokens, expected_.recomputed_tokens);
  // So that each can be served in every step.
  EXPECT_LE(stats.running, options_.token_budget);
}

void ServingHarness::Complete() {
  std::vector<RequestId> finished;
  std::vector<RequestId> full;
  for (const StepEntry& entry : step_.entries) {
    History& history = histories_.at(entry.request);
    if (!entry.samples || history.cancelled) continue;
    ++history.generated;
    if (history.generated == history.eos_after) {
      finished.push_back(entry.request);
    } else if (history.generated == history.request.max_new_tokens) {
      full.push_back(entry.request);
    } else {
      continue;
    }
    history.ended = true;
  }
  std::vector<RequestId> ended;
  VARLANE_EXPECT_OK(scheduler_->Complete(step_, finished, &ended));
  EXPECT_EQ(ended, full);
  ++num_steps_;
  VARLANE_EXPECT_OK(pool_->CheckInvariants());
}

int64_t ServingHarness::Drain(int64_t max_steps) {
  int64_t count = 0;
  while (!scheduler_->idle() && !::testing::Test::HasFailure()) {
    EXPECT_LT(count, max_steps) << "no end in sight";
    if (count >= max_steps) break;
    RunStep();
    ++count;
  }
  return count;
}

void ServingHarness::ExpectAllGone() {
  EXPECT_TRUE(scheduler_->idle());
  EXPECT_EQ(pool_->free_blocks(), pool_->capacity_blocks());
  EXPECT_EQ(pool_->stats().sequences, 0);
  for (const auto& [id, history] : histories_) {
    EXPECT_FALSE(history.live()) << "request " << id;
  }
}

}  // namespace varlane::testing
