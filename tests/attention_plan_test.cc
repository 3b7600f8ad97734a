// Plans: validation with place and value, the owner search, the grid.
//
// SPDX-License-Identifier: Apache-2.0

#include "attention/plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "attention/owner.h"
#include "kernels/args.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

constexpr int64_t kPoolBlocks = 4096;

// A small valid batch that each test breaks in one place.
struct Inputs {
  std::vector<int32_t> cu_seqlens_q = {0, 1, 41, 41};
  std::vector<int32_t> seq_lens = {100, 40, 7};
  std::vector<int32_t> block_tables = std::vector<int32_t>(3 * 8, 0);
  int64_t stride = 8;
  AttentionShape shape = {.num_q_heads = 8};
  KvLayout layout = {.dtype = DType::kBF16, .num_layers = 1, .num_kv_heads = 2};

  Status Plan(AttentionPlan::Impl* plan, const PlanOptions& options = {},
              int workers = 2) const {
    return MakePlan({cu_seqlens_q, seq_lens, block_tables, stride}, shape,
                    {.num_blocks = kPoolBlocks, .layout = layout}, options,
                    workers, plan);
  }
  std::string Refusal() const {
    AttentionPlan::Impl plan;
    const Status status = Plan(&plan);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_FALSE(plan.ready);
    return std::string(status.message());
  }
};

TEST(PlanTest, RefusalsNamePlaceValueAndLimit) {
  {
    Inputs in;
    in.block_tables[2] = 90210;
    EXPECT_EQ(in.Refusal(),
              "block_tables[0][2] = 90210, but the pool has 4096 blocks");
  }
  {
    Inputs in;
    in.block_tables[8 + 1] = -1;
    EXPECT_EQ(in.Refusal(),
              "block_tables[1][1] = -1, but the pool has 4096 blocks");
  }
  {
    Inputs in;
    in.cu_seqlens_q[0] = 2;
    EXPECT_EQ(in.Refusal(), "cu_seqlens_q[0] = 2, must be 0");
  }
  {
    Inputs in;
    in.cu_seqlens_q[3] = 40;
    EXPECT_EQ(in.Refusal(),
              "cu_seqlens_q[3] = 40 is below cu_seqlens_q[2] = 41");
  }
  {
    Inputs in;
    in.seq_lens[1] = -5;
    EXPECT_EQ(in.Refusal(), "seq_lens[1] = -5, must not be negative");
  }
  {
    Inputs in;
    in.seq_lens[0] = 129;
    EXPECT_EQ(in.Refusal(),
              "seq_lens[0] = 129 needs 9 blocks of 16, but "
              "block_table_stride = 8");
  }
  {
    Inputs in;
    in.shape.num_q_heads = 7;
    EXPECT_EQ(in.Refusal(),
              "num_q_heads = 7, must be a positive multiple of num_kv_heads = "
              "2");
  }
  {
    Inputs in;
    in.shape.scale = std::numeric_limits<double>::quiet_NaN();
    EXPECT_EQ(in.Refusal(), "scale = nan, must be finite");
  }
  {
    Inputs in;
    in.cu_seqlens_q.pop_back();
    EXPECT_EQ(in.Refusal(),
              "cu_seqlens_q has 3 entries, but seq_lens has 3, which needs 4");
  }
  {
    Inputs in;
    in.block_tables.pop_back();
    EXPECT_EQ(in.Refusal(),
              "block_tables has 23 entries, but 3 sequences x "
              "block_table_stride = 8 need more");
  }
  {
    Inputs in;
    in.layout.block_size = 7;
    EXPECT_NE(in.Refusal().find("block_size = 7"), std::string::npos);
  }
}

TEST(PlanTest, EntriesBeyondTheContextAreNeverRead) {
  Inputs in;
  in.block_tables[7] = std::numeric_limits<int32_t>::max();  // 100 needs 7
  in.block_tables[8 + 3] = -1;                               // 40 needs 3
  AttentionPlan::Impl plan;
  VARLANE_EXPECT_OK(in.Plan(&plan));
}

TEST(PlanTest, AnEmptyBatchIsAPlanOfNothing) {
  Inputs in;
  in.cu_seqlens_q = {0};
  in.seq_lens.clear();
  in.block_tables.clear();
  AttentionPlan::Impl plan;
  for (const OwnerPattern owner : kOwnerPatterns) {
    VARLANE_ASSERT_OK(in.Plan(&plan, {.owner = owner}));
    EXPECT_EQ(plan.grid_size, 0) << OwnerPatternName(owner);
  }
}

// The search against a linear scan of who owns what.
TEST(PlanTest, OwnerSearchFindsEveryBlockOnceAndSurplusOwnsNothing) {
  std::mt19937 rng(7);
  for (int round = 0; round < 300; ++round) {
    const int n = 1 + int(rng() % 40);
    const int block_q = 1 << (rng() % 8);
    std::vector<int32_t> cu = {0};
    for (int i = 0; i < n; ++i) {
      const int length = rng() % 3 == 0 ? int(rng() % 300) : int(rng() % 3);
      cu.push_back(cu.back() + length);
    }
    std::vector<int> rows_seen(size_t(cu.back()), 0);
    const int64_t blocks = cu.back() / block_q + n;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t s =
          FindOwner(cu.data(), n, block_q, b, int64_t(rng() % uint64_t(n)));
      for (int64_t hint = 0; hint < n; ++hint) {
        ASSERT_EQ(FindOwner(cu.data(), n, block_q, b, hint), s);
      }
      ASSERT_GE(s, 0);
      ASSERT_LT(s, n);
      const int64_t first = (b - (cu[size_t(s)] / block_q + s)) * block_q;
      ASSERT_GE(first, 0);
      for (int64_t t = first; t < first + block_q; ++t) {
        if (cu[size_t(s)] + t < cu[size_t(s) + 1]) {
          ++rows_seen[size_t(cu[size_t(s)] + t)];
        }
      }
    }
    for (const int seen : rows_seen) ASSERT_EQ(seen, 1) << "round " << round;
  }
}

TEST(PlanTest, OneLongSequenceSpreadsAndManyWalk) {
  Inputs in;
  in.stride = 2048;
  in.block_tables.assign(3 * 2048, 1);
  in.cu_seqlens_q = {0, 1, 2, 3};
  in.seq_lens = {32768, 1, 1};
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(in.Plan(&plan));
  EXPECT_TRUE(plan.spread_blocks > 0);
  EXPECT_EQ(plan.num_partitions, 32768 / kPartition);
  VARLANE_ASSERT_OK(in.Plan(&plan, {}, /*workers=*/1));
  EXPECT_FALSE(plan.spread_blocks > 0) << "one worker has nobody to share with";

  in.cu_seqlens_q = {0};
  in.seq_lens.clear();
  for (int i = 0; i < 64; ++i) {
    in.cu_seqlens_q.push_back(i + 1);
    in.seq_lens.push_back(2048);
  }
  in.stride = 128;
  in.block_tables.assign(64 * 128, 1);
  VARLANE_ASSERT_OK(in.Plan(&plan));
  EXPECT_FALSE(plan.spread_blocks > 0);
  EXPECT_EQ(plan.num_partitions, 1);
}

// Eight equal sequences deal out evenly, but for how fast two workers are.
TEST(PlanTest, TheLastOfFewAreSpread) {
  Inputs in;
  in.stride = 512;
  in.block_tables.assign(8 * 512, 1);
  in.cu_seqlens_q = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  in.seq_lens.assign(8, 8192);
  const int64_t partitions = 8192 / kPartition;
  AttentionPlan::Impl plan;
  for (const OwnerPattern owner :
       {OwnerPattern::kSearch, OwnerPattern::kMap, OwnerPattern::kPlanned}) {
    VARLANE_ASSERT_OK(in.Plan(&plan, {.owner = owner}));
    EXPECT_EQ(plan.heads_together, 2);
    EXPECT_EQ(plan.spread_blocks, 2) << "one for each worker";
    EXPECT_EQ(plan.grid_size, 6 + 2 * partitions);
    // Each partition of each sequence once; those of one at a time come last.
    WorkerCounters count;
    std::vector<int> seen(size_t(8 * partitions));
    for (int64_t i = 0; i < plan.grid_size; ++i) {
      const std::optional<Assignment> work = Assign(plan, i, count);
      ASSERT_TRUE(work.has_value()) << i;
      EXPECT_EQ(work->is_whole(), i < 6) << i;
      for (int64_t p = work->partition_begin; p < work->partition_end; ++p) {
        ++seen[size_t(work->item.seq * partitions + p)];
      }
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
    EXPECT_EQ(count.surplus, 0);
  }
  const auto tail = [&](const PlanOptions& options, int workers = 2) {
    VARLANE_EXPECT_OK(in.Plan(&plan, options, workers));
    return plan.spread_blocks;
  };
  EXPECT_EQ(tail({.partitions = PartitionMode::kWalk}), 0) << "asked for";
  EXPECT_EQ(tail({}, /*workers=*/1), 0) << "nobody to wait for";
  EXPECT_EQ(tail({.owner = OwnerPattern::kPadded}), 0)
      << "its last ones are others";
  in.seq_lens.assign(8, 3000);
  EXPECT_EQ(tail({}), 0) << "three partitions are hardly finer";
}

// Three sequences: 1 query at 2100, 300 at 300 (3 query blocks of 128: two KV
// heads for 4 query heads are a group of 2), none at 7.
Inputs Ragged() {
  Inputs in;
  in.shape.num_q_heads = 4;
  in.cu_seqlens_q = {0, 1, 301, 301};
  in.seq_lens = {2100, 300, 7};
  in.stride = 132;
  in.block_tables.assign(3 * 132, 1);
  return in;
}

TEST(PlanTest, EachOwnerPatternHasItsOwnGrid) {
  const Inputs in = Ragged();
  const auto size = [&](OwnerPattern owner, PartitionMode mode) {
    AttentionPlan::Impl plan;
    VARLANE_EXPECT_OK(in.Plan(&plan, {owner, mode}));
    EXPECT_EQ(plan.block_q, 128);
    return plan.grid_size;
  };
  // Walked: 2 heads x (301 / 128 + 3), against 1 + 3 blocks that exist.
  EXPECT_EQ(size(OwnerPattern::kSearch, PartitionMode::kWalk), 2 * 5);
  EXPECT_EQ(size(OwnerPattern::kMap, PartitionMode::kWalk), 2 * 5);
  EXPECT_EQ(size(OwnerPattern::kPlanned, PartitionMode::kWalk), 2 * 4);
  EXPECT_EQ(size(OwnerPattern::kPadded, PartitionMode::kWalk), 2 * 3 * 3);
  // Spread: 3 partitions of the longest context; the others have one.
  EXPECT_EQ(size(OwnerPattern::kSearch, PartitionMode::kSpread), 2 * 5 * 3);
  EXPECT_EQ(size(OwnerPattern::kMap, PartitionMode::kSpread), 2 * 5 * 3);
  EXPECT_EQ(size(OwnerPattern::kPlanned, PartitionMode::kSpread), 2 * (3 + 3));
  EXPECT_EQ(size(OwnerPattern::kPadded, PartitionMode::kSpread), 2 * 3 * 3 * 3);
}

TEST(PlanTest, DescriptorsAreTheWorkExactlyHeaviestFirst) {
  const Inputs in = Ragged();
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(
      in.Plan(&plan, {OwnerPattern::kPlanned, PartitionMode::kSpread}));
  for (size_t i = 1; i < plan.descriptors.size(); ++i) {
    EXPECT_GE(plan.descriptors[i - 1].cost, plan.descriptors[i].cost);
  }
  // (seq, block, partition) of each: no two alike, and all there are.
  std::set<std::tuple<int, int, int>> seen;
  for (const auto& work : plan.descriptors) {
    EXPECT_EQ(work.partition_end, work.partition_begin + 1);
    EXPECT_TRUE(
        seen.emplace(work.seq, work.block, work.partition_begin).second);
  }
  EXPECT_EQ(
      seen,
      (std::set<std::tuple<int, int, int>>{
          {0, 0, 0}, {0, 0, 1}, {0, 0, 2}, {1, 0, 0}, {1, 1, 0}, {1, 2, 0}}));
  // 128 tokens over 256 keys cost the most, 1 token over 52 the least.
  EXPECT_EQ(plan.descriptors.front().seq, 1);
  EXPECT_EQ(plan.descriptors.front().block, 1);
  EXPECT_EQ(plan.descriptors.back().seq, 0);
  EXPECT_EQ(plan.descriptors.back().partition_begin, 2);
}

// Whatever the pattern, each (head, block, partition) is given out once.
TEST(PlanTest, EveryPatternGivesOutTheSameWorkOnce) {
  std::mt19937 rng(11);
  for (int round = 0; round < 60; ++round) {
    Inputs in;
    in.cu_seqlens_q = {0};
    in.seq_lens.clear();
    const int n = 1 + int(rng() % 9);
    for (int i = 0; i < n; ++i) {
      const int q = rng() % 4 == 0 ? 0 : 1 + int(rng() % 400);
      in.cu_seqlens_q.push_back(in.cu_seqlens_q.back() + q);
      in.seq_lens.push_back(q + int(rng() % 2500));
    }
    in.stride = 200;
    in.block_tables.assign(size_t(n) * 200, 1);
    if (round % 3 == 0) in.shape.mask.window_left = 1300;
    using Work = std::tuple<int, int64_t, int64_t, int64_t, int64_t>;
    std::set<Work> expected;
    for (const PartitionMode mode : kPartitionModes) {
      for (const OwnerPattern owner : kOwnerPatterns) {
        AttentionPlan::Impl plan;
        VARLANE_ASSERT_OK(in.Plan(&plan, {owner, mode}));
        std::set<Work> given;
        WorkerCounters count;
        for (int64_t i = 0; i < plan.grid_size; ++i) {
          const std::optional<Assignment> a = Assign(plan, i, count);
          if (!a) continue;
          ASSERT_TRUE(given
                          .emplace(a->head, a->item.seq, a->block,
                                   a->partition_begin, a->partition_end)
                          .second);
        }
        EXPECT_EQ(int64_t(given.size()) + count.surplus, plan.grid_size);
        if (owner == kOwnerPatterns[0]) expected = given;
        ASSERT_EQ(given, expected) << OwnerPatternName(owner);
      }
    }
  }
}

TEST(PlanTest, AGridBeyondCountingIsRefused) {
  AttentionPlan::Impl plan;
  plan.heads_axis = 65536;
  plan.num_seqs = 2;
  plan.cu_seqlens_q = {0, 1, 2};
  plan.num_query_blocks = 4;
  plan.owner = OwnerPattern::kPadded;
  plan.num_partitions = int64_t{1} << 45;
  VARLANE_EXPECT_OK(PrepareOwners(&plan));
  plan.num_partitions *= 2;
  EXPECT_EQ(PrepareOwners(&plan).message(),
            "the padded grid of this batch exceeds 2^63 threadgroups");
  plan.owner = OwnerPattern::kSearch;
  VARLANE_EXPECT_OK(PrepareOwners(&plan));
  plan.spread_blocks = 4;
  EXPECT_EQ(PrepareOwners(&plan).code(), StatusCode::kInvalidArgument);
}

TEST(PlanTest, BytesAndFlopsAreThoseOfTheVisibleKeys) {
  Inputs in;
  in.cu_seqlens_q = {0, 1, 41, 41};
  in.seq_lens = {100, 40, 7};
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(in.Plan(&plan));
  // The third sequence brings no query: its K/V are not read.
  EXPECT_EQ(plan.kv_bytes, (100 + 40) * 2 * (128 + 128) * 2);
  EXPECT_EQ(plan.flops, 2 * (128 + 128) * 8 * (100 + 40 * 41 / 2));
}

}  // namespace
}  // namespace varlane::testing
