// BlockAllocator: order, counts, growth, misuse, and a random comparison with a
// naive model.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "memory/free_set.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

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
  BlockAllocator allocator(8);
  EXPECT_EQ(allocator.capacity(), 0);
  EXPECT_EQ(allocator.Allocate(), kNoBlock);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, HandsOutTheLowestFreeIdFirst) {
  BlockAllocator allocator(100);
  ASSERT_TRUE(allocator.Grow(100));
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
    BlockAllocator allocator(1000, seed);
    EXPECT_TRUE(allocator.Grow(600));
    EXPECT_TRUE(allocator.Grow(400));
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
  BlockAllocator allocator(2);
  ASSERT_TRUE(allocator.Grow(2));
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

TEST(BlockAllocatorTest, GrowthAddsBlocksAndKeepsTheOthers) {
  BlockAllocator allocator(200);
  ASSERT_TRUE(allocator.Grow(3));
  EXPECT_EQ(AllocateAll(&allocator).size(), 3u);
  ASSERT_TRUE(allocator.Grow(197));
  EXPECT_EQ(allocator.reference_count(2), 1);
  EXPECT_EQ(allocator.Allocate(), 3);
  EXPECT_EQ(allocator.free_blocks(), 196);
  VARLANE_EXPECT_OK(allocator.CheckInvariants());
}

TEST(BlockAllocatorTest, GrowthPastTheLimitChangesNothing) {
  BlockAllocator allocator(10);
  ASSERT_TRUE(allocator.Grow(4));
  EXPECT_FALSE(allocator.Grow(7));
  EXPECT_FALSE(allocator.Grow(-1));
  EXPECT_FALSE(allocator.Grow(INT64_MAX));
  EXPECT_EQ(allocator.capacity(), 4);
  EXPECT_TRUE(allocator.Grow(6));
}

TEST(BlockAllocatorTest, UnknownIdsHaveNoReferences) {
  BlockAllocator allocator(10);
  ASSERT_TRUE(allocator.Grow(4));
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
  ASSERT_TRUE(allocator->Grow(4));
  EXPECT_EQ(allocator->Allocate(), 0);
  EXPECT_EQ(allocator->Allocate(), 1);
  EXPECT_EQ(allocator->Release(1), Released::kFreed);
}

#if VARLANE_CHECK_LEVEL >= 1
TEST(BlockAllocatorDeathTest, MisuseTraps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Misuse& misuse : kMisuses) {
    BlockAllocator allocator(4);
    Prepare(&allocator);
    EXPECT_DEATH(misuse.run(&allocator), "") << misuse.name;
  }
}
#else
TEST(BlockAllocatorTest, MisuseIsAnErrorAndChangesNothing) {
  for (const Misuse& misuse : kMisuses) {
    SCOPED_TRACE(misuse.name);
    BlockAllocator allocator(4);
    Prepare(&allocator);
    misuse.run(&allocator);
    VARLANE_EXPECT_OK(allocator.CheckInvariants());
    EXPECT_EQ(allocator.free_blocks(), 3);
    EXPECT_EQ(AllocateAll(&allocator), (std::vector<BlockId>{1, 2, 3}));
  }
}
#endif

// What the allocator should be, without any cleverness: a map from referenced
// blocks to their counts, and the order in which free ones are handed out.
class Model {
 public:
  Model(BlockAllocator* real, uint64_t seed) : real_(real), random_(seed) {}

  // One random operation on both; compares what they answer.
  void Step() {
    const uint64_t dice = random_() % 100;
    if (dice < 45 + Bias()) {
      Allocate();
    } else if (dice < 60) {
      Reference();
    } else if (dice < 99) {
      Release();
    } else {
      Grow();
    }
    ASSERT_EQ(real_->free_blocks() + real_->referenced_blocks(),
              real_->capacity());
    ASSERT_EQ(real_->referenced_blocks(), static_cast<int64_t>(counts_.size()));
    ASSERT_EQ(real_->references(), references_);
    ASSERT_EQ(real_->capacity(), capacity_);
  }

  void CompareAll() {
    VARLANE_ASSERT_OK(real_->CheckInvariants());
    for (int64_t i = 0; i < capacity_; ++i) {
      const auto block = static_cast<BlockId>(i);
      const auto found = counts_.find(block);
      ASSERT_EQ(real_->reference_count(block),
                found == counts_.end() ? 0 : found->second);
    }
  }

  // In the model's order, so that a real order can be checked against it.
  void ExpectLowestFirst() { lowest_first_ = true; }
  bool was_ever_full() const { return was_full_; }
  bool was_ever_shared() const { return was_shared_; }

 private:
  // Fills and drains the pool in long waves, so that both ends are met.
  uint64_t Bias() { return ++step_ / 4096 % 2 == 0 ? 12 : 0; }

  BlockId RandomReferenced() {
    const auto at = counts_.lower_bound(
        static_cast<BlockId>(random_() % static_cast<uint64_t>(capacity_)));
    return at == counts_.end() ? counts_.begin()->first : at->first;
  }

  void Allocate() {
    const BlockId block = real_->Allocate();
    if (static_cast<int64_t>(counts_.size()) == capacity_) {
      was_full_ = true;
      ASSERT_EQ(block, kNoBlock);
      return;
    }
    ASSERT_TRUE(block >= 0 && block < capacity_) << block;
    ASSERT_TRUE(counts_.emplace(block, 1).second)
        << "block " << block << " is handed out twice";
    ++references_;
    if (!lowest_first_) return;
    ASSERT_EQ(free_.erase(block), 1u);
    ASSERT_TRUE(free_.empty() || block < *free_.begin());
  }

  void Reference() {
    if (counts_.empty()) return;
    const BlockId block = RandomReferenced();
    ASSERT_TRUE(real_->Reference(block));
    ++counts_[block];
    ++references_;
    was_shared_ = true;
  }

  void Release() {
    if (counts_.empty()) return;
    const BlockId block = RandomReferenced();
    --references_;
    if (--counts_[block] > 0) {
      ASSERT_EQ(real_->Release(block), Released::kShared);
      return;
    }
    counts_.erase(block);
    if (lowest_first_) free_.insert(block);
    ASSERT_EQ(real_->Release(block), Released::kFreed);
  }

  void Grow() {
    const auto more = static_cast<int64_t>(random_() % 40);
    const bool fits = capacity_ + more <= real_->max_blocks();
    ASSERT_EQ(real_->Grow(more), fits);
    if (!fits) return;
    for (int64_t i = 0; lowest_first_ && i < more; ++i) {
      free_.insert(static_cast<BlockId>(capacity_ + i));
    }
    capacity_ += more;
  }

  BlockAllocator* real_;
  std::mt19937_64 random_;
  uint64_t step_ = 0;
  int64_t capacity_ = 0;
  int64_t references_ = 0;
  std::map<BlockId, int32_t> counts_;
  bool lowest_first_ = false;
  std::set<BlockId> free_;  // kept only for lowest_first_
  bool was_full_ = false;
  bool was_shared_ = false;
};

TEST(BlockAllocatorTest, MillionsOfRandomOperationsMatchTheModel) {
  constexpr int kSeeds = 8;
  constexpr int kOperations = testing::kSanitized ? 30'000 : 200'000;
  for (int i = 0; i < kSeeds; ++i) {
    const uint64_t seed = 0x5eed0000u + static_cast<uint64_t>(i);
    const bool shuffle = i % 2 == 1;
    SCOPED_TRACE("seed " + std::to_string(seed) +
                 (shuffle ? ", shuffled" : ", lowest first"));
    std::printf("seed %llu: %d operations, %s\n",
                static_cast<unsigned long long>(seed), kOperations,
                shuffle ? "shuffled" : "lowest first");
    const int64_t max_blocks = i < 4 ? 90 : 4500;  // two levels, three levels
    BlockAllocator allocator =
        shuffle ? BlockAllocator(max_blocks, seed) : BlockAllocator(max_blocks);
    Model model(&allocator, seed);
    if (!shuffle) model.ExpectLowestFirst();
    for (int op = 0; op < kOperations; ++op) {
      model.Step();
      if (op % 5000 == 0) model.CompareAll();
      if (HasFatalFailure()) FAIL() << "at operation " << op;
    }
    model.CompareAll();
    EXPECT_TRUE(model.was_ever_shared());
    if (max_blocks == 90) {
      EXPECT_TRUE(model.was_ever_full());
    }
  }
}

}  // namespace
}  // namespace varlane
