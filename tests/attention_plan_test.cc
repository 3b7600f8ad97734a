// Plans: validation with place and value, the owner search, the grid.
//
// SPDX-License-Identifier: Apache-2.0

#include "attention/plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/args.h"
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
                    layout, kPoolBlocks, options, workers, plan);
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
  VARLANE_ASSERT_OK(in.Plan(&plan));
  EXPECT_EQ(plan.num_threadgroups(), 0);
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
      const int64_t s = FindOwner(cu.data(), n, block_q, b);
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
  EXPECT_TRUE(plan.spread);
  EXPECT_EQ(plan.num_partitions, 32768 / kPartition);
  VARLANE_ASSERT_OK(in.Plan(&plan, {}, /*workers=*/1));
  EXPECT_FALSE(plan.spread) << "one worker has nobody to share with";

  in.cu_seqlens_q = {0};
  in.seq_lens.clear();
  for (int i = 0; i < 64; ++i) {
    in.cu_seqlens_q.push_back(i + 1);
    in.seq_lens.push_back(2048);
  }
  in.stride = 128;
  in.block_tables.assign(64 * 128, 1);
  VARLANE_ASSERT_OK(in.Plan(&plan));
  EXPECT_FALSE(plan.spread);
  EXPECT_EQ(plan.num_partitions, 1);
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
