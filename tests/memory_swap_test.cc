// Swap: what comes back, what failures become, and which way is chosen.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/swap.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/math.h"
#include "base/os_calls.h"
#include "base/rate_estimate.h"
#include "memory/swap_file.h"
#include "tests/testing/files.h"
#include "tests/testing/pools.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using testing::ExpectSequence;
using testing::MakeSequence;
using testing::SmallLayout;
using testing::SmallPool;
using testing::TemporaryFolder;

constexpr int64_t kMiB = int64_t{1} << 20;

class SwapTest : public ::testing::Test {
 protected:
  std::unique_ptr<SequenceSwapper> MakeSwapper(KvPool* pool,
                                               int64_t max_bytes = kMiB,
                                               bool direct_io = true) {
    SwapOptions options;
    options.folder = folder_.path();
    options.max_bytes = max_bytes;
    options.direct_io = direct_io;
    auto swapper = SequenceSwapper::Create(options, pool);
    VARLANE_EXPECT_OK(swapper);
    return swapper.ok() ? std::move(swapper).value() : nullptr;
  }

  // A sequence of the swap's length, being read.
  static SeqId BeginSwapIn(SequenceSwapper* swapper, KvPool* pool,
                           SwapId swap) {
    const SeqId seq = pool->CreateSequence();
    const auto room = pool->Append(seq, swapper->length(swap));
    EXPECT_TRUE(room.ok() && room->admitted());
    VARLANE_EXPECT_OK(swapper->SwapIn(swap, seq));
    return seq;
  }

  TemporaryFolder folder_;
};

TEST_F(SwapTest, ComesBackBitForBit) {
  for (const bool direct_io : {true, false}) {
    const auto pool = SmallPool(SmallLayout(), 40);
    const auto swapper = MakeSwapper(pool.get(), 4 * kMiB, direct_io);
    std::vector<SwapId> swaps;
    for (const int64_t length : {1, 16, 17, 100, 300}) {
      const SeqId seq = MakeSequence(pool.get(), length, uint64_t(length));
      const Result<SwapId> swap = swapper->SwapOut(seq);
      VARLANE_ASSERT_OK(swap);
      swaps.push_back(*swap);
    }
    for (const SwapId swap : swaps) {
      EXPECT_EQ(swapper->Wait(swap), SwapState::kStored);
    }
    EXPECT_EQ(pool->free_blocks(), 40);
    EXPECT_EQ(pool->stats().sequences, 0);
    EXPECT_EQ(swapper->stats().stored_blocks, 1 + 1 + 2 + 7 + 19);
    EXPECT_EQ(swapper->stats().pending_blocks, 0);
    for (const SwapId swap : swaps) {
      const int64_t length = swapper->length(swap);
      const SeqId seq = BeginSwapIn(swapper.get(), pool.get(), swap);
      EXPECT_EQ(swapper->Wait(swap), SwapState::kLoaded);
      ExpectSequence(*pool, seq, length, uint64_t(length));
      swapper->Drop(swap);
      VARLANE_EXPECT_OK(pool->Free(seq));
    }
    const SwapStats stats = swapper->stats();
    EXPECT_EQ(stats.swapped_out, 5);
    EXPECT_EQ(stats.swapped_in, 5);
    EXPECT_EQ(stats.bytes_written, 30 * pool->layout().block_bytes());
    EXPECT_EQ(stats.bytes_read, stats.bytes_written);
    EXPECT_EQ(stats.stored_blocks, 0);
    EXPECT_GT(stats.write_bytes_per_s, 0);
    EXPECT_GT(stats.read_bytes_per_s, 0);
    EXPECT_LE(stats.direct_io, direct_io);
    VARLANE_EXPECT_OK(pool->CheckInvariants());
  }
  EXPECT_TRUE(folder_.names().empty());  // the file never has a name
}

TEST_F(SwapTest, ThereIsNoMoreRoomThanTheLimit) {
  const auto pool = SmallPool(SmallLayout(), 16);
  const int64_t slot =
      RoundUp(pool->layout().block_bytes(), SwapFile::kAlignment);
  const auto swapper = MakeSwapper(pool.get(), 3 * slot + 100);
  EXPECT_EQ(swapper->stats().capacity_blocks, 3);
  EXPECT_EQ(swapper->stats().file_bytes, 3 * slot);
  EXPECT_EQ(swapper->free_bytes(), 3 * pool->layout().block_bytes());
  const SeqId large = MakeSequence(pool.get(), 64, 1);
  const Result<SwapId> refused = swapper->SwapOut(large);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  ExpectSequence(*pool, large, 64, 1);  // still the caller's
  VARLANE_EXPECT_OK(pool->Truncate(large, 48));
  VARLANE_EXPECT_OK(swapper->SwapOut(large));
  EXPECT_EQ(swapper->free_bytes(), 0);

  SwapOptions none;
  none.folder = folder_.path();
  none.max_bytes = slot - 1;
  EXPECT_EQ(SequenceSwapper::Create(none, pool.get()).status().code(),
            StatusCode::kInvalidArgument);
  none.max_bytes = slot;
  none.folder = folder_.file("nowhere");
  EXPECT_EQ(SequenceSwapper::Create(none, pool.get()).status().code(),
            StatusCode::kNotFound);
}

TEST_F(SwapTest, WrongCallsAreRefused) {
  const auto pool = SmallPool(SmallLayout(), 8);
  const auto swapper = MakeSwapper(pool.get());
  const SeqId empty = pool->CreateSequence();
  EXPECT_EQ(swapper->SwapOut(99).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(swapper->SwapOut(empty).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(swapper->SwapIn(5, empty).code(), StatusCode::kNotFound);
  const Result<SwapId> swap = swapper->SwapOut(MakeSequence(pool.get(), 20, 1));
  VARLANE_ASSERT_OK(swap);
  EXPECT_EQ(swapper->Wait(*swap), SwapState::kStored);
  EXPECT_EQ(swapper->SwapIn(*swap, empty).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(swapper->state(77), SwapState::kFailed);
  EXPECT_EQ(swapper->length(77), 0);
  swapper->Drop(77);
  swapper->CancelSwapIn(*swap);  // nothing to cancel
  EXPECT_EQ(swapper->state(*swap), SwapState::kStored);
}

// Each system call of a swap out and in fails once, in turn. Whatever fails,
// the state says so, no block or slot is lost, and what is loaded is right.
TEST_F(SwapTest, AFailureIsAStateNeverAWrongBlock) {
  const auto pool = SmallPool(SmallLayout(), 16);
  const auto swapper = MakeSwapper(pool.get());
  int64_t failed_out = 0;
  int64_t failed_in = 0;
  for (int64_t call = 0;; ++call) {
    const SeqId seq = MakeSequence(pool.get(), 100, 3);
    OsFaults::FailAfter(call, EIO);
    const Result<SwapId> swap = swapper->SwapOut(seq);
    VARLANE_ASSERT_OK(swap);
    SwapState state = swapper->Wait(*swap);
    SeqId loaded = -1;
    if (state == SwapState::kStored) {
      loaded = BeginSwapIn(swapper.get(), pool.get(), *swap);
      state = swapper->Wait(*swap);
      if (state == SwapState::kFailed) ++failed_in;
    } else {
      ASSERT_EQ(state, SwapState::kFailed);
      ++failed_out;
    }
    const int64_t made = OsFaults::failed();
    OsFaults::Disarm();
    if (state == SwapState::kLoaded) ExpectSequence(*pool, loaded, 100, 3);
    if (loaded >= 0) {
      VARLANE_EXPECT_OK(pool->Free(loaded));
    }
    EXPECT_EQ(swapper->stats().stored_blocks, 0);
    swapper->Drop(*swap);
    EXPECT_EQ(pool->free_blocks(), 16);
    if (made == 0) {
      EXPECT_EQ(state, SwapState::kLoaded);
      break;
    }
  }
  EXPECT_GE(failed_out, 1);
  EXPECT_GE(failed_in, 1);
  EXPECT_EQ(swapper->stats().write_failures, failed_out);
  EXPECT_EQ(swapper->stats().read_failures, failed_in);
}

TEST_F(SwapTest, AFailedCreateLeavesNothing) {
  const auto pool = SmallPool(SmallLayout(), 4);
  SwapOptions options;
  options.folder = folder_.path();
  options.max_bytes = kMiB;
  int64_t failures = 0;
  for (int64_t call = 0;; ++call) {
    OsFaults::FailAfter(call, ENOSPC, 20);
    const auto swapper = SequenceSwapper::Create(options, pool.get());
    const int64_t made = OsFaults::failed();
    OsFaults::Disarm();
    EXPECT_TRUE(folder_.names().empty());
    if (made == 0) break;
    failures += swapper.ok() ? 0 : 1;
  }
  EXPECT_GE(failures, 4);  // open, fstat, fallocate, write, read
}

// Slots apart take one transfer a run, in any order.
TEST_F(SwapTest, SlotsAreRunsOfTheFile) {
  auto file = SwapFile::Create(folder_.path(), kMiB, 1000, true);
  VARLANE_ASSERT_OK(file);
  EXPECT_EQ((*file)->slot_bytes(), 4096);
  std::vector<int64_t> slots(6);
  (*file)->Allocate(slots);
  (*file)->Free(std::vector<int64_t>{1, 3});
  std::vector<int64_t> apart(3);  // 1, 3, 6: three runs
  (*file)->Allocate(apart);
  EXPECT_EQ(apart, (std::vector<int64_t>{1, 3, 6}));
  for (int i = 0; i < 3; ++i) {
    std::fill_n((*file)->buffer_slot(i), 4096, std::byte(i + 1));
  }
  VARLANE_ASSERT_OK((*file)->Write(apart));
  std::fill_n((*file)->buffer(), 3 * 4096, std::byte{0});
  const std::vector<int64_t> reversed = {6, 3, 1};
  VARLANE_ASSERT_OK((*file)->Read(reversed));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ((*file)->buffer_slot(i)[4095], std::byte(3 - i));
  }
}

// The open file that has no name any more in `folder`.
std::string NamelessFile(const std::string& folder) {
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error);
    if (!error && target.string().starts_with(folder + "/")) {
      return entry.path().string();
    }
  }
  return "";
}

// Each byte of K/V in the file counts: one that changes there is found.
TEST_F(SwapTest, ADamagedFileIsFound) {
  const auto pool = SmallPool(SmallLayout(), 16);
  const auto swapper = MakeSwapper(pool.get());
  const int64_t slot =
      RoundUp(pool->layout().block_bytes(), SwapFile::kAlignment);
  for (const int64_t at : {int64_t{0}, slot + 17, 6 * slot + 100}) {
    const Result<SwapId> swap =
        swapper->SwapOut(MakeSequence(pool.get(), 100, 3));
    VARLANE_ASSERT_OK(swap);
    ASSERT_EQ(swapper->Wait(*swap), SwapState::kStored);
    const std::string path = NamelessFile(folder_.path());
    ASSERT_FALSE(path.empty());
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const int old = file.get();
    file.seekp(at);
    file.put(static_cast<char>(old ^ 1));
    file.close();
    ASSERT_TRUE(file.good());
    const SeqId seq = BeginSwapIn(swapper.get(), pool.get(), *swap);
    EXPECT_EQ(swapper->Wait(*swap), SwapState::kFailed) << at;
    VARLANE_EXPECT_OK(pool->Free(seq));
    swapper->Drop(*swap);
  }
  EXPECT_EQ(swapper->stats().read_failures, 3);
  EXPECT_EQ(swapper->stats().swapped_in, 0);
}

TEST_F(SwapTest, DroppingAndCancellingGiveEverythingBack) {
  const auto pool = SmallPool(SmallLayout(), 64);
  const auto swapper = MakeSwapper(pool.get(), 8 * kMiB);
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const SeqId seq = MakeSequence(pool.get(), 400, 9);
    const Result<SwapId> swap = swapper->SwapOut(seq);
    VARLANE_ASSERT_OK(swap);
    if (random() % 3 == 0) {
      swapper->Drop(*swap);  // queued, under way or written
    } else {
      ASSERT_EQ(swapper->Wait(*swap), SwapState::kStored);
      SeqId loaded = BeginSwapIn(swapper.get(), pool.get(), *swap);
      if (random() % 2 == 0) std::this_thread::yield();
      swapper->CancelSwapIn(*swap);
      VARLANE_EXPECT_OK(pool->Free(loaded));
      // Its blocks may be anybody's now: nothing writes them any more.
      const SeqId other = MakeSequence(pool.get(), 600, 4);
      if (swapper->state(*swap) == SwapState::kStored) {
        loaded = BeginSwapIn(swapper.get(), pool.get(), *swap);
        ASSERT_EQ(swapper->Wait(*swap), SwapState::kLoaded);
        ExpectSequence(*pool, loaded, 400, 9);
        VARLANE_EXPECT_OK(pool->Free(loaded));
      }
      ExpectSequence(*pool, other, 600, 4);
      VARLANE_EXPECT_OK(pool->Free(other));
      swapper->Drop(*swap);
    }
    ASSERT_EQ(pool->free_blocks(), 64);
    ASSERT_EQ(swapper->stats().stored_blocks, 0);
    ASSERT_EQ(swapper->stats().pending_blocks, 0);
  }
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST_F(SwapTest, TheEndFreesWhatWasUnderWay) {
  const auto pool = SmallPool(SmallLayout(), 64);
  {
    const auto swapper = MakeSwapper(pool.get(), 8 * kMiB);
    for (int i = 0; i < 3; ++i) {
      VARLANE_EXPECT_OK(swapper->SwapOut(MakeSequence(pool.get(), 300, 1)));
    }
  }
  EXPECT_EQ(pool->free_blocks(), 64);
  EXPECT_EQ(pool->stats().sequences, 0);
}

TEST_F(SwapTest, ThreadsSwapAtOnce) {
  const auto pool = SmallPool(SmallLayout(), 64);
  const auto swapper = MakeSwapper(pool.get(), 8 * kMiB);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        const SeqId seq = MakeSequence(pool.get(), 100 + 10 * int64_t(t), t);
        const Result<SwapId> swap = swapper->SwapOut(seq);
        VARLANE_ASSERT_OK(swap);
        ASSERT_EQ(swapper->Wait(*swap), SwapState::kStored);
        const SeqId loaded = BeginSwapIn(swapper.get(), pool.get(), *swap);
        ASSERT_EQ(swapper->Wait(*swap), SwapState::kLoaded);
        ExpectSequence(*pool, loaded, 100 + 10 * int64_t(t), t);
        swapper->Drop(*swap);
        VARLANE_EXPECT_OK(pool->Free(loaded));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->free_blocks(), 64);
  EXPECT_FALSE(swapper->busy());
  EXPECT_EQ(swapper->completions(), 160);
}

// --- the choice --------------------------------------------------------------

EvictionCosts Costs() {
  EvictionCosts costs;
  costs.tokens = 1000;
  costs.bytes = 100 * kMiB;
  costs.free_swap_bytes = 200 * kMiB;
  costs.write_bytes_per_s = 1000.0 * kMiB;  // 0.1 s
  costs.read_bytes_per_s = 2000.0 * kMiB;   // 0.05 s
  costs.prefill_tokens_per_s = 5000;        // 0.2 s
  return costs;
}

TEST(ChooseEvictionTest, TheCheaperWayWins) {
  EvictionCosts costs = Costs();
  EXPECT_EQ(ChooseEviction(costs), Eviction::kSwap);
  costs.prefill_tokens_per_s = 10000;  // 0.1 s against 0.15 s
  EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
  costs.prefill_tokens_per_s = 6666;  // 0.15001 s
  EXPECT_EQ(ChooseEviction(costs), Eviction::kSwap);
  costs.prefill_tokens_per_s = 6667;  // 0.14999 s
  EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
  costs = Costs();
  costs.write_bytes_per_s = 500.0 * kMiB;  // 0.2 + 0.05 s
  EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
  costs = Costs();
  costs.read_bytes_per_s = 500.0 * kMiB;  // 0.1 + 0.2 s
  EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
}

TEST(ChooseEvictionTest, NoRoomOrNothingToKeepMeansRecompute) {
  EvictionCosts costs = Costs();
  costs.free_swap_bytes = costs.bytes;
  EXPECT_EQ(ChooseEviction(costs), Eviction::kSwap);
  costs.free_swap_bytes = costs.bytes - 1;
  EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
  costs = Costs();
  costs.tokens = 0;
  EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
}

TEST(ChooseEvictionTest, AnUnknownRateIsMeasuredBySwapping) {
  for (double EvictionCosts::*const rate :
       {&EvictionCosts::write_bytes_per_s, &EvictionCosts::read_bytes_per_s,
        &EvictionCosts::prefill_tokens_per_s}) {
    EvictionCosts costs = Costs();
    costs.prefill_tokens_per_s = 1e9;
    EXPECT_EQ(ChooseEviction(costs), Eviction::kRecompute);
    costs.*rate = 0;
    EXPECT_EQ(ChooseEviction(costs), Eviction::kSwap);
  }
}

TEST(RateEstimateTest, FollowsWhatIsMeasured) {
  RateEstimate rate;
  EXPECT_EQ(rate.per_second(), 0);
  rate.Add(100, 2);
  EXPECT_DOUBLE_EQ(rate.per_second(), 50);
  rate.Add(0, 1);   // nothing was done
  rate.Add(10, 0);  // in no time: the clock says nothing
  EXPECT_DOUBLE_EQ(rate.per_second(), 50);
  for (int i = 0; i < 40; ++i) rate.Add(100, 1);
  EXPECT_NEAR(rate.per_second(), 100, 0.5);
}

}  // namespace
}  // namespace varlane
