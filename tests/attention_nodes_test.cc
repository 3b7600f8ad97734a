// A pool on two NUMA nodes has ids that are no block: every call that takes ids
// refuses them, naming place, value and limit.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/testing/engines.h"
#include "tests/testing/pools.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/kv_ops.h"
#include "varlane/kv_pool.h"
#include "varlane/limits.h"

namespace varlane {
namespace {

// Node 0 has 0..39 of its 64 ids, node 1 64..103.
class NodesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    engine_ = testing::MakeNodes(2);
    ASSERT_NE(engine_.attention, nullptr);
    pool_ = testing::MakePool({.layout = {.dtype = DType::kF32,
                                          .num_layers = 4,
                                          .num_kv_heads = 2,
                                          .head_size = 64,
                                          .v_head_size = 64,
                                          .block_size = 16},
                               .num_blocks = 80,
                               .max_blocks = 128,
                               .check_limits = false},
                              engine_.runtime.get());
    ASSERT_NE(pool_, nullptr);
    ASSERT_EQ(pool_->view().node_stride, 64);
    ASSERT_EQ(pool_->view().num_blocks, 104);
  }

  Status Plan(int32_t block) {
    const std::vector<int32_t> cu_seqlens_q = {0, 1};
    const std::vector<int32_t> seq_lens = {20};
    const std::vector<int32_t> table = {3, block};
    AttentionShape shape;
    shape.num_q_heads = 2;
    AttentionPlan plan;
    return engine_.attention->Plan({cu_seqlens_q, seq_lens, table, 2}, shape,
                                   pool_->view(), {}, &plan);
  }
  Status Write(int64_t slot) {
    const std::vector<float> rows(size_t{2} * 2 * 64);
    const std::vector<int64_t> slots = {5, slot};
    return engine_.attention->WriteKv(pool_->view(), 0,
                                      {rows.data(), DType::kF32},
                                      {rows.data(), DType::kF32}, slots);
  }
  Status Copy(int64_t from, int64_t to) {
    const std::vector<BlockCopy> copies = {{from, to}};
    return CopyBlocks(engine_.runtime.get(), pool_->view(), copies);
  }
  Status Gather(int32_t block) {
    const std::vector<int32_t> table = {3, block};
    std::vector<float> rows(size_t{20} * 2 * 64);
    return GatherKv(engine_.runtime.get(), pool_->view(), {table, 0, 0, 20},
                    {rows.data(), DType::kF32}, {});
  }
  Status Probe(int32_t block) {
    const std::vector<int32_t> seq_lens = {20};
    const std::vector<int32_t> cu_seqlens_q = {0, 1};
    const std::vector<int32_t> table = {3, block};
    return ReadProbe::Create(engine_.runtime.get(), pool_->view(), 0,
                             {cu_seqlens_q, seq_lens, table, 2})
        .status();
  }

  testing::Engine engine_;
  std::unique_ptr<KvPool> pool_;
};

void ExpectRefusal(const Status& status, const std::string& text) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), text);
}

TEST_F(NodesTest, IdsBetweenTheNodesAreRefusedEverywhere) {
  ExpectRefusal(Plan(40),
                "block_tables[0][1] = 40, but node 0 of the pool ends at 40");
  ExpectRefusal(Plan(63),
                "block_tables[0][1] = 63, but node 0 of the pool ends at 40");
  ExpectRefusal(Write(40 * 16),
                "slot_mapping[1] = 640 is in block 40, but its node ends at "
                "40");
  ExpectRefusal(Copy(41, 2),
                "copies[0].from = 41, but node 0 of the pool ends "
                "at 40");
  ExpectRefusal(Copy(2, 63),
                "copies[0].to = 63, but node 0 of the pool ends "
                "at 40");
  ExpectRefusal(Gather(50),
                "block_table[1] = 50, but node 0 of the pool ends at 40");
  ExpectRefusal(Probe(50),
                "block_tables[0][1] = 50, but node 0 of the pool ends at 40");
}

TEST_F(NodesTest, IdsBehindTheLastNodeAreRefusedEverywhere) {
  ExpectRefusal(Plan(104),
                "block_tables[0][1] = 104, but the pool has 104 blocks");
  ExpectRefusal(Write(104 * 16),
                "slot_mapping[1] = 1664, but the pool has 104 blocks x 16 = "
                "1664 slots");
  ExpectRefusal(Copy(104, 2),
                "copies[0].from = 104, but the view has 104 "
                "blocks");
  ExpectRefusal(Gather(-1), "block_table[1] = -1, but the view has 104 blocks");
  ExpectRefusal(Probe(104),
                "block_tables[0][1] = 104, but the pool has 104 blocks");
}

TEST_F(NodesTest, BlocksOfEitherNodeAreTaken) {
  for (const int block : {39, 64, 103}) {
    VARLANE_EXPECT_OK(Plan(block));
    VARLANE_EXPECT_OK(Write(block * 16 + 15));
    VARLANE_EXPECT_OK(Copy(block, 2));
    VARLANE_EXPECT_OK(Gather(block));
    VARLANE_EXPECT_OK(Probe(block));
  }
}

TEST_F(NodesTest, AViewSeesWhatItsPoolTakesAway) {
  const KvView view = pool_->view();
  ASSERT_TRUE(view.contains(39) && view.contains(103));
  VARLANE_ASSERT_OK(pool_->Shrink(20));
  EXPECT_FALSE(view.contains(39) || view.contains(103));
  EXPECT_TRUE(view.contains(29) && view.contains(93));
  const std::vector<BlockCopy> copies = {{39, 2}};
  ExpectRefusal(CopyBlocks(engine_.runtime.get(), view, copies),
                "copies[0].from = 39, but node 0 of the pool ends at 30");
  ExpectRefusal(Plan(93 + 1),
                "block_tables[0][1] = 94, but the pool has 94 "
                "blocks");
}

}  // namespace
}  // namespace varlane
