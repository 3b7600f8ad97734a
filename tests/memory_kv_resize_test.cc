// KvPool: shrinking, limits, compaction, steps, nodes, quotas, watermark.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/os_calls.h"
#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

using testing::MakeRuntime;

constexpr int64_t kMiB = int64_t{1} << 20;

// 64 KiB a block, so 32 blocks a slab of 2 MiB.
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 8,
                              .num_kv_heads = 2,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = 16};
constexpr int64_t kBlocksPerSlab = 32;
static_assert(int64_t{2} * 8 * 2 * 32 * 16 * 4 * kBlocksPerSlab == 2 * kMiB);

Runtime* SharedRuntime() {
  static const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  return runtime.get();
}

std::unique_ptr<KvPool> MakePool(const KvPoolOptions& options,
                                 Runtime* runtime = SharedRuntime()) {
  return testing::MakePool(options, runtime);
}

std::vector<int32_t> Table(const KvPool& pool, SeqId seq) {
  std::vector<int32_t> table(1024);
  const Result<int64_t> count = pool.CopyBlockTable(seq, table);
  EXPECT_TRUE(testing::IsOk(count));
  table.resize(count.ok() ? static_cast<size_t>(*count) : 0);
  return table;
}

SeqId MakeSequence(KvPool* pool, int64_t blocks, SequenceOptions options = {}) {
  const SeqId seq = pool->CreateSequence(options);
  const Result<Admission> admission = pool->Append(seq, blocks * 16);
  EXPECT_TRUE(testing::IsOk(admission));
  EXPECT_TRUE(admission.ok() && admission->admitted());
  return seq;
}

// Every byte of each of the sequence's blocks says which entry it is.
void Fill(const KvPool& pool, SeqId seq, int first) {
  for (const int32_t block : Table(pool, seq)) {
    std::memset(pool.view().k(block, 0, 0), first++,
                static_cast<size_t>(kLayout.block_bytes()));
  }
}

void ExpectFilled(const KvPool& pool, SeqId seq, int first) {
  for (const int32_t block : Table(pool, seq)) {
    const std::byte* const data = pool.view().k(block, 0, 0);
    const auto value = static_cast<std::byte>(first++);
    EXPECT_TRUE(std::all_of(data, data + kLayout.block_bytes(),
                            [&](std::byte b) { return b == value; }))
        << "block " << block;
  }
}

// Sequence `high` ends in the last slabs of a pool whose front is free.
struct Fragmented {
  std::unique_ptr<KvPool> pool;
  SeqId high = -1;
  SeqId fork = -1;
};
Fragmented MakeFragmented() {
  Fragmented out;
  out.pool = MakePool({.layout = kLayout, .num_blocks = 4 * kBlocksPerSlab});
  const SeqId low = MakeSequence(out.pool.get(), 100);
  out.high = MakeSequence(out.pool.get(), 20);
  Fill(*out.pool, out.high, 1);
  out.fork = *out.pool->Fork(out.high);
  EXPECT_TRUE(testing::IsOk(out.pool->Free(low)));
  EXPECT_EQ(Table(*out.pool, out.high).front(), 100);
  return out;
}

TEST(KvResizeTest, ShrinkMovesBlocksAndGivesSlabsBack) {
  const Fragmented f = MakeFragmented();
  const uint64_t generation = f.pool->view().generation;
  const Result<KvResize> shrunk = f.pool->Shrink(3 * kBlocksPerSlab);
  VARLANE_ASSERT_OK(shrunk);
  EXPECT_EQ(shrunk->capacity_blocks, kBlocksPerSlab);
  EXPECT_EQ(shrunk->committed_bytes, 2 * kMiB);
  EXPECT_EQ(shrunk->released_bytes, 6 * kMiB);
  EXPECT_EQ(shrunk->moved_blocks, 20);
  EXPECT_GT(f.pool->view().generation, generation);
  EXPECT_EQ(f.pool->view().num_blocks, kBlocksPerSlab);
  for (const int32_t block : Table(*f.pool, f.high)) {
    EXPECT_LT(block, kBlocksPerSlab);
  }
  EXPECT_EQ(Table(*f.pool, f.high), Table(*f.pool, f.fork)) << "still shared";
  ExpectFilled(*f.pool, f.high, 1);
  EXPECT_EQ(f.pool->free_blocks(), kBlocksPerSlab - 20);
  EXPECT_EQ(f.pool->stats().slabs_released, 3);
  VARLANE_EXPECT_OK(f.pool->CheckInvariants());
  VARLANE_ASSERT_OK(f.pool->Grow(3 * kBlocksPerSlab));
  EXPECT_EQ(f.pool->stats().slabs_regained, 3);
  ExpectFilled(*f.pool, f.fork, 1);
  VARLANE_EXPECT_OK(f.pool->CheckInvariants());
}

TEST(KvResizeTest, ShrinkBelowWhatSequencesHoldIsRefusedWithWhatIsPossible) {
  const Fragmented f = MakeFragmented();
  const auto before = Table(*f.pool, f.high);
  const Result<KvResize> shrunk = f.pool->Shrink(4 * kBlocksPerSlab - 19);
  EXPECT_EQ(shrunk.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(shrunk.status().message().find("2 MiB (2097152 bytes)"),
            std::string::npos)
      << shrunk.status().ToString();
  EXPECT_EQ(f.pool->MinLimitBytes(), 2 * kMiB);
  EXPECT_EQ(f.pool->SetLimit(2 * kMiB - 1).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(Table(*f.pool, f.high), before) << "nothing has moved";
  EXPECT_EQ(f.pool->capacity_blocks(), 4 * kBlocksPerSlab);
  EXPECT_EQ(f.pool->stats().moved_blocks, 0);
  EXPECT_EQ(f.pool->Shrink(-1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(f.pool->Shrink(4 * kBlocksPerSlab + 1).status().code(),
            StatusCode::kInvalidArgument);
  VARLANE_EXPECT_OK(f.pool->Shrink(4 * kBlocksPerSlab - 20));
}

TEST(KvResizeTest, LimitHoldsUntilItIsRaised) {
  const auto pool = MakePool(
      {.layout = kLayout, .num_blocks = 40, .max_blocks = 10 * kBlocksPerSlab});
  EXPECT_EQ(pool->stats().limit_bytes, 20 * kMiB);
  const SeqId seq = MakeSequence(pool.get(), 30);
  Fill(*pool, seq, 5);
  for (const int64_t mib : {8, 2, 20, 5, 3, 18, 1000}) {
    const Result<KvResize> set = pool->SetLimit(mib * kMiB);
    VARLANE_ASSERT_OK(set);
    const int64_t slabs = std::min<int64_t>(mib / 2, 10);
    EXPECT_EQ(set->committed_bytes, slabs * 2 * kMiB) << "whole slabs";
    EXPECT_EQ(pool->capacity_blocks(), slabs * kBlocksPerSlab);
    EXPECT_EQ(pool->stats().limit_bytes, mib * kMiB);
    ExpectFilled(*pool, seq, 5);
    VARLANE_EXPECT_OK(pool->CheckInvariants());
  }
  VARLANE_ASSERT_OK(pool->SetLimit(6 * kMiB));
  const Status grown = pool->Grow(1);
  EXPECT_EQ(grown.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(grown.message().find("limit is 6 MiB"), std::string::npos)
      << grown.ToString();
  VARLANE_ASSERT_OK(pool->Free(seq));
  EXPECT_EQ(pool->MinLimitBytes(), 0);
  VARLANE_ASSERT_OK(pool->SetLimit(0));
  EXPECT_EQ(pool->stats().committed_bytes, 0);
  EXPECT_EQ(pool->stats().num_slabs, 0);
  EXPECT_EQ(pool->SetLimit(-1).status().code(), StatusCode::kInvalidArgument);
  VARLANE_ASSERT_OK(pool->SetLimit(2 * kMiB));
  MakeSequence(pool.get(), 32);
}

TEST(KvResizeTest, CompactEmptiesTheLastSlabsAndKeepsTheBytes) {
  const Fragmented f = MakeFragmented();
  const Result<KvResize> none = f.pool->Compact(0);
  VARLANE_ASSERT_OK(none);
  EXPECT_EQ(none->moved_blocks, 0);
  const Result<KvResize> some = f.pool->Compact(5);
  VARLANE_ASSERT_OK(some);
  EXPECT_EQ(some->moved_blocks, 5);
  EXPECT_LT(Table(*f.pool, f.high).back(), 5) << "the last one went first";
  const Result<KvResize> rest = f.pool->Compact();
  VARLANE_ASSERT_OK(rest);
  EXPECT_EQ(rest->moved_blocks, 15);
  EXPECT_EQ(rest->committed_bytes, 8 * kMiB) << "gives nothing back itself";
  ExpectFilled(*f.pool, f.high, 1);
  ExpectFilled(*f.pool, f.fork, 1);
  EXPECT_EQ(f.pool->Compact()->moved_blocks, 0) << "dense already";
  EXPECT_EQ(f.pool->stats().moved_blocks, 20);
  EXPECT_EQ(f.pool->stats().compactions, 2);
  VARLANE_EXPECT_OK(f.pool->CheckInvariants());
}

TEST(KvResizeTest, NothingMovesWhileAStepIsOutstanding) {
  const Fragmented f = MakeFragmented();
  const auto before = Table(*f.pool, f.high);
  f.pool->BeginStep();
  f.pool->BeginStep();
  EXPECT_EQ(f.pool->stats().outstanding_steps, 2);
  constexpr StatusCode kFailed = StatusCode::kFailedPrecondition;
  EXPECT_EQ(f.pool->Compact().status().code(), kFailed);
  EXPECT_EQ(f.pool->SetLimit(2 * kMiB).status().code(), kFailed);
  EXPECT_EQ(f.pool->stats().limit_bytes, 8 * kMiB);
  f.pool->EndStep();
  EXPECT_EQ(f.pool->Shrink(3 * kBlocksPerSlab).status().code(), kFailed);
  EXPECT_EQ(Table(*f.pool, f.high), before);
  VARLANE_EXPECT_OK(f.pool->Shrink(8)) << "120..127 are free: no move";
  f.pool->EndStep();
  VARLANE_EXPECT_OK(f.pool->Shrink(80));
  ExpectFilled(*f.pool, f.fork, 1);
}

TEST(KvResizeTest, MemoryThatCannotBeGivenBackLeavesThePoolAsItWas) {
  const Fragmented f = MakeFragmented();
  OsFaults::FailAfter(0, ENOMEM, 1000);
  const Result<KvResize> shrunk = f.pool->SetLimit(2 * kMiB);
  const int64_t failed = OsFaults::failed();
  OsFaults::Disarm();
  EXPECT_GT(failed, 0);
  EXPECT_EQ(shrunk.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(f.pool->capacity_blocks(), 4 * kBlocksPerSlab);
  EXPECT_EQ(f.pool->stats().committed_bytes, 8 * kMiB);
  EXPECT_EQ(f.pool->stats().limit_bytes, 8 * kMiB);
  ExpectFilled(*f.pool, f.high, 1);
  VARLANE_EXPECT_OK(f.pool->CheckInvariants());
  const SeqId more = MakeSequence(f.pool.get(), 108);
  Fill(*f.pool, more, 0);
}

// --- nodes -------------------------------------------------------------------

TEST(KvNodesTest, SequencesGetTheirHomesBlocksFirst) {
  const auto runtime = MakeRuntime(2, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const auto pool = MakePool(
      {.layout = kLayout, .num_blocks = 64, .max_blocks = 256}, runtime.get());
  ASSERT_EQ(pool->num_nodes(), 2);
  const KvView view = pool->view();
  EXPECT_EQ(view.node_stride, 128);
  EXPECT_TRUE(view.contains(31) && view.contains(128) && view.contains(159));
  EXPECT_FALSE(view.contains(32) || view.contains(127) || view.contains(160));
  EXPECT_FALSE(view.contains(-1));
  EXPECT_EQ(pool->CreateSequence({.home_node = 2}), -1);
  EXPECT_EQ(pool->CreateSequence({.home_node = -2}), -1);

  const SeqId home = MakeSequence(pool.get(), 30, {.home_node = 1});
  for (const int32_t block : Table(*pool, home)) {
    EXPECT_EQ(pool->NodeOfBlock(block), 1);
  }
  EXPECT_EQ(pool->node_stats(1).referenced_blocks, 30);
  EXPECT_EQ(pool->node_stats(0).referenced_blocks, 0);
  EXPECT_EQ(pool->node_stats(0).committed_bytes, 2 * kMiB);
  EXPECT_EQ(pool->stats().spilled_blocks, 0);
  VARLANE_ASSERT_OK(pool->Append(home, 5 * 16));
  EXPECT_EQ(pool->stats().spilled_blocks, 3);
  const SeqId anywhere = MakeSequence(pool.get(), 1);
  EXPECT_EQ(pool->NodeOfBlock(Table(*pool, anywhere)[0]), 0) << "the emptier";
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  VARLANE_ASSERT_OK(pool->Grow(64));
  EXPECT_EQ(pool->node_stats(1).capacity_blocks, 64);
  EXPECT_TRUE(view.contains(63)) << "a view sees growth below its end";
  EXPECT_TRUE(pool->view().contains(191));
}

// Of two NUMA nodes with two L3s each: numbers are those of the arenas, and not
// of the topology's nodes, of which there are fewer.
TEST(KvNodesTest, HomesAreTheArenasOfTheRuntime) {
  RuntimeOptions options;
  options.topology = "numa:2 l3:2 core:1 pu:1";
  options.numa = NumaPolicy::kL3;
  const auto runtime = MakeRuntime(options);
  ASSERT_NE(runtime, nullptr);
  ASSERT_EQ(runtime->topology().nodes.size(), 2u);
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 128}, runtime.get());
  ASSERT_EQ(pool->num_nodes(), 4);
  EXPECT_EQ(pool->CreateSequence({.home_node = 4}), -1);
  for (int arena = 0; arena < 4; ++arena) {
    const SeqId home = MakeSequence(pool.get(), 3, {.home_node = arena});
    for (const int32_t block : Table(*pool, home)) {
      EXPECT_EQ(pool->NodeOfBlock(block), arena);
    }
    EXPECT_EQ(pool->node_stats(arena).referenced_blocks, 3);
    EXPECT_EQ(runtime->MemoryOfNode(arena), arena / 2);
  }
  EXPECT_EQ(pool->stats().spilled_blocks, 0);
}

TEST(KvNodesTest, ASequenceStaysAtHomeOnceItHasBlocks) {
  const auto runtime = MakeRuntime(2, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 64}, runtime.get());
  // Made at once, before any has a block; then each is on the emptier node.
  const SeqId a = pool->CreateSequence({});
  const SeqId b = pool->CreateSequence({});
  VARLANE_ASSERT_OK(pool->Append(a, 16));
  VARLANE_ASSERT_OK(pool->Append(b, 16 * 10));
  EXPECT_EQ(pool->NodeOfBlock(Table(*pool, a)[0]), 0);
  EXPECT_EQ(pool->NodeOfBlock(Table(*pool, b)[0]), 1);
  // Node 0 has most room, and sequences keep to their own all the same.
  VARLANE_ASSERT_OK(pool->Append(b, 16 * 5));
  for (const int32_t block : Table(*pool, b)) {
    EXPECT_EQ(pool->NodeOfBlock(block), 1);
  }
  // A fork has the home of what it shares.
  const Result<SeqId> fork = pool->Fork(a);
  VARLANE_ASSERT_OK(fork);
  VARLANE_ASSERT_OK(pool->Append(*fork, 16 * 20));
  EXPECT_EQ(pool->node_stats(0).referenced_blocks, 21);
  EXPECT_EQ(pool->stats().spilled_blocks, 0);
  // Full: the rest comes from the other node, and is counted.
  VARLANE_ASSERT_OK(pool->Append(a, 16 * 13));
  EXPECT_EQ(pool->node_stats(0).free_blocks, 0);
  EXPECT_EQ(pool->stats().spilled_blocks, 2);
  // It is at home there all the same, and asks there again.
  VARLANE_ASSERT_OK(pool->Free(*fork));
  VARLANE_ASSERT_OK(pool->Append(a, 16));
  EXPECT_EQ(pool->NodeOfBlock(Table(*pool, a).back()), 0);
  EXPECT_EQ(pool->stats().spilled_blocks, 2);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvNodesTest, PlacementOnADescribedMachineIsUnknown) {
  const auto runtime = MakeRuntime(2, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 64}, runtime.get());
  const KvPlacement all = pool->MeasurePlacement();
  EXPECT_EQ(all.unknown_bytes, pool->stats().committed_bytes);
  EXPECT_EQ(all.local_bytes + all.remote_bytes + all.absent_bytes, 0);
  EXPECT_EQ(all.error, 0);
  EXPECT_EQ(pool->MeasurePlacement(1).unknown_bytes,
            pool->node_stats(1).committed_bytes);
  EXPECT_EQ(pool->MeasurePlacement(2).unknown_bytes, 0) << "no such node";
}

TEST(KvNodesTest, PlacementHereIsMeasuredOrSaysWhyNot) {
  const auto runtime = MakeRuntime(2);
  ASSERT_NE(runtime, nullptr);
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 64}, runtime.get());
  const KvPlacement found = pool->MeasurePlacement();
  EXPECT_EQ(found.local_bytes + found.remote_bytes + found.absent_bytes +
                found.unknown_bytes,
            pool->stats().committed_bytes);
  EXPECT_EQ(found.absent_bytes, 0) << "every slab is touched";
  EXPECT_EQ(found.unknown_bytes > 0, found.error != 0);
  OsFaults::FailAfter(0, EPERM, 1000);
  const KvPlacement refused = pool->MeasurePlacement();
  OsFaults::Disarm();
  EXPECT_EQ(refused.error, EPERM);
  EXPECT_EQ(refused.unknown_bytes, pool->stats().committed_bytes);
}

TEST(KvNodesTest, ShrinkingMovesToAnotherNodeWhereTheOwnIsFull) {
  const auto runtime = MakeRuntime(2, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 128}, runtime.get());
  const SeqId seq = MakeSequence(pool.get(), 60, {.home_node = 1});
  Fill(*pool, seq, 3);
  const Result<KvResize> shrunk = pool->SetLimit(4 * kMiB);
  VARLANE_ASSERT_OK(shrunk);
  EXPECT_EQ(shrunk->moved_blocks, 28);
  EXPECT_EQ(pool->node_stats(0).referenced_blocks, 28);
  EXPECT_EQ(pool->node_stats(1).referenced_blocks, 32);
  ExpectFilled(*pool, seq, 3);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  EXPECT_EQ(pool->SetLimit(2 * kMiB).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(pool->MinLimitBytes(), 4 * kMiB);
}

// --- quotas and the watermark ------------------------------------------------

using Kind = Admission::Kind;
using Limit = Admission::Limit;

void ExpectAdmission(const Result<Admission>& result, Kind kind, Limit limit,
                     int64_t needed, int64_t free, int64_t capacity) {
  VARLANE_ASSERT_OK(result);
  EXPECT_EQ(result->kind, kind);
  EXPECT_EQ(result->limit, limit);
  EXPECT_EQ(result->needed_blocks, needed);
  EXPECT_EQ(result->free_blocks, free);
  EXPECT_EQ(result->capacity_blocks, capacity);
}

TEST(KvQuotaTest, TenantMayNotPassItsQuotaAndSharedBlocksCountOnce) {
  const auto pool = MakePool({.layout = kLayout, .num_blocks = 32});
  VARLANE_ASSERT_OK(pool->SetTenantQuota(7, 10));
  EXPECT_EQ(pool->SetTenantQuota(7, -2).code(), StatusCode::kInvalidArgument);
  const SeqId a = MakeSequence(pool.get(), 6, {.tenant = 7});
  const SeqId fork = *pool->Fork(a);
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 6);
  EXPECT_EQ(pool->tenant_stats(7).sequences, 2);
  const SeqId b = pool->CreateSequence({.tenant = 7});
  ExpectAdmission(pool->Append(b, 80), Kind::kWait, Limit::kQuota, 5, 4, 10);
  ExpectAdmission(pool->Append(b, 176), Kind::kNeverFits, Limit::kQuota, 11, 4,
                  10);
  ExpectAdmission(pool->Append(b, 64), Kind::kAdmitted, Limit::kBlocks, 4, 26,
                  32);
  EXPECT_EQ(pool->stats().quota_refusals, 2);
  EXPECT_EQ(pool->tenant_stats(7).refusals, 2);
  MakeSequence(pool.get(), 20, {.tenant = 8});
  VARLANE_ASSERT_OK(pool->Free(a));
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 10) << "the fork has them";
  VARLANE_ASSERT_OK(pool->Truncate(fork, 16));
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 5);
  VARLANE_ASSERT_OK(pool->SetTenantQuota(7, 2));
  ExpectAdmission(pool->Append(b, 1), Kind::kNeverFits, Limit::kQuota, 1, 0, 2);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  VARLANE_ASSERT_OK(pool->Free(b));
  VARLANE_ASSERT_OK(pool->SetTenantQuota(7, -1));
  VARLANE_ASSERT_OK(pool->Free(fork));
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 0);
  EXPECT_EQ(pool->tenant_stats(9).sequences, 0);
}

TEST(KvWatermarkTest, FirstBlocksLeaveSomeToRunningSequences) {
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 32, .watermark_blocks = 4});
  const SeqId first = MakeSequence(pool.get(), 20);
  const SeqId next = pool->CreateSequence();
  ExpectAdmission(pool->Append(next, 9 * 16), Kind::kWait, Limit::kWatermark, 9,
                  8, 28);
  EXPECT_EQ(pool->stats().watermark_refusals, 1);
  ExpectAdmission(pool->Append(next, 8 * 16), Kind::kAdmitted, Limit::kBlocks,
                  8, 12, 32);
  ExpectAdmission(pool->Append(first, 4 * 16), Kind::kAdmitted, Limit::kBlocks,
                  4, 4, 32);
  VARLANE_ASSERT_OK(pool->Free(first));
  VARLANE_ASSERT_OK(pool->Free(next));
  // With nobody running there is nobody to keep blocks for.
  MakeSequence(pool.get(), 32);
  KvPoolOptions bad = {.layout = kLayout, .num_blocks = 4};
  bad.watermark_blocks = 4;
  EXPECT_EQ(KvPool::Create(bad, SharedRuntime()).status().code(),
            StatusCode::kInvalidArgument);
}

// --- poison ------------------------------------------------------------------

#if !defined(__SANITIZE_ADDRESS__)
TEST(KvPoisonTest, FreedBlocksAreFilledWithNan) {
  const auto pool =
      MakePool({.layout = kLayout, .num_blocks = 8, .poison_freed = true});
  const SeqId seq = MakeSequence(pool.get(), 3);
  Fill(*pool, seq, 1);
  VARLANE_ASSERT_OK(pool->Truncate(seq, 16));
  ExpectFilled(*pool, seq, 1);
  for (const int block : {1, 2}) {
    float value = 0;
    std::memcpy(&value, pool->view().v(block, 3, 1), sizeof(value));
    EXPECT_NE(value, value) << "not NaN";
  }
}
#else
TEST(KvPoisonDeathTest, FreedBlocksCannotBeRead) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto pool = MakePool({.layout = kLayout, .num_blocks = 8});
  const SeqId seq = MakeSequence(pool.get(), 3);
  Fill(*pool, seq, 1);
  VARLANE_ASSERT_OK(pool->Truncate(seq, 16));
  ExpectFilled(*pool, seq, 1);
  const std::byte* const stale = pool->view().k(1, 0, 0);
  EXPECT_DEATH({ EXPECT_EQ(*stale, std::byte{2}); }, "use-after-poison");
  VARLANE_ASSERT_OK(pool->Append(seq, 16));
  EXPECT_EQ(*stale, std::byte{2}) << "taken again, it can be read";
}
#endif

}  // namespace
}  // namespace varlane
