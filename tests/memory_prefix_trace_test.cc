// Hit rates of the prefix cache, driven as the pool drives it, against the
// simplest LRU of prefixes there is and against published figures.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "memory/prefix_cache.h"
#include "tests/testing/prefix_lru.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using testing::HashIds;
using testing::kOracleCapacities;
using testing::NaivePrefixLru;
using testing::PrefixOracle;

struct Tally {
  int64_t blocks = 0;
  int64_t hits = 0;
};

constexpr int kBlockSize = 3;

// A pool of `capacity` blocks without bytes: takes what is free, then evicts.
class CachedPool {
 public:
  explicit CachedPool(int64_t capacity)
      : capacity_(capacity),
        cache_({.block_size = kBlockSize,
                .max_blocks = capacity,
                .key = {.k0 = 3, .k1 = 4}}) {}

  void Request(const HashIds& prompt, Tally* tally) {
    tokens_.clear();
    for (const int64_t id : prompt) {
      // Nothing but the id tells two blocks apart.
      tokens_.insert(tokens_.end(), {static_cast<int32_t>(id), 5, 6});
    }
    blocks_.clear();
    PrefixCache::Cursor cursor = cache_.Find(0, tokens_, &blocks_).cursor;
    const size_t hits = blocks_.size();
    for (const BlockId block : blocks_) cache_.Acquire(block);
    for (size_t i = hits; i < prompt.size(); ++i) {
      const BlockId block =
          used_ < capacity_ ? static_cast<BlockId>(used_++) : cache_.Evict();
      ASSERT_NE(block, kNoBlock);
      const auto tokens = std::span<const int32_t>(tokens_).subspan(
          i * kBlockSize, size_t{kBlockSize});
      ASSERT_EQ(cache_.Insert(&cursor, tokens, block), block);
      blocks_.push_back(block);
    }
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
      ASSERT_TRUE(cache_.Release(*block));
    }
    tally->blocks += static_cast<int64_t>(prompt.size());
    tally->hits += static_cast<int64_t>(hits);
  }

  const PrefixCache& cache() const { return cache_; }

 private:
  int64_t capacity_;
  int64_t used_ = 0;
  PrefixCache cache_;
  std::vector<int32_t> tokens_;
  std::vector<BlockId> blocks_;
};

// Request by request, not only in the end.
void ExpectEqualHits(const std::vector<HashIds>& prompts, int64_t capacity,
                     Tally* tally) {
  int64_t expected = 0;
  NaivePrefixLru lru(capacity);
  CachedPool pool(capacity);
  for (size_t i = 0; i < prompts.size(); ++i) {
    expected += lru.Request(prompts[i]);
    ASSERT_NO_FATAL_FAILURE(pool.Request(prompts[i], tally));
    ASSERT_EQ(tally->hits, expected) << "request " << i;
  }
  VARLANE_EXPECT_OK(pool.cache().CheckInvariants());
  const PrefixCacheStats& stats = pool.cache().stats();
  EXPECT_EQ(stats.lookup_blocks, tally->blocks);
  EXPECT_EQ(stats.hit_blocks, tally->hits);
  EXPECT_EQ(stats.inserted_blocks - stats.evicted_blocks, stats.cached_blocks);
}

TEST(PrefixTraceTest, EqualsTheSimplestLruOnConversations) {
  const std::vector<HashIds> prompts = testing::MakeConversations(6000, 31);
  int64_t last = -1;
  for (const int64_t capacity : {90, 150, 300, 700}) {
    SCOPED_TRACE(capacity);
    Tally tally;
    ExpectEqualHits(prompts, capacity, &tally);
    // The premise: capacity matters.
    EXPECT_GT(tally.hits, last);
    last = tally.hits;
  }
}

class PrefixOracleTest : public ::testing::TestWithParam<PrefixOracle> {};

TEST_P(PrefixOracleTest, HitRateOfAPublicTrace) {
  const std::string path =
      std::string(VARLANE_SOURCE_DIR) + "/../shared/traces/" + GetParam().file;
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there (docs/prefix_cache.md)";
  }
  const std::vector<HashIds> prompts = testing::ReadHashIds(path);
  ASSERT_GT(prompts.size(), 3000u);
  for (size_t i = 0; i < kOracleCapacities.size(); ++i) {
    SCOPED_TRACE(kOracleCapacities[i]);
    Tally tally;
    ExpectEqualHits(prompts, kOracleCapacities[i], &tally);
    const std::string percent = testing::Percent(tally.hits, tally.blocks);
    EXPECT_EQ(percent, GetParam().percent[i]);
    std::printf("%7lld blocks: %s%%\n",
                static_cast<long long>(kOracleCapacities[i]), percent.c_str());
  }
}

INSTANTIATE_TEST_SUITE_P(Mooncake, PrefixOracleTest,
                         ::testing::ValuesIn(testing::kPrefixOracles),
                         [](const auto& oracle) {
                           return std::string(oracle.index == 0 ? "conversation"
                                                                : "synthetic");
                         });

}  // namespace
}  // namespace varlane
