// KvPool from several threads: sequences of their own, and sequences that go
// from one thread to the next while the pool shrinks and its blocks move.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testing/kv_pool_model.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

using testing::KvPoolModel;
using testing::MakeRuntime;

TEST(KvPoolThreadsTest, SequencesOfTheirOwnDoNotDisturbEachOther) {
  const auto runtime = MakeRuntime(2);
  constexpr int kThreads = 4;
  constexpr int kSteps = testing::Operations(56'000, 2'500);
  constexpr int64_t kManyBlocks = 4000;
  auto pool = KvPool::Create({.layout = testing::kModelLayout,
                              .num_blocks = 200,
                              .max_blocks = kManyBlocks,
                              .check_limits = false},
                             runtime.get());
  VARLANE_ASSERT_OK(pool);
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      KvPoolModel model(pool->get(), 77 + static_cast<uint64_t>(t));
      for (int op = 0; op < kSteps && !::testing::Test::HasFailure(); ++op) {
        (*pool)->BeginStep();
        model.Step();
        model.VerifyOne();
        (*pool)->EndStep();
        // Now and then all threads are between steps, so that blocks can move.
        if (op % 64 == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
      (*pool)->BeginStep();
      model.VerifyAll();
      (*pool)->EndStep();
      if (t % 2 == 0) model.FreeAll();
      running.fetch_sub(1);
    });
  }
  // Meanwhile the pool grows and is looked at.
  int64_t looks = 0;
  int64_t shrinks = 0;
  while (running.load() > 0) {
    const KvPoolStats stats = (*pool)->stats();
    EXPECT_EQ(stats.free_blocks + stats.cached_blocks + stats.referenced_blocks,
              stats.capacity_blocks);
    EXPECT_EQ((*pool)->NodeOfBlock(
                  static_cast<BlockId>((*pool)->capacity_blocks() - 1)),
              0);
    if (++looks % 64 == 0) {
      VARLANE_EXPECT_OK((*pool)->CheckInvariants());
    }
    if (looks % 8 == 0 && stats.capacity_blocks + 100 <= kManyBlocks) {
      VARLANE_EXPECT_OK((*pool)->Grow(100));
    }
    // The threads' operations are their steps: no block is moved in one.
    if (looks % 8 == 4) {
      const Result<KvResize> shrunk =
          (*pool)->Shrink(std::max<int64_t>(0, stats.free_blocks / 2));
      shrinks += shrunk.ok() ? 1 : 0;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(shrinks, 0);
  VARLANE_EXPECT_OK((*pool)->CheckInvariants());
}

// --- from hand to hand -------------------------------------------------------

// A sequence on its way. Token i of what is written holds Value(i).
struct Parcel {
  SeqId seq = -1;
  uint64_t content = 0;
  int64_t written = 0;
  int last_owner = -1;

  uint32_t Value(int64_t token) const {
    return static_cast<uint32_t>((content + uint64_t(token)) *
                                 0x9e3779b97f4a7c15u) |
           1;
  }
};

class Mailbox {
 public:
  void Put(const Parcel& parcel) {
    const std::lock_guard lock(mutex_);
    parcels_.push_back(parcel);
  }
  bool Take(Parcel* parcel) {
    const std::lock_guard lock(mutex_);
    if (parcels_.empty()) return false;
    *parcel = parcels_.front();
    parcels_.pop_front();
    return true;
  }

 private:
  std::mutex mutex_;
  std::deque<Parcel> parcels_;
};

constexpr int kCouriers = 4;
constexpr int kManyParcels = 100;
constexpr int64_t kLongParcel = 150;  // tokens: so the pool is never full

struct Office {
  std::array<Mailbox, kCouriers> boxes;
  std::atomic<int> parcels{0};
  std::atomic<bool> wants_to_move{false};  // no new step should begin
};

// One thread's part: takes a sequence that another one made or extended, does
// something to it, and passes it on. Only what touches K/V is a step; blocks
// may move beside everything else.
class Courier {
 public:
  Courier(KvPool* pool, Office* office, int self)
      : pool_(pool),
        office_(office),
        self_(self),
        random_(uint64_t(self) + 1) {}

  void Step() {
    Parcel parcel;
    const bool has_one =
        office_->boxes[static_cast<size_t>(self_)].Take(&parcel);
    if (office_->parcels.load() < (has_one ? kManyParcels / 2 : kManyParcels)) {
      Create();
    }
    if (!has_one) return std::this_thread::yield();
    foreign_ += parcel.last_owner != self_ ? 1 : 0;
    if (random_() % 2 == 0) {
      ASSERT_NO_FATAL_FAILURE(Verify(parcel));
    }
    const uint64_t dice = random_() % 100;
    if (parcel.written > kLongParcel) {
      Truncate(&parcel);
    } else if (dice < 50) {
      Extend(&parcel);
    } else if (dice < 70) {
      if (office_->parcels.load() < kManyParcels) Fork(parcel);
    } else if (dice < 85) {
      Truncate(&parcel);
    } else {
      VARLANE_ASSERT_OK(pool_->Free(parcel.seq));
      office_->parcels.fetch_sub(1);
      return;
    }
    Send(parcel);
  }

  int64_t foreign() const { return foreign_; }  // taken from another thread

 private:
  void Send(Parcel parcel) {
    parcel.last_owner = self_;
    office_->boxes[random_() % kCouriers].Put(parcel);
  }

  void BeginStep() {
    while (office_->wants_to_move.load()) std::this_thread::yield();
    pool_->BeginStep();
  }

  void Create() {
    Parcel parcel;
    parcel.seq = pool_->CreateSequence();
    ASSERT_GE(parcel.seq, 0);
    parcel.content = random_();
    office_->parcels.fetch_add(1);
    Extend(&parcel);
    Send(parcel);
  }

  void Extend(Parcel* parcel) {
    const auto tokens = static_cast<int64_t>(1 + random_() % 100);
    const Result<Admission> admission = pool_->Append(parcel->seq, tokens);
    VARLANE_ASSERT_OK(admission);
    if (!admission->admitted()) return;
    const int64_t end = parcel->written + tokens;
    BeginStep();
    std::vector<int64_t> slots(static_cast<size_t>(tokens));
    VARLANE_EXPECT_OK(
        pool_->CopySlotMapping(parcel->seq, parcel->written, slots));
    for (const int64_t slot : slots) {
      testing::WriteFingerprint(*pool_, slot, parcel->Value(parcel->written++));
    }
    pool_->EndStep();
    ASSERT_EQ(parcel->written, end);
  }

  void Fork(const Parcel& parcel) {
    const Result<SeqId> fork = pool_->Fork(parcel.seq);
    VARLANE_ASSERT_OK(fork);
    Parcel copy = parcel;
    copy.seq = *fork;
    office_->parcels.fetch_add(1);
    Send(copy);
  }

  void Truncate(Parcel* parcel) {
    parcel->written = static_cast<int64_t>(
        random_() % static_cast<uint64_t>(parcel->written + 1));
    VARLANE_ASSERT_OK(pool_->Truncate(parcel->seq, parcel->written));
  }

  void Verify(const Parcel& parcel) {
    std::vector<int64_t> slots(static_cast<size_t>(parcel.written));
    BeginStep();
    VARLANE_EXPECT_OK(pool_->CopySlotMapping(parcel.seq, 0, slots));
    int64_t wrong = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      wrong += testing::ReadFingerprint(*pool_, slots[i]) !=
               parcel.Value(static_cast<int64_t>(i));
    }
    pool_->EndStep();
    ASSERT_EQ(wrong, 0) << "of " << slots.size() << " tokens, sequence "
                        << parcel.seq << " from thread " << parcel.last_owner;
  }

  KvPool* const pool_;
  Office* const office_;
  const int self_;
  std::mt19937_64 random_;
  int64_t foreign_ = 0;
};

// What would move blocks is refused while one of the couriers is in a step. In
// some rounds none begins another one, so that it succeeds in the end; beside
// it they go on creating, forking, cutting and freeing.
struct Resizes {
  int64_t moved = 0;
  int64_t shrinks = 0;
  int64_t refused = 0;
};
void ResizeOnce(KvPool* pool, Office* office, int64_t round, Resizes* resizes) {
  const bool insists = round % 4 != 0;
  const bool compacts = round % 4 == 3;
  office->wants_to_move.store(insists);
  for (int attempt = 0; attempt < (insists ? 10'000 : 1); ++attempt) {
    const int64_t free = pool->free_blocks();
    const Result<KvResize> change =
        compacts ? pool->Compact(64)
                 : pool->Shrink(std::max<int64_t>(0, free - 20));
    if (change.ok()) {
      resizes->moved += change->moved_blocks;
      resizes->shrinks += compacts ? 0 : 1;
      break;
    }
    ++resizes->refused;
    std::this_thread::yield();
  }
  office->wants_to_move.store(false);
  if (round % 2 == 1) {
    VARLANE_EXPECT_OK(
        pool->Grow(std::min<int64_t>(400, 2000 - pool->capacity_blocks())));
  }
  if (round % 32 == 0) {
    VARLANE_EXPECT_OK(pool->CheckInvariants());
  }
}

TEST(KvPoolThreadsTest, SequencesChangeHandsWhileBlocksMove) {
  constexpr int kSteps = testing::Operations(100'000, 5'000);
  constexpr int64_t kMoves = testing::Operations(5'000, 300);
  constexpr int kShrinks = 10;
  const auto runtime = MakeRuntime(2);
  auto pool = KvPool::Create({.layout = testing::kModelLayout,
                              .num_blocks = 600,
                              .max_blocks = 2000,
                              .check_limits = false,
                              .shuffle = true,
                              .seed = 5},
                             runtime.get());
  VARLANE_ASSERT_OK(pool);
  Office office;
  std::atomic<bool> is_over{false};
  std::atomic<int64_t> steps{0};
  std::atomic<int64_t> foreign{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kCouriers; ++t) {
    threads.emplace_back([&, t] {
      Courier courier(pool->get(), &office, t);
      while (!is_over.load() && !::testing::Test::HasFailure()) {
        courier.Step();
        steps.fetch_add(1);
      }
      foreign += courier.foreign();
    });
  }
  Resizes resizes;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto has_enough = [&] {
    return steps.load() >= kSteps && resizes.moved >= kMoves &&
           resizes.shrinks > kShrinks;
  };
  for (int64_t round = 0;
       !has_enough() && std::chrono::steady_clock::now() < deadline &&
       !::testing::Test::HasFailure();
       ++round) {
    ResizeOnce(pool->get(), &office, round, &resizes);
    std::this_thread::yield();
  }
  is_over.store(true);
  for (std::thread& thread : threads) thread.join();
  std::printf(
      "%lld blocks moved by %lld shrinks, %lld refused; of %lld steps "
      "%lld with what others had\n",
      static_cast<long long>(resizes.moved),
      static_cast<long long>(resizes.shrinks),
      static_cast<long long>(resizes.refused),
      static_cast<long long>(steps.load()),
      static_cast<long long>(foreign.load()));
  // The premises.
  EXPECT_GE(steps.load(), kSteps);
  // Many steps find an empty box, more of them the busier the machine.
  EXPECT_GT(foreign.load(), testing::Operations(1'000, 100));
  EXPECT_GE(resizes.moved, kMoves);
  EXPECT_GT(resizes.shrinks, kShrinks);
  for (Mailbox& box : office.boxes) {
    for (Parcel parcel; box.Take(&parcel);) {
      VARLANE_EXPECT_OK((*pool)->Free(parcel.seq));
    }
  }
  EXPECT_EQ((*pool)->free_blocks(), (*pool)->capacity_blocks());
  VARLANE_EXPECT_OK((*pool)->CheckInvariants());
}

}  // namespace
}  // namespace varlane
