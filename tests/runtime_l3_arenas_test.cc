// Proves what NumaPolicy::kL3 makes of a machine: an arena for every L3 of each
// node, in that node's memory.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "runtime/placement.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

Topology Describe(const std::string& synthetic) {
  RuntimeOptions options;
  options.topology = synthetic;
  Result<Topology> topology = Topology::Detect(options);
  EXPECT_TRUE(testing::IsOk(topology));
  return topology.ok() ? *std::move(topology) : Topology();
}

Result<Placement> PlaceByL3(const Topology& topology, int num_threads = 0) {
  RuntimeOptions options;
  options.num_threads = num_threads;
  options.numa = NumaPolicy::kL3;
  return PlaceWorkers(topology, options);
}

std::vector<int> WorkersOf(const Placement& placed) {
  std::vector<int> counts;
  for (size_t n = 0; n + 1 < placed.first_worker.size(); ++n) {
    counts.push_back(placed.first_worker[n + 1] - placed.first_worker[n]);
  }
  return counts;
}

TEST(L3PlacementTest, EveryL3OfANodeHasAnArenaInItsMemory) {
  const Topology topology = Describe("numa:2 l3:4 core:4 pu:2");
  const Result<Placement> placed = PlaceByL3(topology);
  VARLANE_ASSERT_OK(placed);
  EXPECT_EQ(WorkersOf(*placed), std::vector<int>(8, 4));
  EXPECT_EQ(placed->memory_of_node, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(placed->pus_of_node[5],
            (std::vector<int>{40, 42, 44, 46, 41, 43, 45, 47}));
  // Those of its own node first, in turn; the others in turn, too.
  EXPECT_EQ(placed->nearest[1], (std::vector<int>{1, 2, 3, 0, 4, 5, 6, 7}));
  EXPECT_EQ(placed->nearest[6], (std::vector<int>{6, 7, 4, 5, 0, 1, 2, 3}));
}

TEST(L3PlacementTest, FewThreadsAreSpreadOverTheNodes) {
  const Topology topology = Describe("numa:2 l3:4 core:4 pu:2");
  const auto memory = [&](int num_threads) {
    const Result<Placement> placed = PlaceByL3(topology, num_threads);
    EXPECT_TRUE(testing::IsOk(placed));
    EXPECT_EQ(WorkersOf(*placed),
              std::vector<int>(static_cast<size_t>(num_threads), 1));
    return placed->memory_of_node;
  };
  EXPECT_EQ(memory(1), (std::vector<int>{0}));
  EXPECT_EQ(memory(2), (std::vector<int>{0, 1}));
  EXPECT_EQ(memory(3), (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(memory(7), (std::vector<int>{0, 0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(PlaceByL3(topology, 3)->pu_of_worker, (std::vector<int>{0, 8, 32}));
}

TEST(L3PlacementTest, DistancesAreThoseOfTheNodes) {
  Topology topology = Describe("numa:3 l3:2 core:1 pu:1");
  topology.distances = {10, 30, 20, 30, 10, 15, 20, 15, 10};
  const Result<Placement> placed = PlaceByL3(topology);
  VARLANE_ASSERT_OK(placed);
  EXPECT_EQ(placed->nearest[0], (std::vector<int>{0, 1, 4, 5, 2, 3}));
  EXPECT_EQ(placed->nearest[3], (std::vector<int>{3, 2, 4, 5, 0, 1}));
}

TEST(L3PlacementTest, CoresWithoutOneAreTogether) {
  Topology topology = Describe("numa:2 l3:2 core:2 pu:1");
  for (const int core : {1, 3, 6}) {
    topology.cores[static_cast<size_t>(core)].l3 = -1;
  }
  const Result<Placement> placed = PlaceByL3(topology);
  VARLANE_ASSERT_OK(placed);
  EXPECT_EQ(placed->pus_of_node, (std::vector<std::vector<int>>{
                                     {0}, {2}, {1, 3}, {4, 5}, {7}, {6}}));
}

TEST(L3PlacementTest, WithoutAnyItIsAnError) {
  RuntimeOptions options;
  options.topology = "numa:2 core:4 pu:1";
  options.numa = NumaPolicy::kL3;
  const Status status = Runtime::Create(options).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "numa = l3, but the topology of synthetic:numa:2 core:4 pu:1 shows "
            "no L3 cache");
}

TEST(L3PlacementTest, ARuntimesNodesAreItsL3s) {
  RuntimeOptions options;
  options.topology = "numa:2 l3:2 core:1 pu:1";
  options.numa = NumaPolicy::kL3;
  const Result<std::unique_ptr<Runtime>> runtime = Runtime::Create(options);
  VARLANE_ASSERT_OK(runtime);
  ASSERT_EQ((*runtime)->num_nodes(), 4);
  const std::vector<int64_t> begin = {0, 10, 20, 30, 40};
  std::vector<int> memory;
  for (int node = 0; node < 4; ++node) {
    memory.push_back((*runtime)->MemoryOfNode(node));
    EXPECT_EQ((*runtime)->NodeOfWorker(node), node);
  }
  EXPECT_EQ(memory, (std::vector<int>{0, 0, 1, 1}));
  std::vector<std::atomic<int>> runs(40);
  VARLANE_ASSERT_OK((*runtime)->Launch({40, begin}, [&](const Threadgroup& g) {
    EXPECT_EQ(g.node(), g.worker());
    ++runs[static_cast<size_t>(g.index())];
  }));
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace varlane
