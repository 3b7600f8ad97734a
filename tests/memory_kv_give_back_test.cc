// KvPool: memory lent to the system and taken back.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/os_calls.h"
#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// 64 KiB a block, so 32 blocks a slab of 2 MiB.
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 8,
                              .num_kv_heads = 2,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = 16};
constexpr int64_t kSlab = 32;  // blocks
static_assert(int64_t{2} * 8 * 2 * 32 * 16 * 4 * kSlab == 2 * kMiB);

Runtime* SharedRuntime(int num_nodes) {
  static const auto one = testing::MakeRuntime(2);
  static const auto two = testing::MakeRuntime(2, testing::NodesTopology(2));
  return (num_nodes == 1 ? one : two).get();
}

std::unique_ptr<KvPool> MakePool(int64_t num_blocks,
                                 Runtime* runtime = SharedRuntime(1)) {
  return testing::MakePool({.layout = kLayout,
                            .num_blocks = num_blocks,
                            .max_blocks = num_blocks + 4 * kSlab},
                           runtime);
}

std::vector<int32_t> Table(const KvPool& pool, SeqId seq) {
  std::vector<int32_t> table(1024);
  const Result<int64_t> count = pool.CopyBlockTable(seq, table);
  VARLANE_EXPECT_OK(count);
  table.resize(count.ok() ? static_cast<size_t>(*count) : 0);
  return table;
}

SeqId MakeSequence(KvPool* pool, int64_t blocks) {
  const SeqId seq = pool->CreateSequence();
  const Result<Admission> admission = pool->Append(seq, blocks * 16);
  VARLANE_EXPECT_OK(admission);
  EXPECT_TRUE(admission.ok() && admission->admitted());
  for (const int32_t block : Table(*pool, seq)) {
    std::memset(pool->view().k(block, 0, 0), static_cast<int>(seq + 1),
                static_cast<size_t>(kLayout.block_bytes()));
  }
  return seq;
}

void ExpectIntact(const KvPool& pool, SeqId seq) {
  const std::vector<std::byte> expected(
      static_cast<size_t>(kLayout.block_bytes()),
      static_cast<std::byte>(seq + 1));
  for (const int32_t block : Table(pool, seq)) {
    ASSERT_EQ(std::memcmp(pool.view().k(block, 0, 0), expected.data(),
                          expected.size()),
              0)
        << "block " << block;
  }
}

KvResize Give(KvPool* pool, const GiveBackOptions& options) {
  const Result<KvResize> given = pool->GiveBack(options);
  VARLANE_EXPECT_OK(given);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  return given.ok() ? *given : KvResize();
}

TEST(KvGiveBackTest, WholeSlabsGoAndComeBack) {
  const auto pool = MakePool(8 * kSlab);
  KvResize given = Give(pool.get(), {.bytes = 1});
  EXPECT_EQ(given.released_bytes, 2 * kMiB) << "in whole slabs";
  EXPECT_EQ(given.capacity_blocks, 7 * kSlab);
  EXPECT_EQ(pool->lent_blocks(), kSlab);
  given = Give(pool.get(), {.bytes = 5 * kMiB});
  EXPECT_EQ(given.released_bytes, 6 * kMiB);
  EXPECT_EQ(pool->lent_blocks(), 4 * kSlab);
  EXPECT_EQ(Give(pool.get(), {.bytes = 0}).released_bytes, 0);
  // Half a slab cannot be had; two and a half are two.
  EXPECT_EQ(pool->TakeBack(kMiB)->regained_bytes, 0);
  EXPECT_EQ(pool->TakeBack(5 * kMiB)->regained_bytes, 4 * kMiB);
  EXPECT_EQ(pool->lent_blocks(), 2 * kSlab);
  // No more than was lent, though the pool could grow.
  EXPECT_EQ(pool->TakeBack(100 * kMiB)->capacity_blocks, 8 * kSlab);
  EXPECT_EQ(pool->lent_blocks(), 0);
  EXPECT_EQ(pool->TakeBack(100 * kMiB)->regained_bytes, 0);
  EXPECT_EQ(pool->stats().slabs_released, 4);
  EXPECT_EQ(pool->stats().slabs_regained, 4);
}

// A pool whose last block stands in the middle of a slab.
TEST(KvGiveBackTest, TheLastSlabMayBeFilledInPart) {
  const auto pool = MakePool(3 * kSlab + 5);
  EXPECT_EQ(Give(pool.get(), {.bytes = 1}).capacity_blocks, 3 * kSlab);
  EXPECT_EQ(pool->lent_blocks(), 5);
  EXPECT_EQ(Give(pool.get(), {.bytes = 1}).capacity_blocks, 2 * kSlab);
  EXPECT_EQ(pool->TakeBack(100 * kMiB)->capacity_blocks, 3 * kSlab + 5);
  EXPECT_EQ(pool->lent_blocks(), 0);
}

TEST(KvGiveBackTest, WhatMustStayStays) {
  const auto pool = MakePool(8 * kSlab);
  EXPECT_EQ(
      Give(pool.get(), {.bytes = 100 * kMiB, .keep_blocks = 3 * kSlab - 1})
          .capacity_blocks,
      3 * kSlab);
  EXPECT_EQ(Give(pool.get(), {.bytes = 100 * kMiB, .keep_blocks = 1000})
                .released_bytes,
            0);
  const SeqId seq = MakeSequence(pool.get(), kSlab + 1);
  EXPECT_EQ(Give(pool.get(), {.bytes = 100 * kMiB, .move_blocks = true})
                .capacity_blocks,
            2 * kSlab);
  ExpectIntact(*pool, seq);
  VARLANE_ASSERT_OK(pool->Free(seq));
  EXPECT_EQ(Give(pool.get(), {.bytes = 100 * kMiB}).capacity_blocks, 0);
  EXPECT_EQ(pool->stats().committed_bytes, 0);
  EXPECT_EQ(pool->TakeBack(100 * kMiB)->capacity_blocks, 8 * kSlab);
}

TEST(KvGiveBackTest, BlocksOfSequencesMoveOnlyWhereTold) {
  const auto pool = MakePool(8 * kSlab);
  const SeqId low = MakeSequence(pool.get(), 5 * kSlab);
  const SeqId high = MakeSequence(pool.get(), kSlab);
  VARLANE_ASSERT_OK(pool->Free(low));
  const std::vector<int32_t> before = Table(*pool, high);
  ASSERT_EQ(before.front(), 5 * kSlab);
  // Between tables' copies and their last use, as in a launch under way.
  pool->BeginStep();
  EXPECT_EQ(Give(pool.get(), {.bytes = 100 * kMiB}).capacity_blocks, 6 * kSlab);
  EXPECT_EQ(Table(*pool, high), before);
  const Result<KvResize> moving =
      pool->GiveBack({.bytes = 100 * kMiB, .move_blocks = true});
  EXPECT_EQ(moving.status().code(), StatusCode::kFailedPrecondition);
  pool->EndStep();
  EXPECT_EQ(pool->stats().outstanding_steps, 0);
  const KvResize given =
      Give(pool.get(), {.bytes = 100 * kMiB, .move_blocks = true});
  EXPECT_EQ(given.capacity_blocks, kSlab);
  EXPECT_EQ(given.moved_blocks, kSlab);
  for (const int32_t block : Table(*pool, high)) EXPECT_LT(block, kSlab);
  ExpectIntact(*pool, high);
}

TEST(KvGiveBackTest, LentBlocksMakeAppendsWaitNotFail) {
  const auto pool = MakePool(4 * kSlab);
  Give(pool.get(), {.bytes = 4 * kMiB});
  const SeqId seq = pool->CreateSequence();
  Result<Admission> admission = pool->Append(seq, 3 * kSlab * 16);
  VARLANE_ASSERT_OK(admission);
  EXPECT_EQ(admission->kind, Admission::Kind::kWait);
  EXPECT_EQ(pool->Append(seq, 5 * kSlab * 16)->kind,
            Admission::Kind::kNeverFits);
  VARLANE_ASSERT_OK(pool->TakeBack(4 * kMiB));
  EXPECT_TRUE(pool->Append(seq, 3 * kSlab * 16)->admitted());
}

TEST(KvGiveBackTest, WhoeverSetsTheSizeAnewEndsTheLoan) {
  const auto pool = MakePool(4 * kSlab);
  Give(pool.get(), {.bytes = 4 * kMiB});
  VARLANE_ASSERT_OK(pool->Grow(kSlab));
  EXPECT_EQ(pool->lent_blocks(), 0);
  Give(pool.get(), {.bytes = 2 * kMiB});
  VARLANE_ASSERT_OK(pool->Shrink(kSlab));
  EXPECT_EQ(pool->lent_blocks(), 0);
  EXPECT_EQ(pool->TakeBack(100 * kMiB)->capacity_blocks, kSlab);
  VARLANE_ASSERT_OK(pool->SetLimit(8 * kMiB));
  Give(pool.get(), {.bytes = 2 * kMiB});
  VARLANE_ASSERT_OK(pool->SetLimit(4 * kMiB));
  EXPECT_EQ(pool->lent_blocks(), 0);
}

TEST(KvGiveBackTest, GrowthCanBeForbidden) {
  const auto pool = MakePool(4 * kSlab);
  Give(pool.get(), {.bytes = 4 * kMiB});
  pool->AllowGrowth(false);
  for (const Status& refused :
       {pool->Grow(1), pool->TakeBack(2 * kMiB).status(),
        pool->SetLimit(8 * kMiB).status()}) {
    EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
    EXPECT_EQ(refused.message(),
              "the pool must not grow now: memory is short (AllowGrowth)");
  }
  EXPECT_EQ(pool->capacity_blocks(), 2 * kSlab);
  VARLANE_EXPECT_OK(pool->Shrink(kSlab));
  VARLANE_EXPECT_OK(pool->SetLimit(2 * kMiB));
  pool->AllowGrowth(true);
  VARLANE_EXPECT_OK(pool->SetLimit(8 * kMiB));
  EXPECT_EQ(pool->capacity_blocks(), 4 * kSlab);
}

TEST(KvGiveBackTest, NodesShrinkAndGrowEvenly) {
  const auto pool = MakePool(8 * kSlab, SharedRuntime(2));
  ASSERT_EQ(pool->num_nodes(), 2);
  Give(pool.get(), {.bytes = 3 * 2 * kMiB});
  const int64_t a = pool->node_stats(0).capacity_blocks;
  const int64_t b = pool->node_stats(1).capacity_blocks;
  EXPECT_EQ(a + b, 5 * kSlab);
  EXPECT_LE(std::abs(a - b), kSlab);
  VARLANE_ASSERT_OK(pool->TakeBack(2 * kMiB));
  EXPECT_EQ(pool->node_stats(0).capacity_blocks, 3 * kSlab);
  EXPECT_EQ(pool->node_stats(1).capacity_blocks, 3 * kSlab);
}

TEST(KvGiveBackTest, BadNumbersAreRefused) {
  const auto pool = MakePool(kSlab);
  EXPECT_EQ(pool->GiveBack({.bytes = -1}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->GiveBack({.bytes = 1, .keep_blocks = -1}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->TakeBack(-1).status().code(), StatusCode::kInvalidArgument);
}

// Whichever call fails: an error, or less given than asked; never wrong books.
TEST(KvGiveBackTest, EverySystemCallMayFail) {
  for (int64_t index = 0;; ++index) {
    ASSERT_LT(index, 10'000);
    const auto pool = MakePool(4 * kSlab);
    const SeqId seq = MakeSequence(pool.get(), kSlab);
    OsFaults::FailAfter(index, ENOMEM);
    (void)pool->GiveBack({.bytes = 4 * kMiB, .move_blocks = true});
    (void)pool->TakeBack(4 * kMiB);
    const bool failed = OsFaults::failed() > 0;
    OsFaults::Disarm();
    VARLANE_ASSERT_OK(pool->CheckInvariants());
    ExpectIntact(*pool, seq);
    VARLANE_ASSERT_OK(pool->TakeBack(100 * kMiB));
    EXPECT_EQ(pool->capacity_blocks() + pool->lent_blocks(), 4 * kSlab)
        << index;
    if (HasFailure() || !failed) break;
  }
}

// Threads allocate and free while another lends and takes back.
TEST(KvGiveBackTest, OthersAllocateMeanwhile) {
  const auto pool = MakePool(8 * kSlab);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      while (!stop.load()) {
        const SeqId seq = pool->CreateSequence();
        (void)pool->Append(seq, static_cast<int64_t>(random() % (40 * 16)));
        (void)pool->Free(seq);
      }
    });
  }
  int64_t released = 0;
  for (int i = 0; i < 50; ++i) {
    const Result<KvResize> given = pool->GiveBack(
        {.bytes = (i % 7 + 1) * 2 * kMiB, .move_blocks = i % 2 == 0});
    if (given.ok()) {
      released += given->released_bytes;
    } else {
      EXPECT_EQ(given.status().code(), StatusCode::kResourceExhausted);
    }
    VARLANE_EXPECT_OK(pool->TakeBack(100 * kMiB));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  EXPECT_GT(released, 0);
  EXPECT_EQ(pool->capacity_blocks(), 8 * kSlab);
}

}  // namespace
}  // namespace varlane
