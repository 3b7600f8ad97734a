// Soaks the engine: launches and graphs of random grids from four threads at
// once, some of which nest, throw or stop; and what a fork leaves behind.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <vector>

#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/graph.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using testing::MakeRuntime;

// What a graph's bodies add to.
struct Sum {
  std::atomic<int64_t> of_indices = 0;
};

// One thread's share of the soak.
class Caller {
 public:
  Caller(Runtime* runtime, const LaunchGraph* graph, uint64_t seed)
      : runtime_(runtime), graph_(graph), random_(seed) {}

  void Launch() {
    const int64_t n = Draw(8) == 0 ? Draw(2000) : Draw(40);
    switch (Draw(16)) {
      case 0:
        return Failing(n + 1);
      case 1:
        return Stopping(n + 1);
      case 2:
        return Nesting(n % 20);
      case 3:
        return Graph();
      default:
        return Plain(n);
    }
  }

 private:
  int64_t Draw(int64_t below) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
  }

  // Bodies check that their scratch is their own and add up their indices, by
  // worker and without atomics.
  void Plain(int64_t n) {
    const auto bytes = static_cast<size_t>(Draw(3) * 300);
    std::vector<int64_t> sums(static_cast<size_t>(runtime_->num_workers()));
    const Status status = runtime_->Launch(
        {n},
        [&](const Threadgroup& group) {
          const auto mark = static_cast<unsigned char>(group.index());
          if (bytes > 0) std::memset(group.scratch().data(), mark, bytes);
          sums[static_cast<size_t>(group.worker())] += group.index() + 1;
          if (bytes > 0) {
            EXPECT_EQ(group.scratch()[bytes - 1], std::byte{mark});
          }
        },
        {.scratch_bytes = bytes,
         .max_workers = static_cast<int>(Draw(6)),
         .priority = static_cast<int>(Draw(3)) - 1});
    EXPECT_TRUE(testing::IsOk(status));
    int64_t sum = 0;
    for (const int64_t part : sums) sum += part;
    EXPECT_EQ(sum, n * (n + 1) / 2);
  }

  void Failing(int64_t n) {
    const int64_t bad = Draw(n);
    const Status status = runtime_->Launch({n}, [&](const Threadgroup& group) {
      if (group.index() == bad) throw std::runtime_error("soak");
    });
    EXPECT_EQ(status.code(), StatusCode::kAborted);
  }

  void Stopping(int64_t n) {
    std::stop_source stop;
    const int64_t last = Draw(n);
    std::atomic<int64_t> ran = 0;
    const Status status = runtime_->Launch({n},
                                           [&](const Threadgroup& group) {
                                             ran.fetch_add(1);
                                             if (group.index() == last) {
                                               stop.request_stop();
                                             }
                                           },
                                           {.stop = stop.get_token()});
    EXPECT_TRUE(status.code() == StatusCode::kCancelled ||
                (status.ok() && ran.load() == n));
  }

  void Nesting(int64_t n) {
    std::atomic<int64_t> ran = 0;
    const Status status = runtime_->Launch({n}, [&](const Threadgroup&) {
      EXPECT_TRUE(testing::IsOk(runtime_->Launch(
          {5}, [&](const Threadgroup&) { ran.fetch_add(1); })));
    });
    EXPECT_TRUE(testing::IsOk(status));
    EXPECT_EQ(ran.load(), 5 * n);
  }

  void Graph() {
    Sum sum;
    LaunchOptions options;
    options.priority = static_cast<int>(Draw(3)) - 1;
    EXPECT_TRUE(testing::IsOk(runtime_->Run(*graph_, &sum, options)));
    EXPECT_EQ(sum.of_indices.load(), 6 * 45);
  }

  Runtime* runtime_;
  const LaunchGraph* graph_;
  std::mt19937_64 random_;
};

void Soak(int num_launches) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  LaunchGraph graph;
  std::vector<GraphNode> nodes;
  for (size_t i = 0; i < 6; ++i) {
    std::vector<GraphNode> after;
    if (i >= 2) after.push_back(nodes[i - 2]);
    const Result<GraphNode> node = graph.AddLaunch(
        "sum", 10,
        [](const Threadgroup& group, void* sum) {
          static_cast<Sum*>(sum)->of_indices.fetch_add(group.index());
        },
        after);
    VARLANE_ASSERT_OK(node);
    nodes.push_back(*node);
  }
  VARLANE_ASSERT_OK(graph.Build());
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      Caller caller(runtime.get(), &graph, seed);
      for (int i = 0; i < num_launches / 4; ++i) caller.Launch();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(SoakTest, RandomLaunchesFromFourCallers) {
  Soak(testing::kSanitized ? 20000 : 200000);
}

// Label `full`.
TEST(SoakTest, DISABLED_AMillionLaunchesFromFourCallers) { Soak(1000000); }

// The exit code of a child that runs `body`.
template <typename Body>
int InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(ForkTest, AChildMayLeaveOrDestroyTheRuntimeAndTheParentGoesOn) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "sanitizers do not follow forks of many threads";
  }
  std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  const auto launch = [&] {
    std::atomic<int> ran = 0;
    VARLANE_EXPECT_OK(
        runtime->Launch({100}, [&](const Threadgroup&) { ran.fetch_add(1); }));
    EXPECT_EQ(ran.load(), 100);
  };
  // Threads hold TBB's locks now and then: many forks right after a launch meet
  // that.
  for (int round = 0; round < 50; ++round) {
    launch();
    EXPECT_EQ(InChild([] {}), 0);
    launch();
    EXPECT_EQ(InChild([&] {
                alarm(30);  // ends a child that waits for a thread it lacks
                runtime.reset();
              }),
              0);
  }
  launch();
}

}  // namespace
}  // namespace varlane
