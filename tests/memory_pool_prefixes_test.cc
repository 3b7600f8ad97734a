// The prefix cache over the states of blocks: one promise a test, then threads.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/pool_prefixes.h"

#include <atomic>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "tests/testing/tokens.h"

namespace varlane {
namespace {

using testing::From;
using testing::operator+;
using testing::Tokens;

constexpr int kBlockSize = 4;
constexpr auto kIgnore = [](BlockId /*revived*/) {};
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

struct Sequence {
  explicit Sequence(uint64_t tenant = 0) { tokens.cursor.tenant = tenant; }
  CommittedTokens tokens;
  BlockTable table{kBlockSize};
};

// What KvPool does with them, without bytes.
class Pool {
 public:
  explicit Pool(int64_t num_blocks)
      : allocator_({.blocks_per_node = num_blocks}),
        prefixes_({.block_size = kBlockSize,
                   .max_blocks = num_blocks,
                   .key = {.k0 = 8, .k1 = 9}},
                  &allocator_) {
    (void)allocator_.Grow(0, num_blocks);
  }

  BlockAllocator& allocator() { return allocator_; }
  PoolPrefixes& prefixes() { return prefixes_; }

  // kNoBlock: neither free nor evictable.
  BlockId Allocate() {
    for (;;) {
      const BlockId block = allocator_.Allocate();
      if (block != kNoBlock) return block;
      BlockId evicted = kNoBlock;
      if (prefixes_.Evict({&evicted, 1}) == 0) return kNoBlock;
      allocator_.Free({&evicted, 1});
    }
  }

  // Makes room for `count` tokens. False: what fits stays appended.
  bool Append(Sequence* seq, int64_t count) {
    const BlockTable::Growth growth = seq->table.PlanAppend(count);
    if (growth.written_entry >= 0) {
      const BlockId tail = seq->table.blocks().back();
      if (!prefixes_.MakeWritable(tail)) {
        const BlockId copy = Allocate();
        if (copy == kNoBlock) return false;
        seq->table.ReplaceBlock(growth.written_entry, copy);
        Unreference(tail);
      }
    }
    seq->table.ReserveBlocks(growth.new_blocks);
    for (int64_t i = 0; i < growth.new_blocks; ++i) {
      const BlockId block = Allocate();
      if (block == kNoBlock) {
        const int64_t length = seq->table.num_blocks() * kBlockSize;
        seq->table.SetLength(length);
        return false;
      }
      seq->table.AddBlock(block);
    }
    seq->table.SetLength(growth.length);
    return true;
  }

  Status Commit(Sequence* seq, const Tokens& tokens) {
    std::vector<BlockId> freed;
    const Status status =
        prefixes_.Commit(tokens, kIgnore, &seq->tokens, &seq->table, &freed);
    allocator_.Free(freed);
    return status;
  }

  Sequence Fork(const Sequence& seq) {
    for (const BlockId block : seq.table.blocks()) {
      EXPECT_TRUE(allocator_.Reference(block));
    }
    return seq;
  }

  void Truncate(Sequence* seq, int64_t length) {
    prefixes_.Truncate(length, &seq->tokens);
    const std::vector<BlockId> blocks(seq->table.blocks().begin(),
                                      seq->table.blocks().end());
    const auto cut = static_cast<size_t>(seq->table.BlocksCutBy(length));
    for (size_t i = 0; i < cut; ++i) Unreference(blocks[blocks.size() - 1 - i]);
    seq->table.Truncate(length);
  }

  // Appends and commits all of `tokens`.
  Status Compute(Sequence* seq, const Tokens& tokens) {
    EXPECT_TRUE(Append(seq, static_cast<int64_t>(tokens.size())));
    return Commit(seq, tokens);
  }

  void Unreference(BlockId block) {
    const Released released = prefixes_.Unreference(block);
    EXPECT_NE(released, Released::kError);
    if (released == Released::kFreed) allocator_.Free({&block, 1});
  }

 private:
  BlockAllocator allocator_;
  PoolPrefixes prefixes_;
};

std::vector<BlockId> BlocksOf(const Sequence& seq) {
  return {seq.table.blocks().begin(), seq.table.blocks().end()};
}

TEST(PoolPrefixesTest, WhatOneComputedTheNextTakes) {
  Pool pool(8);
  Sequence first(5);
  VARLANE_ASSERT_OK(pool.Compute(&first, From(1, 10)));
  const std::vector<BlockId> blocks = BlocksOf(first);
  pool.Truncate(&first, 0);
  EXPECT_EQ(pool.allocator().cached_blocks(), 2);  // the third was part full
  EXPECT_EQ(pool.allocator().free_blocks(), 6);
  Sequence second(5);
  const PoolPrefixes::Taken taken = pool.prefixes().Take(
      From(1, 10), kAll, kIgnore, &second.tokens, &second.table);
  EXPECT_EQ(taken.revived_blocks, 2);
  EXPECT_EQ(taken.partial_tokens, 0);
  EXPECT_EQ(BlocksOf(second), std::vector(blocks.begin(), blocks.begin() + 2));
  EXPECT_EQ(second.tokens.length, 8);
  EXPECT_EQ(second.table.length(), 8);
  EXPECT_EQ(pool.allocator().cached_blocks(), 0);
  // A third beside it shares them.
  Sequence third(5);
  EXPECT_EQ(pool.prefixes()
                .Take(From(1, 10), kAll, kIgnore, &third.tokens, &third.table)
                .revived_blocks,
            0);
  EXPECT_EQ(pool.allocator().reference_count(blocks[0]), 2);
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
}

TEST(PoolPrefixesTest, NoMoreIsRevivedThanAllowed) {
  Pool pool(8);
  Sequence first;
  VARLANE_ASSERT_OK(pool.Compute(&first, From(1, 16)));
  pool.Truncate(&first, 8);
  EXPECT_EQ(pool.allocator().cached_blocks(), 2);
  // Two blocks are shared, which is free; of the cached ones one is allowed.
  Sequence second;
  const PoolPrefixes::Taken taken = pool.prefixes().Take(
      From(1, 17), 1, kIgnore, &second.tokens, &second.table);
  EXPECT_EQ(taken.revived_blocks, 1);
  EXPECT_EQ(second.tokens.length, 12);
  EXPECT_EQ(taken.partial_block, kNoBlock);
  const PrefixCache::Peeked peeked = pool.prefixes().Peek(0, From(1, 17));
  EXPECT_EQ(peeked.blocks, 4);
  EXPECT_EQ(peeked.cached_blocks, 1);
  VARLANE_EXPECT_OK(pool.prefixes().CheckSequence(second.tokens, second.table));
  VARLANE_ASSERT_OK(pool.Compute(&second, From(50, 5)));
  VARLANE_EXPECT_OK(pool.prefixes().CheckSequence(second.tokens, second.table));
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
}

TEST(PoolPrefixesTest, OneTokenIsAlwaysLeftToCompute) {
  Pool pool(8);
  Sequence first;
  VARLANE_ASSERT_OK(pool.Compute(&first, From(1, 8)));
  Sequence second;
  const PoolPrefixes::Taken taken = pool.prefixes().Take(
      From(1, 8), kAll, kIgnore, &second.tokens, &second.table);
  EXPECT_EQ(second.tokens.length, 4);
  EXPECT_EQ(taken.partial_block, first.table.blocks()[1]);
  EXPECT_EQ(taken.partial_tokens, 3);
  EXPECT_EQ(pool.allocator().reference_count(taken.partial_block), 2);
  Sequence third;
  pool.prefixes().Take(From(1, 1), kAll, kIgnore, &third.tokens, &third.table);
  pool.prefixes().Take({}, kAll, kIgnore, &third.tokens, &third.table);
  EXPECT_EQ(third.tokens.length, 0);
}

TEST(PoolPrefixesTest, TwoThatComputedTheSameEndWithOneCopy) {
  Pool pool(8);
  Sequence first;
  Sequence second;
  ASSERT_TRUE(pool.Append(&first, 9));
  ASSERT_TRUE(pool.Append(&second, 9));
  EXPECT_EQ(pool.allocator().free_blocks(), 2);
  VARLANE_ASSERT_OK(pool.Commit(&first, From(1, 9)));
  VARLANE_ASSERT_OK(pool.Commit(&second, From(1, 3)));
  VARLANE_ASSERT_OK(pool.Commit(&second, From(4, 6)));
  EXPECT_EQ(pool.allocator().free_blocks(), 4);
  EXPECT_EQ(second.table.blocks()[0], first.table.blocks()[0]);
  EXPECT_EQ(second.table.blocks()[1], first.table.blocks()[1]);
  EXPECT_NE(second.table.blocks()[2], first.table.blocks()[2]);
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
}

TEST(PoolPrefixesTest, ForksThatSayOtherwiseAreRefused) {
  Pool pool(8);
  Sequence first;
  ASSERT_TRUE(pool.Append(&first, 8));
  Sequence fork = pool.Fork(first);
  VARLANE_ASSERT_OK(pool.Commit(&first, From(1, 8)));
  EXPECT_EQ(pool.Commit(&fork, From(2, 8)).ToString(),
            "INVALID_ARGUMENT: tokens [0, 4) stand in block 0, which is known "
            "to hold others");
  EXPECT_EQ(fork.tokens.length, 0);
  EXPECT_EQ(pool.Commit(&fork, From(1, 4) + From(6, 4)).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(fork.tokens.length, 4);
  VARLANE_EXPECT_OK(pool.Commit(&fork, From(5, 4)));
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
}

TEST(PoolPrefixesTest, TruncationForgetsTokensButNotBlocks) {
  Pool pool(16);
  Sequence seq;
  VARLANE_ASSERT_OK(pool.Compute(&seq, From(1, 15)));
  pool.Truncate(&seq, 6);
  EXPECT_EQ(seq.tokens.length, 6);
  EXPECT_EQ(seq.tokens.tail, From(5, 2));
  EXPECT_EQ(pool.allocator().cached_blocks(), 1);
  // Its second block is indexed, with another behind it: it is copied.
  const BlockId tail = seq.table.blocks()[1];
  VARLANE_ASSERT_OK(pool.Compute(&seq, From(70, 6)));
  EXPECT_NE(seq.table.blocks()[1], tail);
  EXPECT_EQ(pool.allocator().cached_blocks(), 2);
  Sequence old;
  pool.prefixes().Take(From(1, 13), kAll, kIgnore, &old.tokens, &old.table);
  EXPECT_EQ(old.tokens.length, 12);
  Sequence again;
  pool.prefixes().Take(From(1, 6) + From(70, 7), kAll, kIgnore, &again.tokens,
                       &again.table);
  EXPECT_EQ(again.tokens.length, 12);
  // Within the part-full tail.
  pool.Truncate(&seq, 11);
  VARLANE_ASSERT_OK(pool.Compute(&seq, From(90, 2)));
  pool.Truncate(&seq, 12);
  EXPECT_EQ(seq.tokens.tail, Tokens{});
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
}

TEST(PoolPrefixesTest, AFullPoolWritesIntoItsOnlyIndexedBlock) {
  Pool pool(1);
  Sequence seq;
  VARLANE_ASSERT_OK(pool.Compute(&seq, From(1, 4)));
  pool.Truncate(&seq, 2);
  VARLANE_ASSERT_OK(pool.Compute(&seq, From(50, 2)));
  pool.Truncate(&seq, 0);
  Sequence old;
  pool.prefixes().Take(From(1, 5), kAll, kIgnore, &old.tokens, &old.table);
  EXPECT_EQ(old.tokens.length, 0);
  Sequence current;
  pool.prefixes().Take(From(1, 2) + From(50, 3), kAll, kIgnore, &current.tokens,
                       &current.table);
  EXPECT_EQ(current.tokens.length, 4);
}

TEST(PoolPrefixesTest, PinsCountAndEnd) {
  Pool pool(4);
  Sequence seq(3);
  VARLANE_ASSERT_OK(pool.Compute(&seq, From(1, 16)));
  pool.Truncate(&seq, 0);
  int64_t pin = -1;
  EXPECT_EQ(*pool.prefixes().Pin(3, From(1, 9), &pin), 8);
  int64_t nothing = -1;
  EXPECT_EQ(*pool.prefixes().Pin(4, From(1, 9), &nothing), 0);
  EXPECT_EQ(pool.prefixes().evictable_blocks(), 2);
  Sequence other;
  EXPECT_TRUE(pool.Append(&other, 8));
  EXPECT_FALSE(pool.Append(&other, 1));
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
  VARLANE_EXPECT_OK(pool.prefixes().Unpin(pin));
  VARLANE_EXPECT_OK(pool.prefixes().Unpin(nothing));
  EXPECT_EQ(pool.prefixes().Unpin(pin).code(), StatusCode::kNotFound);
  EXPECT_TRUE(pool.Append(&other, 1));
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
}

// A small alphabet, so that threads meet in the same blocks all the time, in a
// pool that is always full.
TEST(PoolPrefixesTest, ThreadsTakeCommitAndReleaseTheSameBlocks) {
  constexpr int kThreads = 4;
  constexpr int kOperations = testing::kSanitized ? 3000 : 60'000;
  constexpr int64_t kBlocks = 60;
  Pool pool(kBlocks);
  std::atomic<int64_t> hits{0};
  const auto work = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<Sequence> held;
    const auto tokens_of = [&](size_t count) {
      Tokens tokens(count);
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
      return tokens;
    };
    for (int op = 0; op < kOperations; ++op) {
      const uint64_t dice = random() % 100;
      if (held.empty() || (dice < 35 && held.size() < 6)) {
        Sequence seq(random() % 2);
        const Tokens prompt = tokens_of(2 + random() % 20);
        const PoolPrefixes::Taken taken = pool.prefixes().Take(
            prompt, kAll, kIgnore, &seq.tokens, &seq.table);
        hits += seq.table.num_blocks();
        if (taken.partial_block != kNoBlock) {
          pool.Unreference(taken.partial_block);
        }
        held.push_back(std::move(seq));
        continue;
      }
      const size_t chosen = random() % held.size();
      Sequence& seq = held[chosen];
      if (dice < 60) {
        (void)pool.Append(&seq, static_cast<int64_t>(random() % 7));
        const Status status =
            pool.Commit(&seq, tokens_of(static_cast<size_t>(
                                  seq.table.length() - seq.tokens.length)));
        VARLANE_EXPECT_OK(status);
      } else if (dice < 70 && held.size() < 6) {
        held.push_back(pool.Fork(seq));
      } else if (dice < 80) {
        pool.Truncate(
            &seq, static_cast<int64_t>(random() % static_cast<uint64_t>(
                                                      seq.table.length() + 1)));
      } else {
        pool.Truncate(&seq, 0);
        std::swap(held[chosen], held.back());
        held.pop_back();
      }
    }
    for (Sequence& seq : held) pool.Truncate(&seq, 0);
  };
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) threads.emplace_back(work, 900 + t);
  for (std::thread& thread : threads) thread.join();
  VARLANE_EXPECT_OK(pool.prefixes().CheckInvariants());
  VARLANE_EXPECT_OK(pool.allocator().CheckInvariants());
  EXPECT_EQ(pool.allocator().referenced_blocks(), 0);
  EXPECT_EQ(pool.allocator().cached_blocks(),
            pool.prefixes().evictable_blocks());
  // The premises: they shared, and the pool was full. How much depends on who
  // was when where.
  EXPECT_GT(hits.load(), kOperations / 10);
  EXPECT_GT(pool.prefixes().stats().evicted_blocks, kOperations / 50);
  EXPECT_GT(pool.prefixes().stats().duplicate_blocks, kOperations / 50);
}

}  // namespace
}  // namespace varlane
