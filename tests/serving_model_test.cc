// Random services on small pools, and threads that submit while it steps.
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"
#include "varlane/scheduler.h"

namespace varlane {
namespace {

using testing::kTestBlockSize;
using testing::ServingHarness;

// What a random run met: a run that met nothing proves nothing.
struct Met {
  int64_t never_fits = 0;
  int64_t waits = 0;
  int64_t preemptions = 0;
  int64_t recomputed_tokens = 0;
  int64_t cancelled = 0;
  int64_t cancelled_in_step = 0;
  int64_t finished = 0;
  int64_t steps = 0;
};

class RandomService {
 public:
  explicit RandomService(uint64_t seed)
      : random_(seed),
        num_blocks_(Draw(2, 24)),
        options_({.token_budget = Draw(1, 80),
                  .max_seqs = Draw(1, 12),
                  .max_chunk = Draw(0, 2) == 0 ? Draw(1, 40) : 0,
                  .watermark = double(Draw(0, 3)) / 10}),
        service_(num_blocks_, options_) {}

  void Run(int64_t num_requests, Met* met) {
    while (next_id_ < num_requests || !service_.scheduler().idle()) {
      if (::testing::Test::HasFailure()) return;
      for (int64_t i = Draw(0, 3); i > 0 && next_id_ < num_requests; --i) {
        SubmitOne(met);
      }
      if (Draw(0, 20) == 0) CancelOne(met);
      const bool empty = service_.Schedule().empty();
      if (!empty && Draw(0, 30) == 0) met->cancelled_in_step += CancelOne(met);
      if (!empty) service_.Complete();
      ++met->steps;
      ASSERT_LT(service_.steps(), bound_) << "no end in sight";
    }
    service_.ExpectAllGone();
    const SchedulerStats stats = service_.scheduler().stats();
    EXPECT_EQ(stats.finished + stats.cancelled, int64_t(accepted_.size()));
    met->preemptions += stats.preemptions;
    met->recomputed_tokens += stats.recomputed_tokens;
    met->finished += stats.finished;
    for (const RequestId id : accepted_) CheckEnd(id);
  }

 private:
  int64_t Draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  void SubmitOne(Met* met) {
    const int64_t most = num_blocks_ * kTestBlockSize;
    const Request request = {
        .id = next_id_++,
        .prompt_tokens = Draw(1, Draw(0, 3) == 0 ? most : most / 3),
        .max_new_tokens = Draw(1, Draw(0, 3) == 0 ? most / 2 : 20),
        .priority = static_cast<int>(Draw(-1, 1))};
    const int64_t eos = Draw(0, 1) == 0 ? Draw(1, 30) : 0;
    const Admission admission = service_.Submit(request, eos);
    const bool fits = request.prompt_tokens + request.max_new_tokens <= most;
    EXPECT_EQ(fits, admission.kind != Admission::Kind::kNeverFits);
    EXPECT_EQ(admission.kind == Admission::Kind::kWait,
              fits && admission.needed_blocks > admission.free_blocks);
    met->never_fits += !fits;
    met->waits += admission.kind == Admission::Kind::kWait;
    if (!fits) return;
    accepted_.push_back(request.id);
    // The first running request gets at least a block's worth of tokens in
    // every second step that samples nothing, and is preempted for nobody:
    // between two samples lie no more steps than its known tokens need.
    int64_t chunk = std::min(options_.token_budget, kTestBlockSize);
    if (options_.max_chunk > 0) chunk = std::min(chunk, options_.max_chunk);
    bound_ += (request.max_new_tokens + 1) * (2 * (most / chunk) + 4) + 4;
  }

  int64_t CancelOne(Met* met) {
    std::vector<RequestId> live;
    for (const RequestId id : accepted_) {
      if (service_.history(id).live()) live.push_back(id);
    }
    if (live.empty()) return 0;
    service_.Cancel(live[size_t(Draw(0, int64_t(live.size()) - 1))]);
    ++met->cancelled;
    return 1;
  }

  // However often it was preempted, it generated what it was asked for.
  void CheckEnd(RequestId id) {
    const ServingHarness::History& history = service_.history(id);
    if (history.cancelled) return;
    const int64_t most = history.request.max_new_tokens;
    EXPECT_EQ(history.generated,
              history.eos_after > 0 ? std::min(history.eos_after, most) : most)
        << "request " << id;
  }

  std::mt19937_64 random_;
  const int64_t num_blocks_;
  const SchedulerOptions options_;
  ServingHarness service_;
  std::vector<RequestId> accepted_;
  RequestId next_id_ = 0;
  int64_t bound_ = 200;
};

TEST(SchedulerModelTest, RandomServicesEndWithEveryTokenAndEveryBlock) {
  Met met;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    RandomService(seed).Run(/*num_requests=*/40, &met);
    if (HasFailure()) return;
  }
  EXPECT_GT(met.never_fits, 100);
  EXPECT_GT(met.waits, 500);
  EXPECT_GT(met.preemptions, 200);
  EXPECT_GT(met.recomputed_tokens, 5000);
  EXPECT_GT(met.cancelled, 100);
  EXPECT_GT(met.cancelled_in_step, 50);
  EXPECT_GT(met.finished, 2000);
  RecordProperty("steps", int(met.steps));
  RecordProperty("preemptions", int(met.preemptions));
}

TEST(SchedulerModelTest, SubmitAndCancelFromOtherThreadsWhileStepping) {
  ServingHarness service(12, {.token_budget = 40});
  Scheduler& scheduler = service.scheduler();
  constexpr int kThreads = 3;
  constexpr int64_t kRequests = 200;
  std::atomic<int> writing = kThreads;
  std::atomic<int64_t> accepted = 0;
  std::atomic<int64_t> cancelled = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
      for (int64_t i = 0; i < kRequests; ++i) {
        const RequestId id = t * kRequests + i;
        const Result<Admission> admission =
            scheduler.Submit({.id = id,
                              .prompt_tokens = int64_t(random() % 100 + 1),
                              .max_new_tokens = int64_t(random() % 60 + 1),
                              .priority = static_cast<int>(random() % 2)});
        VARLANE_EXPECT_OK(admission);
        accepted += 1;
        // A late cancel may find it finished.
        if (i % 4 == 0) cancelled += scheduler.Cancel(id).ok() ? 1 : 0;
        const SchedulerStats stats = scheduler.stats();
        EXPECT_LE(stats.finished + stats.cancelled, kThreads * kRequests);
        if (i % 8 == 0) std::this_thread::yield();
      }
      writing -= 1;
    });
  }
  Step step;
  while (writing > 0 || !scheduler.idle()) {
    const Status status = scheduler.Schedule(&step);
    VARLANE_EXPECT_OK(status);
    if (!status.ok()) break;
    // As if rows had been computed: EOS for some.
    std::vector<RequestId> finished;
    for (const StepEntry& entry : step.entries) {
      if (entry.samples && (entry.request + entry.begin) % 16 == 0) {
        finished.push_back(entry.request);
      }
    }
    VARLANE_EXPECT_OK(scheduler.Complete(step, finished));
  }
  for (std::thread& thread : threads) thread.join();
  const SchedulerStats stats = scheduler.stats();
  EXPECT_EQ(accepted, kThreads * kRequests);
  EXPECT_EQ(stats.cancelled, cancelled);
  EXPECT_EQ(stats.finished + stats.cancelled, kThreads * kRequests);
  EXPECT_GT(stats.preemptions, 0);
  service.ExpectAllGone();
  VARLANE_EXPECT_OK(service.pool().CheckInvariants());
}

}  // namespace
}  // namespace varlane
