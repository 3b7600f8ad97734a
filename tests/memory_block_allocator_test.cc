// BlockAllocator: order, counts, growth, misuse, and a random comparison with a
// naive model.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "memory/free_set.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

// One node, lowest id first; or shuffled by a seed.
BlockAllocator::Options Plain(int64_t max_blocks) {
  return {.blocks_per_node = max_blocks};
}
BlockAllocator::Options Shuffled(int64_t max_blocks, uint64_t seed) {
  return {.blocks_per_node = max_blocks, .shuffle = true, .seed = seed};
}

std::vector<BlockId> AllocateAll(BlockAllocator* allocator) {
  std::vector<BlockId> blocks;
  for (;;) {
    const BlockId block = allocator->Allocate();
    if (block == kNoBlock) return blocks;
    blocks.push_back(block);
  }
}

TEST(FreeSetTest, FindsTheSmallestMemberAtEveryNumberOfLevels) {
  for (const int64_t limit : {1, 63, 64, 65, 4096, 4097, 262144, 262145}) {
    FreeSet set(limit);
    EXPECT_EQ(set.Min(), -1);
    set.Insert(limit - 1);
    EXPECT_EQ(set.Min(), limit - 1);
    set.Insert(limit / 2);
    EXPECT_EQ(set.Min(), limit / 2);
    EXPECT_TRUE(set.Contains(limit - 1));
    set.Erase(limit / 2);
    EXPECT_EQ(set.CountSlow(), limit / 2 == limit - 1 ? 0 : 1) << limit;
    set.Erase(limit - 1);
    EXPECT_EQ(set.Min(), -1);
    EXPECT_EQ(set.CountSlow(), 0);
  }
}

TEST(FreeSetTest, OfNothingIsEmpty) { EXPECT_EQ(FreeSet(0).Min(), -1); }

TEST(BlockAllocatorTest, HasNoBlocksBeforeItGrows) {
  BlockAllocator allocator(Plain(8));
  EXPECT_EQ(allocator.capacity(), 0);
  EXPECT_EQ(allocator.Allocate(), kNoBlock);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, HandsOutTheLowestFreeIdFirst) {
  BlockAllocator allocator(Plain(100));
  ASSERT_TRUE(allocator.Grow(0, 100));
  const std::vector<BlockId> blocks = AllocateAll(&allocator);
  ASSERT_EQ(blocks.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(blocks[static_cast<size_t>(i)], i);
  for (const BlockId block : {70, 3, 99, 64}) {
    EXPECT_EQ(allocator.Release(block), Released::kFreed);
  }
  EXPECT_EQ(AllocateAll(&allocator), (std::vector<BlockId>{3, 64, 70, 99}));
}

TEST(BlockAllocatorTest, SeedDeterminesAPermutation) {
  const auto order_of = [](uint64_t seed) {
    BlockAllocator allocator(Shuffled(1000, seed));
    EXPECT_TRUE(allocator.Grow(0, 600));
    EXPECT_TRUE(allocator.Grow(0, 400));
    VARLANE_EXPECT_OK(allocator.CheckInvariants());
    return AllocateAll(&allocator);
  };
  const std::vector<BlockId> order = order_of(7);
  EXPECT_EQ(order, order_of(7));
  EXPECT_NE(order, order_of(8));
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(std::set<BlockId>(order.begin(), order.end()).size(), 1000u);
  // Few blocks may stay where they were: 1 is expected.
  int64_t at_home = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    at_home += order[i] == static_cast<BlockId>(i) ? 1 : 0;
  }
  EXPECT_LT(at_home, 20);
}

TEST(BlockAllocatorTest, BlockIsFreedByItsLastRelease) {
  BlockAllocator allocator(Plain(2));
  ASSERT_TRUE(allocator.Grow(0, 2));
  const BlockId block = allocator.Allocate();
  EXPECT_FALSE(allocator.is_shared(block));
  ASSERT_TRUE(allocator.Reference(block));
  EXPECT_TRUE(allocator.is_shared(block));
  EXPECT_EQ(allocator.reference_count(block), 2);
  EXPECT_EQ(allocator.references(), 2);
  EXPECT_EQ(allocator.referenced_blocks(), 1);
  EXPECT_EQ(allocator.Release(block), Released::kShared);
  EXPECT_EQ(allocator.free_blocks(), 1);
  EXPECT_EQ(allocator.Release(block), Released::kFreed);
  EXPECT_EQ(allocator.free_blocks(), 2);
  EXPECT_EQ(allocator.reference_count(block), 0);
}

TEST(BlockAllocatorTest, KeptBlockIsCachedRevivedAndEvicted) {
  BlockAllocator allocator(Plain(3));
  ASSERT_TRUE(allocator.Grow(0, 3));
  EXPECT_FALSE(allocator.Keep(0)) << "a free block has no contents";
  ASSERT_EQ(allocator.Allocate(), 0);
  ASSERT_TRUE(allocator.Keep(0));
  EXPECT_FALSE(allocator.Keep(0));
  EXPECT_EQ(allocator.Release(0), Released::kCached);
  EXPECT_EQ(allocator.state(0), BlockState::kCached);
  EXPECT_EQ(allocator.free_blocks(), 2);
  EXPECT_EQ(allocator.cached_blocks(), 1);
  EXPECT_EQ(allocator.referenced_blocks(), 0);
  EXPECT_EQ(allocator.Allocate(), 1) << "a cached block is not handed out";
  EXPECT_EQ(allocator.Revive(0), Revived::kFromCached);
  EXPECT_EQ(allocator.Revive(0), Revived::kShared);
  EXPECT_EQ(allocator.reference_count(0), 2);
  EXPECT_EQ(allocator.cached_blocks(), 0);
  EXPECT_EQ(allocator.Release(0), Released::kShared);
  EXPECT_EQ(allocator.Release(0), Released::kCached);
  ASSERT_TRUE(allocator.Unkeep(0));
  EXPECT_EQ(allocator.cached_blocks(), 0);
  EXPECT_EQ(allocator.free_blocks(), 1) << "the caller has it";
  EXPECT_EQ(allocator.Revive(0), Revived::kGone);
  EXPECT_FALSE(allocator.Unkeep(0));
  const BlockId freed = 0;
  allocator.Free({&freed, 1});
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
  EXPECT_EQ(allocator.Allocate(), 0);
  // A referenced block that is no longer kept is freed by its last release.
  ASSERT_TRUE(allocator.Keep(0));
  EXPECT_FALSE(allocator.Unkeep(0));
  EXPECT_EQ(allocator.Release(0), Released::kFreed);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, ShrinkTakesFreeBlocksFromTheEndOnly) {
  for (const bool shuffle : {false, true}) {
    BlockAllocator allocator(shuffle ? Shuffled(200, 3) : Plain(200));
    ASSERT_TRUE(allocator.Grow(0, 150));
    EXPECT_FALSE(allocator.Shrink(0, 151));
    EXPECT_FALSE(allocator.Shrink(0, -1));
    ASSERT_TRUE(allocator.Shrink(0, 50));
    std::vector<BlockId> blocks = AllocateAll(&allocator);
    std::sort(blocks.begin(), blocks.end());
    EXPECT_EQ(blocks.size(), 100u);
    EXPECT_EQ(blocks.back(), 99);
    EXPECT_EQ(allocator.Release(99), Released::kFreed);
    EXPECT_FALSE(allocator.Shrink(0, 2)) << "98 is referenced";
    ASSERT_TRUE(allocator.Keep(98));
    EXPECT_EQ(allocator.Release(98), Released::kCached);
    EXPECT_FALSE(allocator.Shrink(0, 2)) << "98 is cached";
    EXPECT_EQ(allocator.free_blocks(), 1);
    EXPECT_TRUE(allocator.Shrink(0, 1));
    VARLANE_EXPECT_OK(allocator.CheckInvariants());
    ASSERT_TRUE(allocator.Grow(0, 101));
    EXPECT_EQ(AllocateAll(&allocator).size(), 101u);
    VARLANE_EXPECT_OK(allocator.CheckInvariants());
  }
}

TEST(BlockAllocatorTest, IdsSayTheirNodeAndAHomeIsFilledFirst) {
  BlockAllocator allocator({.num_nodes = 3, .blocks_per_node = 100});
  for (const int node : {0, 1, 2}) ASSERT_TRUE(allocator.Grow(node, 10));
  EXPECT_FALSE(allocator.IsBlock(10)) << "a hole";
  EXPECT_TRUE(allocator.IsBlock(100));
  EXPECT_EQ(allocator.NodeOf(209), 2);
  std::vector<BlockId> blocks(12);
  int64_t spilled = 0;
  ASSERT_TRUE(allocator.Allocate(blocks, 1, &spilled));
  EXPECT_EQ(spilled, 2);
  EXPECT_EQ(blocks, (std::vector<BlockId>{100, 101, 102, 103, 104, 105, 106,
                                          107, 108, 109, 200, 201}));
  std::vector<BlockId> too_many(19);
  EXPECT_FALSE(allocator.Allocate(too_many, 2, &spilled));
  EXPECT_EQ(allocator.free_blocks(), 18) << "all or nothing";
  EXPECT_EQ(allocator.references(), 12);
  EXPECT_EQ(allocator.counts(2).referenced(), 2);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, MoveKeepsStateAndCount) {
  BlockAllocator allocator({.num_nodes = 2, .blocks_per_node = 100});
  for (const int node : {0, 1}) ASSERT_TRUE(allocator.Grow(node, 4));
  std::vector<BlockId> blocks(6);
  ASSERT_TRUE(allocator.Allocate(blocks, 1));
  ASSERT_TRUE(allocator.Reference(103));
  ASSERT_TRUE(allocator.Keep(102));
  EXPECT_EQ(allocator.Release(102), Released::kCached);
  EXPECT_FALSE(allocator.Move(103, 101)) << "101 is not free";
  EXPECT_FALSE(allocator.Move(3, 2)) << "3 is free";
  EXPECT_FALSE(allocator.Move(103, 4)) << "4 is no block";
  ASSERT_TRUE(allocator.Move(103, 2));
  ASSERT_TRUE(allocator.Move(102, 3));
  EXPECT_EQ(allocator.reference_count(2), 2);
  EXPECT_EQ(allocator.state(3), BlockState::kCached);
  EXPECT_EQ(allocator.state(103), BlockState::kFree);
  EXPECT_EQ(allocator.counts(0).cached, 1);
  EXPECT_EQ(allocator.counts(0).free, 0);
  EXPECT_EQ(allocator.counts(1).free, 2);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
  EXPECT_TRUE(allocator.Shrink(1, 2));
}

// Threads that take and give in any way never get the same block twice, and
// never miss one that is there.
TEST(BlockAllocatorTest, ThreadsAllocateReferenceKeepAndFreeAtOnce) {
  constexpr int kThreads = 8;
  constexpr int64_t kEach = 40;
  constexpr int kRounds = testing::kSanitized ? 2'000 : 20'000;
  // Exactly what all want together: a miss would show as a refusal.
  BlockAllocator allocator(Plain(kThreads * kEach));
  ASSERT_TRUE(allocator.Grow(0, kThreads * kEach));
  std::vector<std::atomic<int>> owner(kThreads * kEach);
  std::atomic<int64_t> faults{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t));
      std::vector<BlockId> blocks;
      for (int round = 0; round < kRounds; ++round) {
        blocks.resize(1 + random() % kEach);
        const auto half = blocks.size() / 2;
        if (!allocator.Allocate(std::span(blocks).first(half)) ||
            !allocator.Allocate(std::span(blocks).subspan(half))) {
          faults.fetch_add(1);
          return;
        }
        for (const BlockId block : blocks) {
          faults += owner[static_cast<size_t>(block)].exchange(t + 1) != 0;
          faults += allocator.Reference(block) ? 0 : 1;
          if (block % 3 == 0) faults += allocator.Keep(block) ? 0 : 1;
        }
        for (const BlockId block : blocks) {
          faults += allocator.Release(block) != Released::kShared;
          owner[static_cast<size_t>(block)].store(0);
          const Released released = allocator.Release(block);
          if (released == Released::kFreed) continue;
          faults += released != Released::kCached || !allocator.Unkeep(block);
          allocator.Free({&block, 1});
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(faults.load(), 0);
  EXPECT_EQ(allocator.free_blocks(), kThreads * kEach);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, GrowthAddsBlocksAndKeepsTheOthers) {
  BlockAllocator allocator(Plain(200));
  ASSERT_TRUE(allocator.Grow(0, 3));
  EXPECT_EQ(AllocateAll(&allocator).size(), 3u);
  ASSERT_TRUE(allocator.Grow(0, 197));
  EXPECT_EQ(allocator.reference_count(2), 1);
  EXPECT_EQ(allocator.Allocate(), 3);
  EXPECT_EQ(allocator.free_blocks(), 196);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, GrowthPastTheLimitChangesNothing) {
  BlockAllocator allocator(Plain(10));
  ASSERT_TRUE(allocator.Grow(0, 4));
  EXPECT_FALSE(allocator.Grow(0, 7));
  EXPECT_FALSE(allocator.Grow(0, -1));
  EXPECT_FALSE(allocator.Grow(0, INT64_MAX));
  EXPECT_EQ(allocator.capacity(), 4);
  EXPECT_TRUE(allocator.Grow(0, 6));
}

TEST(BlockAllocatorTest, UnknownIdsHaveNoReferences) {
  BlockAllocator allocator(Plain(10));
  ASSERT_TRUE(allocator.Grow(0, 4));
  for (const BlockId block : {-1, 4, 10, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(allocator.reference_count(block), 0);
  }
}

// The same misuse: a checked error in release, a trap in debug.
struct Misuse {
  const char* name;
  void (*run)(BlockAllocator*);
};
const Misuse kMisuses[] = {
    {"double free",
     [](BlockAllocator* a) { EXPECT_EQ(a->Release(1), Released::kError); }},
    {"free of a block that is none",
     [](BlockAllocator* a) { EXPECT_EQ(a->Release(4), Released::kError); }},
    {"free of no block",
     [](BlockAllocator* a) {
       EXPECT_EQ(a->Release(kNoBlock), Released::kError);
     }},
    {"reference to a free block",
     [](BlockAllocator* a) { EXPECT_FALSE(a->Reference(1)); }},
};

void Prepare(BlockAllocator* allocator) {
  ASSERT_TRUE(allocator->Grow(0, 4));
  EXPECT_EQ(allocator->Allocate(), 0);
  EXPECT_EQ(allocator->Allocate(), 1);
  EXPECT_EQ(allocator->Release(1), Released::kFreed);
}

#if VARLANE_CHECK_LEVEL >= 1
TEST(BlockAllocatorDeathTest, MisuseTraps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Misuse& misuse : kMisuses) {
    BlockAllocator allocator(Plain(4));
    Prepare(&allocator);
    EXPECT_DEATH(misuse.run(&allocator), "") << misuse.name;
  }
}
#else
TEST(BlockAllocatorTest, MisuseIsAnErrorAndChangesNothing) {
  for (const Misuse& misuse : kMisuses) {
    SCOPED_TRACE(misuse.name);
    BlockAllocator allocator(Plain(4));
    Prepare(&allocator);
    misuse.run(&allocator);
    VARLANE_EXPECT_OK(allocator.CheckInvariants());
    EXPECT_EQ(allocator.free_blocks(), 3);
    EXPECT_EQ(AllocateAll(&allocator), (std::vector<BlockId>{1, 2, 3}));
  }
}
#endif

// What the allocator should be, without any cleverness: sets of blocks by
// state, counts in a map.
class Model {
 public:
  Model(BlockAllocator* real, bool lowest_first, uint64_t seed)
      : real_(real), lowest_first_(lowest_first), random_(seed) {}

  // One random operation on both; compares what they answer, and the totals.
  void Step() {
    const uint64_t dice = Random(200);
    if (dice < 90 + Bias()) {
      Allocate();
    } else if (dice < 116) {
      Reference();
    } else if (dice < 184) {
      Release();
    } else if (dice < 188) {
      Keep();
    } else if (dice < 190) {
      Revive();
    } else if (dice < 193) {
      Unkeep();
    } else if (dice < 196) {
      Move();
    } else if (dice < 198) {
      Shrink();
    } else {
      Grow();
    }
    const BlockCounts counts = real_->counts();
    ASSERT_EQ(counts.free + counts.cached + counts.referenced(),
              counts.capacity);
    ASSERT_EQ(counts.free, std::ssize(free_));
    ASSERT_EQ(counts.cached, std::ssize(cached_));
    ASSERT_EQ(counts.referenced(), std::ssize(counts_));
    ASSERT_EQ(counts.capacity, capacity_);
    ASSERT_EQ(real_->references(), references_);
  }

  void CompareAll() {
    VARLANE_ASSERT_OK(real_->CheckInvariants());
    for (int64_t i = 0; i < capacity_; ++i) {
      const auto block = static_cast<BlockId>(i);
      const auto found = counts_.find(block);
      ASSERT_EQ(real_->reference_count(block),
                found == counts_.end() ? 0 : found->second);
      ASSERT_EQ(real_->is_kept(block), kept_.contains(block));
      ASSERT_EQ(real_->state(block) == BlockState::kFree,
                free_.contains(block));
    }
  }

  bool was_ever_full() const { return was_full_; }
  // Each kind of operation was done, with either outcome where there are two.
  bool did_everything() const { return done_.size() == 11; }

 private:
  uint64_t Random(uint64_t bound) { return random_() % bound; }
  // Fills and drains the pool in long waves, so that both ends are met.
  uint64_t Bias() { return ++step_ / 4096 % 2 == 0 ? 24 : 0; }

  // One of a set or map of blocks, or kNoBlock.
  template <typename Blocks>
  BlockId PickKey(const Blocks& blocks) {
    if (blocks.empty()) return kNoBlock;
    auto at = blocks.lower_bound(
        static_cast<BlockId>(Random(static_cast<uint64_t>(capacity_))));
    if (at == blocks.end()) at = blocks.begin();
    if constexpr (std::is_same_v<Blocks, std::set<BlockId>>) {
      return *at;
    } else {
      return at->first;
    }
  }

  void Allocate() {
    const BlockId block = real_->Allocate();
    if (free_.empty()) {
      was_full_ = true;
      ASSERT_EQ(block, kNoBlock);
      return;
    }
    if (lowest_first_) {
      ASSERT_EQ(block, *free_.begin());
    }
    ASSERT_EQ(free_.erase(block), 1u) << "block " << block << " was not free";
    counts_[block] = 1;
    ++references_;
  }

  void Reference() {
    const BlockId block = PickKey(counts_);
    if (block == kNoBlock) return;
    ASSERT_TRUE(real_->Reference(block));
    ++counts_[block];
    ++references_;
    done_.insert("reference");
  }

  void Release() {
    const BlockId block = PickKey(counts_);
    if (block == kNoBlock) return;
    --references_;
    if (--counts_[block] > 0) {
      ASSERT_EQ(real_->Release(block), Released::kShared);
      return;
    }
    counts_.erase(block);
    const bool kept = kept_.contains(block);
    (kept ? cached_ : free_).insert(block);
    ASSERT_EQ(real_->Release(block),
              kept ? Released::kCached : Released::kFreed);
    done_.insert(kept ? "cache" : "free");
  }

  void Keep() {
    const BlockId block = PickKey(counts_);
    if (block == kNoBlock) return;
    ASSERT_EQ(real_->Keep(block), kept_.insert(block).second);
  }

  void Revive() {
    const BlockId block = PickKey(kept_);
    if (block == kNoBlock) return;
    const bool was_cached = cached_.erase(block) != 0;
    ASSERT_EQ(real_->Revive(block),
              was_cached ? Revived::kFromCached : Revived::kShared);
    ++counts_[block];
    ++references_;
    done_.insert(was_cached ? "revive" : "share");
  }

  void Unkeep() {
    const BlockId block = PickKey(kept_);
    if (block == kNoBlock) return;
    kept_.erase(block);
    const bool was_cached = cached_.erase(block) != 0;
    ASSERT_EQ(real_->Unkeep(block), was_cached);
    if (!was_cached) return;
    ASSERT_EQ(real_->Revive(block), Revived::kGone);
    real_->Free({&block, 1});
    free_.insert(block);
    done_.insert("evict");
  }

  void Move() {
    const BlockId to = PickKey(free_);
    const BlockId from = Random(2) == 0 && !cached_.empty() ? PickKey(cached_)
                                                            : PickKey(counts_);
    if (to == kNoBlock || from == kNoBlock) return;
    ASSERT_FALSE(real_->Move(to, to));
    ASSERT_TRUE(real_->Move(from, to));
    free_.erase(to);
    free_.insert(from);
    if (kept_.erase(from) != 0) kept_.insert(to);
    if (cached_.erase(from) != 0) {
      cached_.insert(to);
      done_.insert("move cached");
      return;
    }
    counts_[to] = counts_[from];
    counts_.erase(from);
    done_.insert("move");
  }

  void Shrink() {
    const auto fewer = static_cast<int64_t>(Random(4));
    const auto first = static_cast<BlockId>(capacity_ - fewer);
    const bool fits =
        fewer <= capacity_ &&
        std::distance(free_.lower_bound(first), free_.end()) == fewer;
    ASSERT_EQ(real_->Shrink(0, fewer), fits);
    done_.insert(fits ? "shrink" : "refused shrink");
    if (!fits) return;
    free_.erase(free_.lower_bound(first), free_.end());
    capacity_ -= fewer;
  }

  void Grow() {
    const auto more = static_cast<int64_t>(Random(40));
    const bool fits = capacity_ + more <= real_->max_blocks();
    ASSERT_EQ(real_->Grow(0, more), fits);
    if (!fits) return;
    for (int64_t i = 0; i < more; ++i) {
      free_.insert(static_cast<BlockId>(capacity_ + i));
    }
    capacity_ += more;
    done_.insert("grow");
  }

  BlockAllocator* real_;
  const bool lowest_first_;
  std::mt19937_64 random_;
  uint64_t step_ = 0;
  int64_t capacity_ = 0;
  int64_t references_ = 0;
  std::map<BlockId, int32_t> counts_;  // referenced
  std::set<BlockId> kept_;             // cached, or referenced
  std::set<BlockId> cached_;
  std::set<BlockId> free_;
  bool was_full_ = false;
  std::set<std::string> done_;
};

void RunModel(int operations) {
  constexpr int kSeeds = 8;
  for (int i = 0; i < kSeeds; ++i) {
    const uint64_t seed = 0x5eed0000u + static_cast<uint64_t>(i);
    const bool shuffle = i % 2 == 1;
    SCOPED_TRACE("seed " + std::to_string(seed) +
                 (shuffle ? ", shuffled" : ", lowest first"));
    std::printf("seed %llu: %d operations, %s\n",
                static_cast<unsigned long long>(seed), operations,
                shuffle ? "shuffled" : "lowest first");
    const int64_t max_blocks = i < 4 ? 90 : 4500;  // two levels, three levels
    BlockAllocator allocator(shuffle ? Shuffled(max_blocks, seed)
                                     : Plain(max_blocks));
    Model model(&allocator, !shuffle, seed);
    for (int op = 0; op < operations; ++op) {
      model.Step();
      if (op % 5000 == 0) model.CompareAll();
      if (::testing::Test::HasFatalFailure()) FAIL() << "at operation " << op;
    }
    model.CompareAll();
    EXPECT_TRUE(model.did_everything());
    if (max_blocks == 90) {
      EXPECT_TRUE(model.was_ever_full());
    }
  }
}

// With those of memory_kv_pool_model_test ten million and more: here 8 x
// 150,000 by default and 8 x 1,200,000 under the label `full`.
TEST(BlockAllocatorTest, RandomOperationsMatchTheModel) {
  RunModel(testing::kSanitized ? 20'000 : 150'000);
}

TEST(BlockAllocatorTest, DISABLED_MillionsOfRandomOperationsMatchTheModel) {
  RunModel(1'200'000);
}

}  // namespace
}  // namespace varlane
