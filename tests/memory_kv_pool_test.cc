// KvPool: admission, copy on write, truncation and growth on a real pool.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/kv_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 2,
                              .num_kv_heads = 1,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = 16};

Runtime* SharedRuntime() {
  static const std::unique_ptr<Runtime> runtime = testing::MakeRuntime(2);
  return runtime.get();
}

std::unique_ptr<KvPool> MakePool(int64_t num_blocks, int64_t max_blocks = 0) {
  return testing::MakePool(
      {.layout = kLayout, .num_blocks = num_blocks, .max_blocks = max_blocks},
      SharedRuntime());
}

std::vector<int32_t> Table(const KvPool& pool, SeqId seq) {
  std::vector<int32_t> table(static_cast<size_t>(pool.stats().capacity_blocks));
  const Result<int64_t> count = pool.CopyBlockTable(seq, table);
  EXPECT_TRUE(testing::IsOk(count));
  table.resize(count.ok() ? static_cast<size_t>(*count) : 0);
  return table;
}

std::byte* BlockData(const KvPool& pool, int64_t block) {
  return pool.view().k(block, 0, 0);
}

void FillBlock(const KvPool& pool, int64_t block, int value) {
  std::memset(BlockData(pool, block), value,
              static_cast<size_t>(kLayout.block_bytes()));
}

bool BlockIs(const KvPool& pool, int64_t block, int value) {
  const std::byte* const data = BlockData(pool, block);
  return std::all_of(data, data + kLayout.block_bytes(), [&](std::byte b) {
    return b == static_cast<std::byte>(value);
  });
}

void ExpectAdmission(const Result<Admission>& result, Admission::Kind kind,
                     int64_t needed, int64_t free, int64_t capacity) {
  VARLANE_ASSERT_OK(result);
  EXPECT_EQ(result->kind, kind);
  EXPECT_EQ(result->needed_blocks, needed);
  EXPECT_EQ(result->free_blocks, free);
  EXPECT_EQ(result->capacity_blocks, capacity);
}

using Kind = Admission::Kind;

TEST(KvPoolTest, RefusesBadOptionsByName) {
  struct Case {
    KvPoolOptions options;
    const char* message;
  };
  KvLayout bad_layout = kLayout;
  bad_layout.block_size = 7;
  constexpr int64_t kTooMany = int64_t{1} << 31;
  const Case cases[] = {
      {{.layout = kLayout, .num_blocks = 0}, "num_blocks = 0"},
      {{.layout = kLayout, .num_blocks = -3}, "num_blocks = -3"},
      {{.layout = kLayout, .num_blocks = kTooMany}, "num_blocks = 2147483648"},
      {{.layout = kLayout, .num_blocks = 4, .max_blocks = 3}, "max_blocks = 3"},
      {{.layout = kLayout, .num_blocks = 4, .max_blocks = kTooMany},
       "max_blocks = 2147483648"},
      {{.layout = bad_layout, .num_blocks = 4}, "block_size = 7"},
  };
  for (const Case& c : cases) {
    const auto pool = KvPool::Create(c.options, SharedRuntime());
    EXPECT_EQ(pool.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(pool.status().message().find(c.message), std::string::npos)
        << pool.status().ToString();
  }
  const auto pool =
      KvPool::Create({.layout = kLayout, .num_blocks = 1}, nullptr);
  EXPECT_EQ(pool.status().code(), StatusCode::kInvalidArgument);
}

TEST(KvPoolTest, PoolLargerThanTheMachineIsRefusedWithoutTouchingIt) {
  const Result<MemoryLimits> limits = MemoryLimits::Detect();
  VARLANE_ASSERT_OK(limits);
  const auto pool = KvPool::Create(
      {.layout = kLayout,
       .num_blocks = 2 * limits->total_bytes / kLayout.block_bytes()},
      SharedRuntime());
  EXPECT_EQ(pool.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(pool.status().message().find("would fit"), std::string::npos)
      << pool.status().ToString();
}

TEST(KvPoolTest, FreshPoolIsFreeAndZero) {
  const auto pool = MakePool(100, 300);
  EXPECT_EQ(pool->capacity_blocks(), 100);
  EXPECT_EQ(pool->free_blocks(), 100);
  EXPECT_EQ(pool->layout(), kLayout);
  EXPECT_EQ(pool->view().num_blocks, 100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pool->view().base) % 64, 0u);
  for (int64_t block = 0; block < 100; ++block) {
    EXPECT_TRUE(BlockIs(*pool, block, 0));
  }
  const KvPoolStats stats = pool->stats();
  EXPECT_EQ(stats.capacity_blocks, 100);
  EXPECT_EQ(stats.referenced_blocks, 0);
  EXPECT_EQ(stats.sequences, 0);
  EXPECT_GE(stats.committed_bytes, 100 * kLayout.block_bytes());
  EXPECT_EQ(stats.committed_bytes, stats.num_slabs * stats.slab_bytes);
  EXPECT_GE(stats.reserved_bytes, 300 * kLayout.block_bytes());
  EXPECT_LE(stats.huge_page_bytes, stats.committed_bytes);
  EXPECT_EQ(pool->NodeOfBlock(0), 0);
  EXPECT_EQ(pool->NodeOfBlock(-1), 0) << "no block: any answer, no crash";
  EXPECT_EQ(pool->NodeOfBlock(2'000'000'000), 0);
}

TEST(KvPoolTest, AdmissionIsAValueWithNumbers) {
  const auto pool = MakePool(4);
  const SeqId a = pool->CreateSequence();
  const SeqId b = pool->CreateSequence();
  EXPECT_NE(a, b);
  ExpectAdmission(pool->Append(a, 0), Kind::kAdmitted, 0, 4, 4);
  ExpectAdmission(pool->Append(a, 33), Kind::kAdmitted, 3, 4, 4);
  EXPECT_EQ(pool->free_blocks(), 1);
  ExpectAdmission(pool->Append(a, 15), Kind::kAdmitted, 0, 1, 4);
  ExpectAdmission(pool->Append(b, 17), Kind::kWait, 2, 1, 4);
  ExpectAdmission(pool->Append(b, 65), Kind::kNeverFits, 5, 1, 4);
  ExpectAdmission(pool->Append(b, INT64_MAX), Kind::kNeverFits,
                  INT64_MAX / 16 + 1, 1, 4);
  EXPECT_EQ(*pool->Length(b), 0) << "all or nothing";
  EXPECT_EQ(pool->free_blocks(), 1);
  // a holds three: two more would not fit even if all others left.
  ExpectAdmission(pool->Append(a, 17), Kind::kNeverFits, 2, 1, 4);
  VARLANE_ASSERT_OK(pool->Free(a));
  ExpectAdmission(pool->Append(b, 64), Kind::kAdmitted, 4, 4, 4);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPoolTest, CanAppendAnswersAsAppendAndChangesNothing) {
  const auto pool = MakePool(4);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 20));
  const SeqId fork = *pool->Fork(seq);
  for (int64_t tokens = 0; tokens < 80; ++tokens) {
    const Result<Admission> can = pool->CanAppend(fork, tokens);
    EXPECT_EQ(*pool->Length(fork), 20);
    EXPECT_EQ(pool->free_blocks(), 2);
    const SeqId copy = *pool->Fork(fork);
    const Result<Admission> did = pool->Append(copy, tokens);
    VARLANE_ASSERT_OK(did);
    ExpectAdmission(can, did->kind, did->needed_blocks, did->free_blocks,
                    did->capacity_blocks);
    VARLANE_ASSERT_OK(pool->Free(copy));
  }
}

TEST(KvPoolTest, ForkSharesEveryBlock) {
  const auto pool = MakePool(8);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 40));
  const Result<SeqId> fork = pool->Fork(seq);
  VARLANE_ASSERT_OK(fork);
  EXPECT_NE(*fork, seq);
  EXPECT_EQ(*pool->Length(*fork), 40);
  EXPECT_EQ(Table(*pool, *fork), Table(*pool, seq));
  const KvPoolStats stats = pool->stats();
  EXPECT_EQ(stats.free_blocks, 5);
  EXPECT_EQ(stats.referenced_blocks, 3);
  EXPECT_EQ(stats.references, 6);
  EXPECT_EQ(stats.sequences, 2);
  VARLANE_ASSERT_OK(pool->Free(seq));
  EXPECT_EQ(pool->free_blocks(), 5) << "the fork still holds them";
  VARLANE_ASSERT_OK(pool->Free(*fork));
  EXPECT_EQ(pool->free_blocks(), 8);
}

TEST(KvPoolTest, FirstWriteToASharedTailCopiesItAndLeavesTheParentAlone) {
  const auto pool = MakePool(8);
  const SeqId parent = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(parent, 20));
  const std::vector<int32_t> before = Table(*pool, parent);
  FillBlock(*pool, before[0], 1);
  FillBlock(*pool, before[1], 2);
  const SeqId child = *pool->Fork(parent);
  // One copy, no new block: the tail has room.
  ExpectAdmission(pool->Append(child, 1), Kind::kAdmitted, 1, 6, 8);
  const std::vector<int32_t> after = Table(*pool, child);
  ASSERT_EQ(after.size(), 2u);
  EXPECT_EQ(after[0], before[0]) << "full blocks stay shared";
  ASSERT_NE(after[1], before[1]);
  EXPECT_EQ(Table(*pool, parent), before);
  EXPECT_TRUE(BlockIs(*pool, after[1], 2)) << "the copy has every byte";
  FillBlock(*pool, after[1], 3);
  EXPECT_TRUE(BlockIs(*pool, before[1], 2)) << "the parent keeps its bytes";
  EXPECT_EQ(pool->stats().cow_copies, 1);
  // Nobody shares the tails any more: no further copy for either.
  ExpectAdmission(pool->Append(parent, 1), Kind::kAdmitted, 0, 5, 8);
  ExpectAdmission(pool->Append(child, 1), Kind::kAdmitted, 0, 5, 8);
  EXPECT_EQ(pool->stats().cow_copies, 1);
  EXPECT_EQ(Table(*pool, parent), before);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPoolTest, FullSharedTailIsNotCopied) {
  const auto pool = MakePool(8);
  const SeqId parent = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(parent, 32));
  const SeqId child = *pool->Fork(parent);
  ExpectAdmission(pool->Append(child, 1), Kind::kAdmitted, 1, 6, 8);
  EXPECT_EQ(pool->stats().cow_copies, 0);
}

TEST(KvPoolTest, TruncationIntoASharedBlockCopiesItBeforeTheNextWrite) {
  const auto pool = MakePool(8);
  const SeqId parent = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(parent, 48));
  const std::vector<int32_t> before = Table(*pool, parent);
  FillBlock(*pool, before[1], 9);
  const SeqId child = *pool->Fork(parent);
  VARLANE_ASSERT_OK(pool->Truncate(child, 20));
  ExpectAdmission(pool->Append(child, 20), Kind::kAdmitted, 2, 5, 8);
  const std::vector<int32_t> after = Table(*pool, child);
  EXPECT_EQ(after[0], before[0]);
  EXPECT_NE(after[1], before[1]);
  EXPECT_TRUE(BlockIs(*pool, after[1], 9));
  EXPECT_EQ(Table(*pool, parent), before);
}

TEST(KvPoolTest, CopyCountsAsANeededBlockWhenThePoolIsFull) {
  const auto pool = MakePool(2);
  const SeqId parent = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(parent, 20));
  const SeqId child = *pool->Fork(parent);
  ExpectAdmission(pool->Append(child, 1), Kind::kWait, 1, 0, 2);
  VARLANE_ASSERT_OK(pool->Free(parent));
  ExpectAdmission(pool->Append(child, 1), Kind::kAdmitted, 0, 0, 2);
}

TEST(KvPoolTest, TruncateGivesWholeBlocksBack) {
  const auto pool = MakePool(8);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 70));
  EXPECT_EQ(pool->free_blocks(), 3);
  VARLANE_ASSERT_OK(pool->Truncate(seq, 65));
  EXPECT_EQ(pool->free_blocks(), 3);
  VARLANE_ASSERT_OK(pool->Truncate(seq, 33));
  EXPECT_EQ(pool->free_blocks(), 5);
  EXPECT_EQ(*pool->Length(seq), 33);
  EXPECT_EQ(pool->Truncate(seq, 34).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->Truncate(seq, -1).code(), StatusCode::kInvalidArgument);
  VARLANE_ASSERT_OK(pool->Truncate(seq, 0));
  EXPECT_EQ(pool->free_blocks(), 8);
  EXPECT_EQ(pool->stats().peak_referenced_blocks, 5);
}

TEST(KvPoolTest, FreedSequencesAreNotFound) {
  const auto pool = MakePool(2);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 5));
  VARLANE_ASSERT_OK(pool->Free(seq));
  constexpr StatusCode kNotFound = StatusCode::kNotFound;
  for (const SeqId gone : {seq, SeqId{-1}, SeqId{1000}}) {
    EXPECT_EQ(pool->Free(gone).code(), kNotFound);
    EXPECT_EQ(pool->Append(gone, 1).status().code(), kNotFound);
    EXPECT_EQ(pool->CanAppend(gone, 1).status().code(), kNotFound);
    EXPECT_EQ(pool->Fork(gone).status().code(), kNotFound);
    EXPECT_EQ(pool->Truncate(gone, 0).code(), kNotFound);
    EXPECT_EQ(pool->Length(gone).status().code(), kNotFound);
    EXPECT_EQ(pool->CopyBlockTable(gone, {}).status().code(), kNotFound);
    EXPECT_EQ(pool->CopySlotMapping(gone, 0, {}).code(), kNotFound);
  }
  EXPECT_EQ(pool->free_blocks(), 2);
  EXPECT_NE(pool->CreateSequence(), seq) << "ids are not used again";
}

TEST(KvPoolTest, NegativeTokensAreRefused) {
  const auto pool = MakePool(2);
  const SeqId seq = pool->CreateSequence();
  EXPECT_EQ(pool->Append(seq, -1).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->CanAppend(seq, -1).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(KvPoolTest, TableAndSlotsNameTheSameBlocks) {
  const auto pool = MakePool(8);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 40));
  const std::vector<int32_t> table = Table(*pool, seq);
  ASSERT_EQ(table.size(), 3u);
  std::vector<int64_t> slots(40);
  VARLANE_ASSERT_OK(pool->CopySlotMapping(seq, 0, slots));
  for (size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQ(slots[i],
              int64_t{table[i / 16]} * 16 + static_cast<int64_t>(i % 16));
  }
  std::vector<int32_t> short_table(2);
  EXPECT_EQ(pool->CopyBlockTable(seq, short_table).status().code(),
            StatusCode::kOutOfRange);
  const std::span<int64_t> span(slots);
  constexpr StatusCode kOutOfRange = StatusCode::kOutOfRange;
  EXPECT_EQ(pool->CopySlotMapping(seq, 1, span).code(), kOutOfRange);
  EXPECT_EQ(pool->CopySlotMapping(seq, -1, span.first(2)).code(), kOutOfRange);
  EXPECT_EQ(pool->CopySlotMapping(seq, INT64_MAX, span.first(1)).code(),
            kOutOfRange);
  VARLANE_EXPECT_OK(pool->CopySlotMapping(seq, 40, {}));
}

TEST(KvPoolTest, GrowthKeepsAddressesAndContents) {
  const auto pool = MakePool(10, 2000);  // 8 KiB blocks: from one slab to eight
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 160));
  std::byte* const base = pool->view().base;
  for (int64_t block = 0; block < 10; ++block) {
    FillBlock(*pool, block, static_cast<int>(block) + 1);
  }
  ExpectAdmission(pool->Append(seq, 1), Kind::kNeverFits, 1, 0, 10);
  VARLANE_ASSERT_OK(pool->Grow(0));
  VARLANE_ASSERT_OK(pool->Grow(600));
  VARLANE_ASSERT_OK(pool->Grow(1390));
  EXPECT_EQ(pool->view().base, base);
  EXPECT_EQ(pool->view().num_blocks, 2000);
  EXPECT_EQ(pool->free_blocks(), 1990);
  for (int64_t block = 0; block < 10; ++block) {
    EXPECT_TRUE(BlockIs(*pool, block, static_cast<int>(block) + 1));
  }
  EXPECT_TRUE(BlockIs(*pool, 1999, 0));
  ExpectAdmission(pool->Append(seq, 1), Kind::kAdmitted, 1, 1990, 2000);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPoolTest, GrowthPastMaxBlocksChangesNothing) {
  const auto pool = MakePool(10, 20);
  const Status status = pool->Grow(11);
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_NE(status.message().find("max_blocks = 20"), std::string::npos);
  EXPECT_EQ(pool->Grow(INT64_MAX).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(pool->Grow(-1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->capacity_blocks(), 10);
  VARLANE_EXPECT_OK(pool->Grow(10));
  EXPECT_EQ(MakePool(10)->Grow(1).code(), StatusCode::kOutOfRange);
}

TEST(KvPoolTest, ShufflePermutesTheBlocksBySeed) {
  const auto table_of = [](bool shuffle, uint64_t seed) {
    const auto pool = KvPool::Create(
        {.layout = kLayout, .num_blocks = 64, .shuffle = shuffle, .seed = seed},
        SharedRuntime());
    EXPECT_TRUE(testing::IsOk(pool));
    const SeqId seq = (*pool)->CreateSequence();
    EXPECT_TRUE(testing::IsOk((*pool)->Append(seq, 64 * 16)));
    return Table(**pool, seq);
  };
  const std::vector<int32_t> plain = table_of(false, 1);
  EXPECT_TRUE(std::is_sorted(plain.begin(), plain.end()));
  const std::vector<int32_t> shuffled = table_of(true, 1);
  EXPECT_EQ(shuffled, table_of(true, 1));
  EXPECT_NE(shuffled, table_of(true, 2));
  EXPECT_NE(shuffled, plain);
  EXPECT_EQ(std::set<int32_t>(shuffled.begin(), shuffled.end()),
            std::set<int32_t>(plain.begin(), plain.end()));
}

}  // namespace
}  // namespace varlane
