// What `varlane stress` asks of its pool.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/stress_pressure.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"

namespace varlane::tools {
namespace {

constexpr int64_t kBlocks = 4000;

// Of several slabs on each of two nodes.
class LimitScheduleTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    runtime_ = testing::MakeRuntime(0, testing::NodesTopology(2));
    ASSERT_NE(runtime_, nullptr);
    pool_ = testing::MakePool({.layout = {.dtype = DType::kBF16,
                                          .num_layers = 1,
                                          .num_kv_heads = 2,
                                          .head_size = 64,
                                          .v_head_size = 64,
                                          .block_size = 16},
                               .num_blocks = kBlocks,
                               .huge_pages = HugePages::kOff,
                               .shard_heads = GetParam()},
                              runtime_.get());
    ASSERT_NE(pool_, nullptr);
  }

  KvPool* pool() { return pool_.get(); }

 private:
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<KvPool> pool_;
};
INSTANTIATE_TEST_SUITE_P(Heads, LimitScheduleTest, ::testing::Bool(),
                         [](const auto& param) {
                           return param.param ? "Sharded" : "Together";
                         });

TEST_P(LimitScheduleTest, SizesAreSmallByTurnsAndHoldTheLeast) {
  constexpr int64_t kLeast = kBlocks / 4;
  LimitSchedule schedule(pool(), 1, kLeast, 7);
  for (int i = 0; i < 20; ++i) {
    VARLANE_ASSERT_OK(schedule.BetweenSteps());
    EXPECT_GE(pool()->capacity_blocks(), kLeast);
    if (i % 2 == 1) {
      EXPECT_EQ(pool()->capacity_blocks(), kBlocks);
    }
  }
  EXPECT_GE(schedule.counts().shrinks, 5);
  EXPECT_EQ(schedule.counts().growths, schedule.counts().shrinks);
  EXPECT_EQ(schedule.counts().bytes_regained, schedule.counts().bytes_released);
}

// A block more than the least is all: there is one size to choose from.
TEST_P(LimitScheduleTest, ALimitHasRoomForOneMoreSlabWhereverBlocksAre) {
  LimitSchedule schedule(pool(), 1, kBlocks - 1, 7);
  VARLANE_ASSERT_OK(schedule.BetweenSteps());
  const KvPoolStats stats = pool()->stats();
  // A slab of sharded heads is on both nodes.
  EXPECT_EQ(stats.limit_bytes, (kBlocks - 1) * pool()->layout().block_bytes() +
                                   (GetParam() ? 1 : 2) * stats.slab_bytes);
}

}  // namespace
}  // namespace varlane::tools
