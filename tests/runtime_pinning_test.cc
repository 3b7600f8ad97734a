// Where bodies run: helpers on their own PU, the caller where it was, and
// RunOnNode on the node's CPUs.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "tests/testing/launches.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using testing::MakeRuntime;
using testing::RunsAllOnce;

cpu_set_t AffinityOfThisThread() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  EXPECT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  return mask;
}

TEST(PinningTest, TheCallersAffinityIsWhatItWas) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(0);
  ASSERT_NE(runtime, nullptr);
  const cpu_set_t before = AffinityOfThisThread();
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = 1 + i}));
    const cpu_set_t after = AffinityOfThisThread();
    ASSERT_TRUE(CPU_EQUAL(&before, &after));
  }
  VARLANE_ASSERT_OK(runtime->RunOnNode(0, [] {}));
  // A caller that lives on the last CPU, where worker 0 does not sit.
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; --cpu) {
      if (!CPU_ISSET(cpu, &before)) continue;
      CPU_SET(cpu, &one);
      break;
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    ASSERT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = 1000}));
    (void)runtime->Launch({64}, [](const Threadgroup&) { throw 1; });
    VARLANE_ASSERT_OK(runtime->RunOnNode(0, [] {}));
    const cpu_set_t after = AffinityOfThisThread();
    EXPECT_TRUE(CPU_EQUAL(&one, &after));
  }).join();
  const cpu_set_t after = AffinityOfThisThread();
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(PinningTest, HelpersRunPinnedToTheirPu) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  if (runtime->PuOfWorker(0) < 0) GTEST_SKIP() << "pinning is not allowed here";
  std::atomic<int> arrived = 0;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(60);
  VARLANE_ASSERT_OK(runtime->Launch({4}, [&](const Threadgroup& group) {
    if (group.worker() > 0) {
      const cpu_set_t mask = AffinityOfThisThread();
      EXPECT_EQ(CPU_COUNT(&mask), 1);
      EXPECT_TRUE(CPU_ISSET(runtime->PuOfWorker(group.worker()), &mask));
    }
    arrived.fetch_add(1);
    while (arrived.load() < 4 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }));
  EXPECT_EQ(arrived.load(), 4);
}

TEST(RunOnNodeTest, RunsOnceOnTheNodesCpus) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(0);
  ASSERT_NE(runtime, nullptr);
  for (int node = 0; node < runtime->num_nodes(); ++node) {
    int runs = 0;
    VARLANE_ASSERT_OK(runtime->RunOnNode(node, [&] {
      ++runs;
      if (runtime->PuOfWorker(0) < 0) return;
      const int cpu = sched_getcpu();
      bool is_there = false;
      const Topology& topology = runtime->topology();
      for (const int core : topology.nodes[static_cast<size_t>(node)].cores) {
        const auto& pus = topology.cores[static_cast<size_t>(core)].pus;
        is_there = is_there || std::count(pus.begin(), pus.end(), cpu) > 0;
      }
      EXPECT_TRUE(is_there) << "CPU " << cpu << " is not of node " << node;
    }));
    EXPECT_EQ(runs, 1);
  }
}

TEST(RunOnNodeTest, FailuresAreValues) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  EXPECT_EQ(runtime->RunOnNode(-1, [] {}).code(), StatusCode::kInvalidArgument);
  const Status none = runtime->RunOnNode(2, [] {});
  EXPECT_EQ(none.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(none.message().find("node = 2"), std::string_view::npos);
  const Status threw =
      runtime->RunOnNode(1, [] { throw std::runtime_error("boom"); });
  EXPECT_EQ(threw.code(), StatusCode::kAborted);
  EXPECT_EQ(threw.message(), "boom");
}

}  // namespace
}  // namespace varlane
