// The prefix cache, one promise a test. Random operations are in
// memory_prefix_cache_model_test.cc, traces in memory_prefix_trace_test.cc.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/prefix_cache.h"

#include <vector>

#include "tests/testing/testing.h"
#include "tests/testing/tokens.h"

namespace varlane {
namespace {

using Blocks = std::vector<BlockId>;
using testing::From;
using testing::operator+;
using testing::Tokens;

constexpr int kBlockSize = 4;

PrefixCache MakeCache(uint64_t hash_mask = ~uint64_t{0}) {
  return PrefixCache({.block_size = kBlockSize,
                      .max_blocks = 64,
                      .key = {.k0 = 1, .k1 = 2},
                      .hash_mask = hash_mask});
}

// Indexes tokens' blocks under these ids, all referenced.
PrefixCache::Cursor Add(PrefixCache* cache, uint64_t tenant,
                        const Tokens& tokens, const Blocks& blocks) {
  PrefixCache::Cursor cursor = {.tenant = tenant};
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto block =
        std::span(tokens).subspan(i * kBlockSize, size_t{kBlockSize});
    (void)cache->Insert(&cursor, block, blocks[i]);
  }
  VARLANE_EXPECT_OK(cache->CheckInvariants());
  return cursor;
}

void ReleaseAll(PrefixCache* cache, const Blocks& blocks) {
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    EXPECT_TRUE(cache->Release(*block));
  }
  VARLANE_EXPECT_OK(cache->CheckInvariants());
}

Blocks FindBlocks(PrefixCache* cache, uint64_t tenant, const Tokens& tokens) {
  Blocks blocks;
  (void)cache->Find(tenant, tokens, &blocks);
  return blocks;
}

Blocks EvictAll(PrefixCache* cache) {
  Blocks order;
  for (BlockId block = cache->Evict(); block != kNoBlock;
       block = cache->Evict()) {
    order.push_back(block);
    VARLANE_EXPECT_OK(cache->CheckInvariants());
  }
  return order;
}

TEST(PrefixCacheTest, FindsTheLongestKnownPrefixInWholeBlocks) {
  PrefixCache cache = MakeCache();
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 12)), Blocks({}));
  Add(&cache, 0, From(1, 12), {5, 3, 9});
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 12)), Blocks({5, 3, 9}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 11)), Blocks({5, 3}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 50)), Blocks({5, 3, 9}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 4) + From(9, 4)), Blocks({5}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(5, 8)), Blocks({}));
  EXPECT_EQ(FindBlocks(&cache, 0, {}), Blocks({}));
  const PrefixCacheStats stats = cache.stats();
  EXPECT_EQ(stats.lookups, 7);
  EXPECT_EQ(stats.lookup_blocks, 3 + 3 + 2 + 12 + 2 + 2 + 0);
  EXPECT_EQ(stats.hit_blocks, 0 + 3 + 2 + 3 + 1 + 0 + 0);
  EXPECT_EQ(stats.inserted_blocks, 3);
  EXPECT_EQ(stats.collisions, 0);
}

TEST(PrefixCacheTest, EqualTokensBehindAnotherPrefixAreAnotherBlock) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 4) + From(50, 4), {0, 1});
  Add(&cache, 0, From(9, 4) + From(50, 4), {2, 3});
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 4) + From(50, 4)), Blocks({0, 1}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(9, 4) + From(50, 4)), Blocks({2, 3}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(50, 4)), Blocks({}));
}

TEST(PrefixCacheTest, TenantsDoNotSeeEachOther) {
  PrefixCache cache = MakeCache();
  Add(&cache, 1, From(1, 8), {0, 1});
  EXPECT_EQ(FindBlocks(&cache, 2, From(1, 8)), Blocks({}));
  Add(&cache, 2, From(1, 8), {2, 3});
  EXPECT_EQ(FindBlocks(&cache, 1, From(1, 8)), Blocks({0, 1}));
  EXPECT_EQ(FindBlocks(&cache, 2, From(1, 8)), Blocks({2, 3}));
  // Nor do parts of blocks cross over.
  Blocks none;
  EXPECT_EQ(cache.Find(3, From(1, 3), &none).partial_tokens, 0);
}

// Every hash is 0: tenants, parents and tokens alone tell blocks apart.
TEST(PrefixCacheTest, CollidingHashesAreNeverAWrongHit) {
  PrefixCache cache = MakeCache(/*hash_mask=*/0);
  Add(&cache, 1, From(1, 8), {0, 1});
  EXPECT_EQ(FindBlocks(&cache, 2, From(1, 8)), Blocks({}));
  EXPECT_EQ(FindBlocks(&cache, 1, From(2, 8)), Blocks({}));
  EXPECT_EQ(FindBlocks(&cache, 1, From(5, 8)), Blocks({}));
  EXPECT_EQ(FindBlocks(&cache, 1, From(1, 4) + From(1, 4)), Blocks({0}));
  Add(&cache, 2, From(1, 8), {2, 3});
  Add(&cache, 1, From(5, 8), {4, 5});
  EXPECT_EQ(FindBlocks(&cache, 1, From(1, 8)), Blocks({0, 1}));
  EXPECT_EQ(FindBlocks(&cache, 2, From(1, 8)), Blocks({2, 3}));
  EXPECT_EQ(FindBlocks(&cache, 1, From(5, 8)), Blocks({4, 5}));
  EXPECT_GT(cache.stats().collisions, 5);
}

TEST(PrefixCacheTest, AKnownBlockIsNotIndexedTwice) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 8), {0, 1});
  PrefixCache::Cursor cursor;
  EXPECT_EQ(cache.Insert(&cursor, From(1, 4), 7), 0);
  EXPECT_FALSE(cache.Contains(7));
  EXPECT_EQ(cache.BlockAt(cursor), 0);
  EXPECT_EQ(cache.Insert(&cursor, From(5, 4), 8), 1);
  EXPECT_EQ(cache.Insert(&cursor, From(9, 4), 9), 9);
  EXPECT_EQ(cache.stats().duplicate_blocks, 2);
  EXPECT_EQ(cache.stats().inserted_blocks, 3);
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 12)), Blocks({0, 1, 9}));
}

TEST(PrefixCacheTest, ABlockIsNotIndexedAsTwoPrefixes) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 4), {0});
  PrefixCache::Cursor cursor;
  EXPECT_EQ(cache.Insert(&cursor, From(9, 4), 0), kNoBlock);
  EXPECT_EQ(cursor.node, PrefixCache::kStart);
  // Nor exchanged for one that is known.
  Add(&cache, 0, From(20, 4), {1});
  EXPECT_EQ(cache.Insert(&cursor, From(20, 4), 0), kNoBlock);
  VARLANE_EXPECT_OK(cache.CheckInvariants());
  EXPECT_EQ(FindBlocks(&cache, 0, From(9, 4)), Blocks({}));
  // As what it is: that is no contradiction.
  EXPECT_EQ(cache.Insert(&cursor, From(1, 4), 0), 0);
}

TEST(PrefixCacheTest, ABlockNeverInsertedIsFreeWhenReleased) {
  PrefixCache cache = MakeCache();
  EXPECT_FALSE(cache.Release(3));
  EXPECT_FALSE(cache.Release(63));
  cache.Acquire(3);
  EXPECT_EQ(cache.Evict(), kNoBlock);
  EXPECT_EQ(cache.stats().cached_blocks, 0);
}

TEST(PrefixCacheTest, ReferencedBlocksAreNotEvicted) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 12), {0, 1, 2});
  EXPECT_EQ(cache.Evict(), kNoBlock);
  EXPECT_TRUE(cache.Release(2));
  EXPECT_EQ(cache.evictable_blocks(), 1);
  EXPECT_EQ(EvictAll(&cache), Blocks({2}));
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 12)), Blocks({0, 1}));
  EXPECT_EQ(cache.stats().evicted_blocks, 1);
}

TEST(PrefixCacheTest, TheLongestUnusedGoesFirstAndOfASequenceItsTail) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 12), {0, 1, 2});
  Add(&cache, 0, From(50, 8), {3, 4});
  ReleaseAll(&cache, {3, 4});
  ReleaseAll(&cache, {0, 1, 2});
  // Used again: 3, but not 4.
  cache.Acquire(3);
  ReleaseAll(&cache, {3});
  EXPECT_EQ(EvictAll(&cache), Blocks({4, 2, 1, 0, 3}));
}

// Two branches of one prefix, released one after the other: the shared block
// outlives both.
TEST(PrefixCacheTest, APrefixIsNotEvictedBeforeWhatFollowsIt) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 8), {0, 1});
  Add(&cache, 0, From(1, 4) + From(70, 8), {0, 2, 3});
  EXPECT_TRUE(cache.Release(1));  // the first sequence; block 0 is held still
  ReleaseAll(&cache, {0, 2, 3});
  EXPECT_EQ(EvictAll(&cache), Blocks({1, 3, 2, 0}));
}

TEST(PrefixCacheTest, ThePinnedStay) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 12), {0, 1, 2});
  ReleaseAll(&cache, {0, 1, 2});
  Blocks found;
  const PrefixCache::Cursor pinned = cache.Find(0, From(1, 8), &found).cursor;
  cache.Pin(pinned);
  cache.Pin(pinned);
  VARLANE_EXPECT_OK(cache.CheckInvariants());
  EXPECT_EQ(cache.stats().pinned_blocks, 2);
  EXPECT_EQ(cache.stats().cached_blocks, 3);
  EXPECT_EQ(EvictAll(&cache), Blocks({2}));
  cache.Unpin(pinned);
  EXPECT_EQ(cache.Evict(), kNoBlock);
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 12)), Blocks({0, 1}));
  // Referenced while pinned, and the other way round.
  cache.Acquire(0);
  cache.Acquire(1);
  cache.Unpin(pinned);
  EXPECT_EQ(cache.Evict(), kNoBlock);
  ReleaseAll(&cache, {0, 1});
  EXPECT_EQ(EvictAll(&cache), Blocks({1, 0}));
  EXPECT_EQ(cache.stats().pinned_blocks, 0);
}

TEST(PrefixCacheTest, TheNextBlockMayBeginLikeAKnownOne) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 8), {0, 1});
  Add(&cache, 0, From(1, 4) + Tokens({5, 6, 90, 91}), {0, 2});
  const auto find = [&](const Tokens& tokens) {
    Blocks blocks;
    return cache.Find(0, tokens, &blocks);
  };
  // 5 6 7 | 9: three tokens of block 1, two of block 2.
  PrefixCache::Match match = find(From(1, 4) + Tokens({5, 6, 7, 9}));
  EXPECT_EQ(match.partial_block, 1);
  EXPECT_EQ(match.partial_tokens, 3);
  match = find(From(1, 4) + Tokens({5, 6, 90, 9}));
  EXPECT_EQ(match.partial_block, 2);
  EXPECT_EQ(match.partial_tokens, 3);
  // Fewer tokens than a block.
  match = find(From(1, 6));
  EXPECT_EQ(match.partial_tokens, 2);
  match = find(From(1, 3));
  EXPECT_EQ(match.partial_block, 0);
  EXPECT_EQ(match.partial_tokens, 3);
  EXPECT_EQ(cache.stats().partial_hits, 4);
  EXPECT_EQ(cache.stats().partial_hit_tokens, 3 + 3 + 2 + 3);
  // Nothing in common, or nothing left.
  match = find(From(1, 4) + From(80, 4));
  EXPECT_EQ(match.partial_block, kNoBlock);
  EXPECT_EQ(match.partial_tokens, 0);
  EXPECT_EQ(find(From(1, 8)).partial_tokens, 0);
  EXPECT_EQ(cache.stats().partial_hits, 4);
}

TEST(PrefixCacheTest, OnlyTheLatestSiblingsAreLookedAtForAPart) {
  PrefixCache cache = MakeCache();
  for (int i = 0; i <= PrefixCache::kSiblings; ++i) {
    Add(&cache, 0, Tokens({100 + i, 100 + i, 1, 2}), {i});
  }
  Blocks none;
  EXPECT_EQ(cache.Find(0, Tokens({100, 100}), &none).partial_tokens, 0);
  EXPECT_EQ(cache.Find(0, Tokens({101, 101}), &none).partial_block, 1);
}

TEST(PrefixCacheTest, AMovedBlockKeepsItsPlace) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 12), {40, 1, 2});
  ReleaseAll(&cache, {40, 1, 2});
  cache.Move(40, 0);
  cache.Move(1, 40);
  cache.Move(17, 18);  // not indexed: nothing happens
  VARLANE_EXPECT_OK(cache.CheckInvariants());
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 12)), Blocks({0, 40, 2}));
  EXPECT_FALSE(cache.Contains(1));
  EXPECT_EQ(EvictAll(&cache), Blocks({2, 40, 0}));
}

TEST(PrefixCacheTest, AForgottenBlockIsFoundNoMore) {
  PrefixCache cache = MakeCache();
  Add(&cache, 0, From(1, 8), {0, 1});
  EXPECT_FALSE(cache.IsLooseLeaf(0));
  EXPECT_TRUE(cache.IsLooseLeaf(1));
  EXPECT_EQ(
      std::vector<int32_t>(cache.Tokens(1).begin(), cache.Tokens(1).end()),
      From(5, 4));
  cache.Forget(1);
  VARLANE_EXPECT_OK(cache.CheckInvariants());
  EXPECT_TRUE(cache.IsLooseLeaf(0));
  EXPECT_EQ(FindBlocks(&cache, 0, From(1, 8)), Blocks({0}));
  EXPECT_FALSE(cache.Release(1));
  EXPECT_EQ(cache.stats().evicted_blocks, 0);
}

TEST(PrefixCacheTest, ACursorGoesBack) {
  PrefixCache cache = MakeCache();
  PrefixCache::Cursor cursor = Add(&cache, 6, From(1, 8), {4, 5});
  EXPECT_EQ(cache.BlockAt(cursor), 5);
  cursor = cache.Parent(cursor);
  EXPECT_EQ(cache.BlockAt(cursor), 4);
  EXPECT_EQ(cursor.tenant, 6u);
  cursor = cache.Parent(cursor);
  EXPECT_EQ(cache.BlockAt(cursor), kNoBlock);
  EXPECT_EQ(cache.Insert(&cursor, From(1, 4), 9), 4);
}

}  // namespace
}  // namespace varlane
