// BlockAllocator against a naive model: random operations, after each of which
// all totals are equal.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <type_traits>

#include "memory/block_allocator.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

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
    BlockAllocator allocator(
        {.blocks_per_node = max_blocks, .shuffle = shuffle, .seed = seed});
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

// With those of memory_kv_pool_model_test more than ten million by default: 8 x
// 1,200,000 here and 3 x 150,000 there. The label `full` does ten times as
// many.
TEST(BlockAllocatorModelTest, RandomOperationsMatchTheModel) {
  RunModel(testing::Operations(1'200'000, 20'000));
}

TEST(BlockAllocatorModelTest, DISABLED_ManyMoreRandomOperationsMatchTheModel) {
  RunModel(12'000'000);
}

}  // namespace
}  // namespace varlane
