// Who runs what on several nodes: workers at home first, thieves where that
// wins.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/launch_state.h"
#include "runtime/placement.h"
#include "tests/testing/launches.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using testing::MakeRuntime;
using testing::RunsAllOnce;

// True once `done` is; false when it takes ages, so that a test can fail.
template <typename Done>
bool WaitUntil(const Done& done) {
  const auto give_up =
      std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!done()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(StealTest, ARangeIsWorthItWhereItsOwnWorkersAreFewerThanWhatIsLeft) {
  SharedRange range;
  range.Reset(10, 13);
  EXPECT_TRUE(range.IsWorthStealing()) << "nobody is at home";
  range.EnterHome();
  range.EnterHome();
  EXPECT_TRUE(range.IsWorthStealing()) << "3 for 2";
  (void)range.Claim(1, 2);
  EXPECT_TRUE(range.IsWorthStealing()) << "2 for 2";
  (void)range.Claim(1, 2);
  EXPECT_FALSE(range.IsWorthStealing()) << "1 for 2";
  range.LeaveHome();
  EXPECT_TRUE(range.IsWorthStealing()) << "1 for 1";
  (void)range.Claim(1, 2);
  range.LeaveHome();
  EXPECT_FALSE(range.IsWorthStealing()) << "nothing is left";
}

// As many threadgroups on each node as it has workers, and none ends before all
// have begun: nobody can take two, so each must take one of its own node's.
TEST(StealTest, WorkersRunTheirOwnNodesThreadgroups) {
  const auto runtime = MakeRuntime(0, "numa:3 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  ASSERT_EQ(runtime->num_workers(), 6);
  const std::array<int64_t, 4> begin = {0, 2, 4, 6};
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> begun = 0;
    std::array<std::atomic<int>, 6> node_of = {};
    VARLANE_ASSERT_OK(runtime->Launch({6, begin}, [&](const Threadgroup& g) {
      node_of[static_cast<size_t>(g.index())] = g.node();
      ++begun;
      EXPECT_TRUE(WaitUntil([&] { return begun == 6; }));
    }));
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(node_of[static_cast<size_t>(i)], i / 2) << "threadgroup " << i;
    }
  }
}

TEST(StealTest, EachNodesWorkersDrainTheirOwnRangeFirst) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4, "numa:2 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  ASSERT_EQ(runtime->num_nodes(), 2);
  EXPECT_EQ(runtime->NodeOfWorker(1), 0);
  EXPECT_EQ(runtime->NodeOfWorker(2), 1);
  for (const int64_t cut : {0, 1, 300, 999, 1000}) {
    const std::array<int64_t, 3> begin = {0, cut, 1000};
    EXPECT_TRUE(RunsAllOnce(*runtime, {1000, begin})) << "cut at " << cut;
  }
  // No worker goes to the other range while its own has unclaimed indices: in
  // the order in which one worker runs, own indices come before foreign ones.
  const std::array<int64_t, 3> begin = {0, 500, 1000};
  std::array<std::vector<int64_t>, 4> order;
  VARLANE_ASSERT_OK(runtime->Launch({1000, begin}, [&](const Threadgroup& g) {
    order[static_cast<size_t>(g.worker())].push_back(g.index());
    std::this_thread::yield();
  }));
  size_t total = 0;
  for (int worker = 0; worker < 4; ++worker) {
    const int node = runtime->NodeOfWorker(worker);
    bool is_abroad = false;
    for (const int64_t index : order[static_cast<size_t>(worker)]) {
      const bool is_own = (index >= 500) == (node == 1);
      EXPECT_FALSE(is_own && is_abroad) << "worker " << worker << " came back";
      is_abroad = is_abroad || !is_own;
      ++total;
    }
  }
  EXPECT_EQ(total, 1000u);
  ASSERT_FALSE(order[0].empty());
  EXPECT_EQ(order[0].front() < 500, true) << "the caller is on node 0";
}

TEST(StealTest, OneWorkerAloneDrainsEveryNodesRange) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(8, "numa:4 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  const std::array<int64_t, 5> begin = {0, 10, 10, 70, 100};
  std::vector<int64_t> order;
  VARLANE_ASSERT_OK(runtime->Launch(
      {100, begin},
      [&](const Threadgroup& group) { order.push_back(group.index()); },
      {.max_workers = 1}));
  std::vector<int64_t> all(100);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  EXPECT_EQ(order, all);
}

// Node 1's first threadgroup does not end until all others have: its second one
// is left to whoever comes. With one worker at home and one threadgroup left,
// that is a thief.
TEST(StealTest, AnIdleNodeHelpsOneThatIsBusy) {
  const auto runtime = MakeRuntime(0, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const std::array<int64_t, 3> begin = {0, 1, 3};
  std::atomic<int> begun = 0;
  std::atomic<int> ended = 0;
  std::array<std::atomic<int>, 3> node_of = {};
  VARLANE_ASSERT_OK(runtime->Launch({3, begin}, [&](const Threadgroup& g) {
    node_of[static_cast<size_t>(g.index())] = g.node();
    ++begun;
    // Both workers are inside before either goes on.
    EXPECT_TRUE(WaitUntil([&] { return begun >= 2; }));
    EXPECT_TRUE(g.index() != 1 || WaitUntil([&] { return ended == 2; }));
    ++ended;
  }));
  EXPECT_EQ(node_of[0], 0);
  EXPECT_EQ(node_of[1], 1);
  EXPECT_EQ(node_of[2], 0) << "not stolen";
}

// Two workers at home are busy and one threadgroup is left: the thief leaves it
// to them, although it has nothing else to do.
TEST(StealTest, TheLastOnesAreLeftToTheirOwnNode) {
  const auto runtime = MakeRuntime(0, "numa:2 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  ASSERT_EQ(runtime->num_workers(), 4);
  const std::array<int64_t, 3> begin = {0, 2, 5};
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> begun = 0;
    std::atomic<int> ended_on_0 = 0;
    std::array<std::atomic<int>, 5> node_of = {};
    VARLANE_ASSERT_OK(runtime->Launch({5, begin}, [&](const Threadgroup& g) {
      node_of[static_cast<size_t>(g.index())] = g.node();
      ++begun;
      EXPECT_TRUE(WaitUntil([&] { return begun >= 4; }));
      if (g.index() >= 2) {
        // Long after node 0 ran dry.
        EXPECT_TRUE(WaitUntil([&] { return ended_on_0 == 2; }));
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      } else {
        ++ended_on_0;
      }
    }));
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(node_of[static_cast<size_t>(i)], i < 2 ? 0 : 1)
          << "threadgroup " << i;
    }
  }
}

// Of two at home on node 1 either may go for something more urgent, and what is
// left then is the caller's in the end, although it kept away when one
// threadgroup was left for two.
TEST(StealTest, WhoIsAtHomeLeavesForSomethingMoreUrgent) {
  const auto runtime = MakeRuntime(0, "numa:2 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  ASSERT_EQ(runtime->num_workers(), 4);
  const std::array<int64_t, 3> begin = {0, 0, 4};
  std::atomic<int> begun = 0;
  std::atomic<int> ran = 0;
  std::atomic<bool> caller_ran_one = false;
  std::atomic<int> urgent_begun = 0;
  std::thread urgent([&] {
    EXPECT_TRUE(WaitUntil([&] { return caller_ran_one.load(); }));
    // All four workers at once: both must leave the launch below.
    VARLANE_EXPECT_OK(runtime->Launch(
        {4},
        [&](const Threadgroup&) {
          ++urgent_begun;
          EXPECT_TRUE(WaitUntil([&] { return urgent_begun == 4; }));
        },
        {.priority = 1}));
  });
  VARLANE_ASSERT_OK(runtime->Launch(
      {4, begin},
      [&](const Threadgroup& g) {
        ++ran;
        if (++begun > 3) return;
        // The caller and both of node 1 have one each.
        EXPECT_TRUE(WaitUntil([&] { return begun >= 3; }));
        if (g.worker() == 0) {
          caller_ran_one = true;
        } else {
          // By then the caller has looked around.
          EXPECT_TRUE(WaitUntil([&] { return urgent_begun > 0; }));
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
      },
      {.max_workers = 3}));
  EXPECT_EQ(ran, 4);
  urgent.join();
}

// A node whose workers never come has its range run by others.
TEST(StealTest, RangesOfAbsentWorkersAreRun) {
  const auto runtime = MakeRuntime(0, "numa:4 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const std::array<int64_t, 5> begin = {0, 0, 0, 0, 9};
  for (const int most : {1, 2}) {
    std::atomic<int> runs = 0;
    VARLANE_ASSERT_OK(runtime->Launch({9, begin},
                                      [&](const Threadgroup&) { ++runs; },
                                      {.max_workers = most}));
    EXPECT_EQ(runs, 9);
  }
}

TEST(StealTest, ThievesGoToTheNearestNodeFirst) {
  Topology topology;
  for (int i = 0; i < 4; ++i) {
    topology.nodes.push_back({.os_index = i, .memory_bytes = 1, .cores = {i}});
    topology.cores.push_back({.node = i, .pus = {i}});
  }
  topology.num_pus = 4;
  using Orders = std::vector<std::vector<int>>;
  Result<Placement> placement = PlaceWorkers(topology, {});
  VARLANE_ASSERT_OK(placement);
  EXPECT_EQ(placement->nearest,
            (Orders{{0, 1, 2, 3}, {1, 2, 3, 0}, {2, 3, 0, 1}, {3, 0, 1, 2}}));
  topology.distances = {10, 30, 20, 20, 30, 10, 40, 20,
                        20, 40, 10, 30, 20, 20, 30, 10};
  placement = PlaceWorkers(topology, {});
  VARLANE_ASSERT_OK(placement);
  EXPECT_EQ(placement->nearest,
            (Orders{{0, 2, 3, 1}, {1, 3, 0, 2}, {2, 0, 3, 1}, {3, 0, 1, 2}}));
  RuntimeOptions two;
  two.num_threads = 2;
  placement = PlaceWorkers(topology, two);
  VARLANE_ASSERT_OK(placement);
  EXPECT_EQ(placement->nearest, (Orders{{0, 1}, {1, 0}}));
}

}  // namespace
}  // namespace varlane
