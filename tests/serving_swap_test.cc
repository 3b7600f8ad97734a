// Preempted requests that go on from the swap file: every position of every
// step is compared byte for byte with what the request wrote before.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/os_calls.h"
#include "tests/testing/files.h"
#include "tests/testing/pools.h"
#include "tests/testing/testing.h"
#include "varlane/scheduler.h"
#include "varlane/swap.h"

namespace varlane {
namespace {

using testing::ExpectSequence;
using testing::FillSequence;
using testing::SmallLayout;
using testing::SmallPool;
using testing::TemporaryFolder;

class SwapServingTest : public ::testing::Test {
 protected:
  void Make(int64_t num_blocks, EvictionPolicy policy,
            int64_t swap_bytes = int64_t{4} << 20) {
    pool_ = SmallPool(SmallLayout(), num_blocks);
    SwapOptions swap;
    swap.folder = folder_.path();
    swap.max_bytes = swap_bytes;
    auto swapper = SequenceSwapper::Create(swap, pool_.get());
    VARLANE_ASSERT_OK(swapper);
    swapper_ = std::move(swapper).value();
    SchedulerOptions options;
    options.token_budget = 96;
    options.watermark = 0;
    options.swapper = swapper_.get();
    options.eviction = policy;
    auto scheduler = Scheduler::Create(options, pool_.get());
    VARLANE_ASSERT_OK(scheduler);
    scheduler_ = std::move(scheduler).value();
  }

  void Submit(RequestId id, int64_t prompt, int64_t generate,
              int priority = 0) {
    const auto admission = scheduler_->Submit({id, prompt, generate, priority});
    VARLANE_ASSERT_OK(admission);
    ASSERT_NE(admission->kind, Admission::Kind::kNeverFits);
  }

  // The "model": checks what stands below, writes this step's positions.
  void RunStep() {
    VARLANE_ASSERT_OK(scheduler_->Schedule(&step_));
    ASSERT_EQ(step_.empty(), scheduler_->idle());
    for (const StepEntry& entry : step_.entries) {
      const auto seed = static_cast<uint64_t>(entry.request);
      FillSequence(pool_.get(), entry.sequence, entry.begin,
                   entry.begin + entry.count, seed);
      ExpectSequence(*pool_, entry.sequence, entry.begin + entry.count, seed);
      begins_[entry.request].push_back(entry.begin);
    }
    VARLANE_ASSERT_OK(scheduler_->Complete(step_, {}));
    VARLANE_ASSERT_OK(pool_->CheckInvariants());
  }

  void Drain() {
    for (int i = 0; !scheduler_->idle(); ++i) {
      ASSERT_LT(i, 10000);
      RunStep();
      if (HasFailure()) return;
    }
  }

  void ExpectAllGone() {
    EXPECT_EQ(pool_->free_blocks(), pool_->capacity_blocks());
    EXPECT_EQ(pool_->stats().sequences, 0);
    EXPECT_EQ(swapper_->stats().stored_blocks, 0);
    EXPECT_FALSE(swapper_->busy());
  }

  TemporaryFolder folder_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<SequenceSwapper> swapper_;
  std::unique_ptr<Scheduler> scheduler_;
  Step step_;
  std::map<RequestId, std::vector<int64_t>> begins_;
};

TEST_F(SwapServingTest, NothingIsComputedTwice) {
  Make(12, EvictionPolicy::kSwap);
  for (RequestId id = 0; id < 8; ++id) Submit(id, 40 + id, 50);
  Drain();
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_EQ(stats.finished, 8);
  EXPECT_GT(stats.preemptions, 0);
  EXPECT_GT(stats.swapped_out, 0);
  EXPECT_EQ(stats.swapped_in, stats.swapped_out);
  EXPECT_EQ(stats.swap_losses, 0);
  EXPECT_EQ(stats.recomputed_tokens, 0);
  // Positions go up without a gap: each request went on where it was.
  for (const auto& [id, begins] : begins_) {
    for (size_t i = 1; i < begins.size(); ++i) {
      ASSERT_GT(begins[i], begins[i - 1]) << "request " << id;
    }
  }
  ExpectAllGone();
}

TEST_F(SwapServingTest, TheOtherPolicyNeverSwaps) {
  Make(12, EvictionPolicy::kRecompute);
  for (RequestId id = 0; id < 8; ++id) Submit(id, 40 + id, 50);
  Drain();
  EXPECT_GT(scheduler_->stats().preemptions, 0);
  EXPECT_GT(scheduler_->stats().recomputed_tokens, 0);
  EXPECT_EQ(scheduler_->stats().swapped_out, 0);
  ExpectAllGone();
}

TEST_F(SwapServingTest, ByCostEndsEitherWay) {
  Make(12, EvictionPolicy::kByCost);
  for (RequestId id = 0; id < 8; ++id) Submit(id, 40 + id, 50);
  Drain();
  EXPECT_EQ(scheduler_->stats().finished, 8);
  ExpectAllGone();
}

TEST_F(SwapServingTest, AFullFileMeansRecompute) {
  Make(12, EvictionPolicy::kSwap, /*swap_bytes=*/3 * 8192);
  for (RequestId id = 0; id < 8; ++id) Submit(id, 40 + id, 50);
  Drain();
  EXPECT_EQ(scheduler_->stats().finished, 8);
  EXPECT_GT(scheduler_->stats().recomputed_tokens, 0);
  ExpectAllGone();
}

// Every system call of a run fails once, in turn, and then three at once: what
// was lost is computed again, and nothing else changes.
TEST_F(SwapServingTest, AFailureMeansRecompute) {
  int64_t lost = 0;
  for (int64_t call = 0;; ++call) {
    Make(8, EvictionPolicy::kSwap);
    for (RequestId id = 0; id < 4; ++id) Submit(id, 40 + id, 30);
    OsFaults::FailAfter(call, EIO, call % 2 == 0 ? 1 : 3);
    Drain();
    const int64_t made = OsFaults::failed();
    OsFaults::Disarm();
    const SchedulerStats stats = scheduler_->stats();
    EXPECT_EQ(stats.finished, 4);
    lost += stats.swap_losses;
    ExpectAllGone();
    if (HasFailure()) FAIL() << "call " << call;
    if (made == 0) break;
  }
  EXPECT_GT(lost, 2);
}

TEST_F(SwapServingTest, CancellingAndTheEndGiveEverythingBack) {
  Make(12, EvictionPolicy::kSwap);
  for (RequestId id = 0; id < 12; ++id) Submit(id, 40 + id, 50, int(id % 3));
  int64_t cancelled = 0;
  for (int i = 0; i < 40; ++i) {
    RunStep();
    if (i % 3 == 0 && scheduler_->Cancel(i / 3).ok()) ++cancelled;
  }
  EXPECT_GT(cancelled, 3);
  Drain();
  ExpectAllGone();
  for (RequestId id = 20; id < 32; ++id) Submit(id, 40 + id, 50, int(id % 3));
  for (int i = 0; i < 25; ++i) RunStep();
  EXPECT_GT(scheduler_->stats().swapped_out, 0);
  scheduler_.reset();  // with requests running, being written and read
  while (swapper_->busy()) swapper_->WaitForCompletion(swapper_->completions());
  ExpectAllGone();
}

}  // namespace
}  // namespace varlane
