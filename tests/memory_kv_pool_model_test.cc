// KvPool against a naive model: random forests of sequences with a fingerprint
// in every token's slot, while the pool grows and shrinks, its blocks move, and
// sequences are swapped to a file.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "tests/testing/files.h"
#include "tests/testing/kv_pool_model.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"
#include "varlane/swap.h"

namespace varlane {
namespace {

using testing::KvPoolModel;

constexpr int kOperations = testing::Operations(150'000, 10'000);  // a seed
constexpr int kShardedOperations = testing::Operations(30'000, 10'000);
// One in so many changes the pool's size or moves blocks, or swaps.
constexpr int kResizeEvery = 50;
constexpr int kSwapEvery = 111;
constexpr int64_t kMaxBlocks = 160;

// Through the page cache: the disk is not what is tested.
std::unique_ptr<SequenceSwapper> MakeSwapper(const std::string& folder,
                                             KvPool* pool) {
  SwapOptions options;
  options.folder = folder;
  options.max_bytes = 4 * kMaxBlocks * pool->layout().block_bytes();
  options.direct_io = false;
  Result<std::unique_ptr<SequenceSwapper>> swapper =
      SequenceSwapper::Create(options, pool);
  EXPECT_TRUE(testing::IsOk(swapper));
  return swapper.ok() ? *std::move(swapper) : nullptr;
}

// With nodes, heads are sharded over them.
void RunModel(uint64_t seed, int operations, int num_nodes = 1) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::printf("seed %llu: %d operations\n",
              static_cast<unsigned long long>(seed), operations);
  const auto runtime =
      num_nodes == 1
          ? testing::MakeRuntime(2)
          : testing::MakeRuntime(0, testing::NodesTopology(num_nodes));
  ASSERT_NE(runtime, nullptr);
  KvLayout layout = testing::kModelLayout;
  layout.num_kv_heads = num_nodes == 1 ? 1 : 4;
  auto pool = KvPool::Create({.layout = layout,
                              .num_blocks = 40,
                              .max_blocks = kMaxBlocks,
                              .shard_heads = num_nodes > 1,
                              .check_limits = false,
                              .poison_freed = num_nodes > 1,
                              .shuffle = seed % 2 == 0,
                              .seed = seed},
                             runtime.get());
  VARLANE_ASSERT_OK(pool);
  ASSERT_EQ((*pool)->num_shards(), num_nodes);
  const testing::TemporaryFolder folder;
  const auto swapper = MakeSwapper(folder.path(), pool->get());
  ASSERT_NE(swapper, nullptr);
  KvPoolModel model(pool->get(), seed, kMaxBlocks);
  for (int op = 0; op < operations; ++op) {
    if (op % kResizeEvery == kResizeEvery - 1) {
      model.Resize();
    } else if (op % kSwapEvery == kSwapEvery - 1) {
      model.Swap(swapper.get());
    } else {
      model.Step();
    }
    model.ExpectTotals();
    model.VerifyOne();
    if (op % 1000 == 0) {
      model.VerifyAll();
      VARLANE_ASSERT_OK((*pool)->CheckInvariants());
    }
    if (::testing::Test::HasFatalFailure()) FAIL() << "at operation " << op;
  }
  // The premises: every path was taken.
  EXPECT_GT(model.waits(), operations / 1000);
  EXPECT_GT(model.never_fits(), operations / 2000);
  EXPECT_GT(model.copies(), operations / 200);
  EXPECT_GT(model.shrinks(), operations / 2000);
  EXPECT_GT(model.refused_shrinks(), operations / 2000);
  EXPECT_GT(model.moves(), operations / 1000);
  EXPECT_GT(model.swaps(), operations / 2000);
  model.FreeAll(swapper.get());
  EXPECT_EQ((*pool)->free_blocks(), (*pool)->capacity_blocks());
  VARLANE_EXPECT_OK((*pool)->CheckInvariants());
}

class KvPoolModelTest : public ::testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, KvPoolModelTest,
                         ::testing::Values(1001, 1002, 1003));

// With those of memory_block_allocator_model_test more than ten million.
TEST_P(KvPoolModelTest, RandomSequencesKeepEveryTokenAndEveryCount) {
  RunModel(GetParam(), kOperations);
}

TEST_P(KvPoolModelTest, ShardedHeadsKeepEveryTokenAndEveryCount) {
  RunModel(GetParam(), kShardedOperations, GetParam() % 2 == 0 ? 2 : 4);
}

TEST_P(KvPoolModelTest, DISABLED_MoreRandomSequences) {
  RunModel(GetParam(), 1'500'000);
}

}  // namespace
}  // namespace varlane
