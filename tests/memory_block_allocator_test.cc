// BlockAllocator: order, counts, growth, misuse, threads.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
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
  constexpr int kRounds = testing::Operations(20'000, 2'000);
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

}  // namespace
}  // namespace varlane
