// Requests that bring their tokens: what the prefix cache knows is not computed
// again, and every position of every step holds what its tokens say.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "tests/testing/tokens.h"
#include "varlane/metrics.h"
#include "varlane/scheduler.h"
#include "varlane/swap.h"

namespace varlane {
namespace {

using testing::From;
using testing::Mix;
using testing::operator+;
using testing::TemporaryFolder;
using testing::Tokens;

constexpr int kBlockSize = 16;
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 1,
                              .num_kv_heads = 1,
                              .head_size = 8,
                              .v_head_size = 8,
                              .block_size = kBlockSize};

// What the model says after a position.
int32_t Sample(uint32_t value) { return static_cast<int32_t>(value >> 28); }

// A service whose "model" reads the whole cache before it samples, so that a
// wrong block is a wrong token.
class Service {
 public:
  struct Options {
    int64_t num_blocks = 16;
    bool prefix_cache = true;
    bool tell_sampled = true;
    int64_t swap_bytes = 0;
    SchedulerOptions scheduler = {.watermark = 0};
  };

  explicit Service(Options options) : options_(options) {
    pool_ = testing::MakePool({.layout = kLayout,
                               .num_blocks = options.num_blocks,
                               .huge_pages = HugePages::kOff,
                               .prefix_cache = options.prefix_cache,
                               .shuffle = true,
                               .seed = 5},
                              testing::OneWorker());
    if (options.swap_bytes > 0) {
      auto swapper = SequenceSwapper::Create(
          {.folder = folder_.path(), .max_bytes = options.swap_bytes},
          pool_.get());
      VARLANE_EXPECT_OK(swapper);
      swapper_ = std::move(swapper).value();
      options_.scheduler.swapper = swapper_.get();
      options_.scheduler.eviction = EvictionPolicy::kSwap;
    }
    auto scheduler = Scheduler::Create(options_.scheduler, pool_.get());
    VARLANE_EXPECT_OK(scheduler);
    scheduler_ = std::move(scheduler).value();
  }

  KvPool& pool() { return *pool_; }
  Scheduler& scheduler() { return *scheduler_; }
  SchedulerStats stats() const { return scheduler_->stats(); }
  const Step& step() const { return step_; }

  Admission Submit(RequestId id, const Tokens& prompt, int64_t generate,
                   TenantId tenant = 0) {
    const Result<Admission> admission =
        scheduler_->Submit({.id = id,
                            .prompt_tokens = std::ssize(prompt),
                            .max_new_tokens = generate,
                            .tenant = tenant,
                            .prompt = prompt});
    VARLANE_EXPECT_OK(admission);
    if (!admission.ok()) return {};
    if (admission->kind != Admission::Kind::kNeverFits) {
      chats_[id] = {.tenant = tenant,
                    .prompt_tokens = std::ssize(prompt),
                    .tokens = prompt};
    }
    return *admission;
  }

  void Cancel(RequestId id) {
    VARLANE_EXPECT_OK(scheduler_->Cancel(id));
    chats_[id].cancelled = true;
  }

  const Step& Schedule() {
    VARLANE_EXPECT_OK(scheduler_->Schedule(&step_));
    EXPECT_EQ(step_.empty(), scheduler_->idle());
    return step_;
  }

  // Computes the outstanding step, and completes it.
  void Complete() {
    std::vector<int32_t> sampled;
    for (size_t i = 0; i < step_.entries.size(); ++i) {
      const StepEntry& entry = step_.entries[i];
      const uint32_t value = Compute(i);
      if (!entry.samples) continue;
      sampled.push_back(Sample(value));
      chats_[entry.request].tokens.push_back(sampled.back());
    }
    if (!options_.tell_sampled) sampled.clear();
    VARLANE_EXPECT_OK(scheduler_->Complete(step_, {}, nullptr, sampled));
    VARLANE_EXPECT_OK(pool_->CheckInvariants());
  }

  // Steps until idle.
  void Drain() {
    for (int i = 0; !scheduler_->idle(); ++i) {
      ASSERT_LT(i, 20'000) << "no end in sight";
      Schedule();
      Complete();
      if (::testing::Test::HasFailure()) return;
    }
  }

  // The first entry of a request whose answer is computed at once.
  StepEntry Ask(RequestId id, const Tokens& prompt, TenantId tenant = 0) {
    EXPECT_TRUE(Submit(id, prompt, 1, tenant).admitted());
    const Step& step = Schedule();
    EXPECT_EQ(step.entries.size(), 1u);
    const StepEntry entry = step.entries.at(0);
    Complete();
    return entry;
  }

  // The prompt and what was generated.
  const Tokens& tokens(RequestId id) { return chats_.at(id).tokens; }
  int64_t restarts(RequestId id) { return chats_.at(id).restarts; }

  void ExpectAllGone() {
    EXPECT_TRUE(scheduler_->idle());
    EXPECT_EQ(pool_->free_blocks(), pool_->capacity_blocks());
    EXPECT_EQ(pool_->stats().sequences, 0);
  }

 private:
  struct Chat {
    TenantId tenant = 0;
    int64_t prompt_tokens = 0;
    Tokens tokens;
    int64_t next = 0;
    int64_t restarts = 0;
    bool cancelled = false;
  };

  // Writes the entry's positions, reads all up to its end, and returns what
  // stands in the last one.
  uint32_t Compute(size_t i) {
    const StepEntry& entry = step_.entries[i];
    Chat& chat = chats_.at(entry.request);
    if (entry.begin != chat.next) {
      // It starts, maybe again, behind what the cache knows.
      EXPECT_LT(entry.begin, std::ssize(chat.tokens));
      ++chat.restarts;
    }
    const int64_t end = entry.begin + entry.count;
    chat.next = end;
    EXPECT_LE(end, std::ssize(chat.tokens));
    const KvView view = pool_->view();
    auto value = static_cast<uint32_t>(chat.tenant);
    for (int64_t position = 0; position < end; ++position) {
      const auto at = static_cast<size_t>(position);
      value = Mix(value, chat.tokens[at]);
      const int64_t block = step_.block_tables[static_cast<size_t>(
          static_cast<int64_t>(i) * step_.block_table_stride +
          position / kBlockSize)];
      const auto offset = static_cast<int>(position % kBlockSize);
      std::byte* const k =
          view.k(block, 0, 0) + 4 * kLayout.k_offset(offset, 0);
      std::byte* const v =
          view.v(block, 0, 0) + 4 * kLayout.v_offset(offset, 7);
      if (position >= entry.begin) {
        const auto row =
            static_cast<size_t>(step_.cu_seqlens_q[i] + position - entry.begin);
        EXPECT_EQ(step_.slot_mapping[row], block * kBlockSize + offset);
        std::memcpy(k, &value, 4);
        std::memcpy(v, &value, 4);
      }
      if (std::memcmp(k, &value, 4) != 0 || std::memcmp(v, &value, 4) != 0) {
        ADD_FAILURE() << "request " << entry.request
                      << " with begin = " << entry.begin << ": position "
                      << position << " holds what other tokens say";
        return 0;
      }
    }
    return value;
  }

  Options options_;
  TemporaryFolder folder_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<SequenceSwapper> swapper_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<RequestId, Chat> chats_;
  Step step_;
};

TEST(ServingPrefixTest, TheSecondRequestSkipsWhatTheFirstComputed) {
  Service service({});
  EXPECT_EQ(service.Ask(1, From(1, 40)).begin, 0);
  const StepEntry second = service.Ask(2, From(1, 40) + From(900, 8));
  EXPECT_EQ(second.begin, 32);
  EXPECT_EQ(second.count, 16);
  EXPECT_TRUE(second.samples);
  // All of it is known: one token is left to sample from.
  const StepEntry third = service.Ask(3, From(1, 40) + From(900, 8));
  EXPECT_EQ(third.begin, 47);
  EXPECT_EQ(third.count, 1);
  EXPECT_FALSE(third.is_prefill);
  EXPECT_EQ(service.tokens(2), service.tokens(3));
  const Result<Metrics> metrics = TakeMetrics({.pool = &service.pool()});
  VARLANE_ASSERT_OK(metrics);
  EXPECT_EQ(metrics->pool->prefixes.lookups, 3);
  EXPECT_EQ(metrics->pool->prefixes.hit_blocks, 2 + 2);
  EXPECT_EQ(metrics->pool->prefixes.copied_blocks, 1);
  EXPECT_EQ(service.stats().started_tokens, 40 + 48 + 48);
  EXPECT_EQ(service.stats().cached_tokens, 32 + 47);
  EXPECT_EQ(service.stats().prefill_tokens, 40 + 16);
  EXPECT_EQ(service.stats().decode_tokens, 1);
  service.ExpectAllGone();
}

TEST(ServingPrefixTest, WithoutACacheOrTokensAllIsComputed) {
  Service off({.prefix_cache = false});
  Service on({});
  for (Service* service : {&off, &on}) {
    for (RequestId id = 1; id <= 2; ++id) {
      if (service == &off) {
        service->Submit(id, From(1, 40), 1);
      } else {
        const Result<Admission> admission =
            service->scheduler().Submit({.id = id, .prompt_tokens = 40});
        VARLANE_ASSERT_OK(admission);
      }
      EXPECT_EQ(service->Schedule().entries.at(0).begin, 0);
      VARLANE_ASSERT_OK(service->scheduler().Complete(service->step(), {}));
    }
    EXPECT_EQ(service->stats().cached_tokens, 0);
    EXPECT_EQ(service->pool().stats().cached_blocks, 0);
    service->ExpectAllGone();
  }
}

// Nobody may find a block before the step that writes it is complete.
TEST(ServingPrefixTest, BlocksOfTheSameStepAreNotFound) {
  Service service({});
  service.Submit(1, From(1, 40), 4);
  service.Submit(2, From(1, 40), 4);
  ASSERT_EQ(service.Schedule().entries.size(), 2u);
  EXPECT_EQ(service.step().entries[0].begin, 0);
  EXPECT_EQ(service.step().entries[1].begin, 0);
  EXPECT_EQ(service.pool().FindPrefix(0, From(1, 40))->tokens, 0);
  EXPECT_EQ(service.pool().free_blocks(), 16 - 6);
  service.Complete();
  // Computed twice, kept once.
  EXPECT_EQ(service.pool().FindPrefix(0, From(1, 40))->tokens, 32);
  EXPECT_EQ(service.pool().free_blocks(), 16 - 4);
  service.Drain();
  EXPECT_EQ(service.tokens(1), service.tokens(2));
  service.ExpectAllGone();
}

TEST(ServingPrefixTest, AChunkIsFoundOnceItsStepIsComplete) {
  Service service({.scheduler = {.token_budget = 32, .watermark = 0}});
  service.Submit(1, From(1, 80), 1);
  service.Schedule();
  // Arrives while the step runs: its first chunk is not there yet.
  service.Submit(2, From(1, 80), 1);
  EXPECT_EQ(service.pool().FindPrefix(0, From(1, 80))->tokens, 0);
  service.Complete();
  EXPECT_EQ(service.pool().FindPrefix(0, From(1, 80))->tokens, 32);
  service.Drain();
  EXPECT_EQ(service.tokens(1), service.tokens(2));
  service.ExpectAllGone();
}

// A step that is cancelled in flight was computed nevertheless: its blocks may
// be found, with what they really hold.
TEST(ServingPrefixTest, ACancelledRequestLeavesWhatItComputed) {
  Service service({});
  service.Submit(1, From(1, 40), 4);
  service.Schedule();
  service.Cancel(1);
  service.Complete();
  service.ExpectAllGone();
  EXPECT_EQ(service.Ask(2, From(1, 40)).begin, 32);
}

TEST(ServingPrefixTest, TheNextTurnFindsWhatWasGenerated) {
  for (const bool tell : {true, false}) {
    Service service({.tell_sampled = tell});
    service.Submit(1, From(1, 20), 30);
    service.Drain();
    ASSERT_EQ(std::ssize(service.tokens(1)), 50);
    // The last token was never fed: 49 positions, 3 full blocks.
    const StepEntry next = service.Ask(2, service.tokens(1) + From(900, 5));
    EXPECT_EQ(next.begin, tell ? 48 : 16);
    service.ExpectAllGone();
  }
}

TEST(ServingPrefixTest, APreemptedRequestFindsWhatItComputed) {
  Tokens answers[2];
  for (const bool cache : {false, true}) {
    Service service({.num_blocks = 4, .prefix_cache = cache});
    service.Submit(1, From(1, 16), 40);
    service.Submit(2, From(500, 16), 20);
    service.Drain();
    EXPECT_GT(service.stats().preemptions, 0);
    EXPECT_GT(service.stats().recomputed_tokens, 0);
    answers[cache] = service.tokens(1) + service.tokens(2);
    service.ExpectAllGone();
  }
  EXPECT_EQ(answers[0], answers[1]);
  // Request 1 needs two of the four blocks that request 2 gave back: the last.
  Service service({.num_blocks = 8});
  service.Submit(1, From(1, 32), 50);
  service.Submit(2, From(500, 32), 60);
  service.Drain();
  EXPECT_GT(service.stats().preemptions, 0);
  EXPECT_EQ(service.stats().cached_tokens, 32);
  EXPECT_EQ(service.stats().recomputed_tokens, 32);
  service.ExpectAllGone();
}

TEST(ServingPrefixTest, TenantsFindNothingOfEachOther) {
  Service service({});
  EXPECT_EQ(service.Ask(1, From(1, 40), 7).begin, 0);
  EXPECT_EQ(service.Ask(2, From(1, 40), 8).begin, 0);
  EXPECT_EQ(service.Ask(3, From(1, 40), 7).begin, 32);
  EXPECT_EQ(service.Ask(4, From(1, 40), 8).begin, 32);
}

// Two long prompts that share most of their blocks fit together, and start
// together once the first one's blocks are known.
TEST(ServingPrefixTest, SharedBlocksAreNotAskedForTwice) {
  Service service({.num_blocks = 10});
  service.Submit(1, From(1, 120), 8);  // 8 blocks
  service.Schedule();
  service.Complete();
  service.Submit(2, From(1, 112) + From(900, 8), 8);
  EXPECT_EQ(service.Schedule().entries.size(), 2u);
  service.Complete();
  service.Drain();
  EXPECT_EQ(service.stats().preemptions, 0);
  EXPECT_EQ(service.stats().cached_tokens, 112);
  service.ExpectAllGone();
}

TEST(ServingPrefixTest, WrongTokensAreRefused) {
  Service service({});
  const Tokens prompt = From(1, 39);
  const Result<Admission> refused = service.scheduler().Submit(
      {.id = 1, .prompt_tokens = 40, .prompt = prompt});
  EXPECT_EQ(refused.status().ToString(),
            "INVALID_ARGUMENT: request 1: prompt has 39 tokens, but "
            "prompt_tokens = 40");
  EXPECT_TRUE(service.scheduler().idle());
  service.Submit(1, From(1, 40), 4);
  const Step& step = service.Schedule();
  EXPECT_EQ(service.scheduler()
                .Complete(step, {}, nullptr, std::vector<int32_t>{1, 2})
                .ToString(),
            "INVALID_ARGUMENT: sampled has 2 tokens, but 1 entries sample one");
  service.Complete();
  service.Drain();
}

// --- random services ---------------------------------------------------------

struct Met {
  int64_t cached_tokens = 0;
  int64_t preemptions = 0;
  int64_t swapped_in = 0;
  int64_t copied_blocks = 0;
  int64_t duplicate_blocks = 0;
  int64_t evicted_blocks = 0;
  int64_t cancelled = 0;
};

class RandomService {
 public:
  RandomService(uint64_t seed, bool swaps)
      : random_(seed),
        num_blocks_(Draw(4, 24)),
        service_({.num_blocks = num_blocks_,
                  .tell_sampled = Draw(0, 3) > 0,
                  .swap_bytes = swaps ? int64_t{1} << 20 : 0,
                  .scheduler = {.token_budget = Draw(4, 80),
                                .max_seqs = Draw(1, 12),
                                .max_chunk = Draw(0, 2) == 0 ? Draw(1, 40) : 0,
                                .watermark = double(Draw(0, 3)) / 10}}) {}

  void Run(RequestId num_requests, Met* met) {
    RequestId next = 0;
    while (next < num_requests || !service_.scheduler().idle()) {
      for (int64_t i = Draw(0, 2); i > 0 && next < num_requests; --i) {
        SubmitOne(next++);
      }
      const bool is_empty = service_.Schedule().empty();
      if (!is_empty && Draw(0, 40) == 0) {
        const auto& entries = service_.step().entries;
        service_.Cancel(
            entries[size_t(Draw(0, std::ssize(entries) - 1))].request);
        ++met->cancelled;
      }
      if (!is_empty) service_.Complete();
      if (::testing::Test::HasFailure()) return;
    }
    service_.ExpectAllGone();
    const SchedulerStats stats = service_.stats();
    const PrefixCacheStats cache = service_.pool().prefix_stats();
    met->cached_tokens += stats.cached_tokens;
    met->preemptions += stats.preemptions;
    met->swapped_in += stats.swapped_in;
    met->copied_blocks += cache.copied_blocks;
    met->duplicate_blocks += cache.duplicate_blocks;
    met->evicted_blocks += cache.evicted_blocks;
  }

 private:
  int64_t Draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  // Runs of few kinds, or what an earlier request ended with: prompts share
  // blocks, parts of blocks, and answers.
  void SubmitOne(RequestId id) {
    const int64_t most = num_blocks_ * kBlockSize;
    Tokens prompt;
    if (id > 0 && Draw(0, 2) == 0 && !ended_.empty()) {
      prompt = service_.tokens(ended_[size_t(Draw(0, std::ssize(ended_) - 1))]);
    }
    const int64_t more = Draw(1, most / 4);
    while (more > 0 && std::ssize(prompt) < more) {
      prompt = std::move(prompt) +
               From(static_cast<int32_t>(100 * Draw(0, 2)), Draw(1, 12));
    }
    const int64_t generate = Draw(1, Draw(0, 3) == 0 ? most / 2 : 20);
    const Admission admission =
        service_.Submit(id, prompt, generate, TenantId(Draw(0, 1)));
    if (admission.kind != Admission::Kind::kNeverFits) ended_.push_back(id);
  }

  std::mt19937_64 random_;
  const int64_t num_blocks_;
  Service service_;
  std::vector<RequestId> ended_;  // or not yet: its tokens are a prompt anyway
};

TEST(ServingPrefixModelTest, RandomServicesReadBackWhatTheirTokensSay) {
  constexpr uint64_t kSeeds = testing::kSanitized ? 12 : 150;
  Met met;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    RandomService(seed, /*swaps=*/seed % 3 == 0).Run(60, &met);
    if (HasFailure()) return;
  }
  // The premises: every path was taken.
  const auto least = static_cast<int64_t>(kSeeds);
  EXPECT_GT(met.cached_tokens, 100 * least);
  EXPECT_GT(met.preemptions, least);
  EXPECT_GT(met.swapped_in, least / 4);
  EXPECT_GT(met.copied_blocks, least);
  EXPECT_GT(met.duplicate_blocks, least);
  EXPECT_GT(met.evicted_blocks, 10 * least);
  EXPECT_GT(met.cancelled, least);
}

}  // namespace
}  // namespace varlane
