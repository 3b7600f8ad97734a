// Proves that workers go where they are needed most, and that launches run on
// an embedder's threads.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/graph.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using Clock = std::chrono::steady_clock;
using testing::MakeRuntime;

// --- priorities --------------------------------------------------------------

// Work that keeps every worker busy until it is told to end.
class Background {
 public:
  static constexpr int64_t kMost = 20000;  // threadgroups, of a millisecond

  void Body() {
    ran_.fetch_add(1);
    if (!ends_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void End() {
    ran_before_end_ = ran_.load();
    ends_ = true;
  }
  bool IsUnderWay() const { return ran_ > 3; }
  bool RanToItsEnd() const { return ran_ == kMost; }
  int64_t ran_before_end() const { return ran_before_end_; }

 private:
  std::atomic<int64_t> ran_ = 0;
  std::atomic<bool> ends_ = false;
  int64_t ran_before_end_ = 0;
};

// A launch whose bodies need all three workers at once; how many came before
// the background ran out.
int GatherAll(Runtime* runtime, Background* background, int priority) {
  std::atomic<int> arrived = 0;
  LaunchOptions options;
  options.priority = priority;
  EXPECT_TRUE(testing::IsOk(runtime->Launch(
      {3},
      [&](const Threadgroup&) {
        arrived.fetch_add(1);
        while (arrived < 3 && !background->RanToItsEnd()) {
          std::this_thread::yield();
        }
      },
      options)));
  const int together = background->RanToItsEnd() ? 0 : arrived.load();
  background->End();
  return together;
}

TEST(PriorityTest, WorkersLeaveALaunchForAMoreUrgentOne) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  for (const bool claims_ahead : {false, true}) {
    Background background;
    std::thread prefill([&] {
      VARLANE_EXPECT_OK(runtime->Launch(
          {.num_threadgroups = Background::kMost, .claims_ahead = claims_ahead},
          [&](const Threadgroup&) { background.Body(); }));
    });
    while (!background.IsUnderWay()) std::this_thread::yield();
    EXPECT_EQ(GatherAll(runtime.get(), &background, 1), 3);
    prefill.join();
    EXPECT_TRUE(background.RanToItsEnd()) << "they must come back";
  }
}

// Those of the node whose range it is, too.
TEST(PriorityTest, WorkersLeaveTheRangeOfTheirNode) {
  RuntimeOptions options;
  options.topology = "numa:2 core:2 pu:1";
  const std::unique_ptr<Runtime> runtime = MakeRuntime(options);
  ASSERT_EQ(runtime->num_workers(), 4);
  Background background;
  const std::array<int64_t, 3> begin = {0, Background::kMost / 2,
                                        Background::kMost};
  std::array<std::atomic<bool>, 4> is_busy = {};
  std::thread prefill([&] {
    VARLANE_EXPECT_OK(runtime->Launch(
        {Background::kMost, begin}, [&](const Threadgroup& group) {
          is_busy[static_cast<size_t>(group.worker())] = true;
          background.Body();
        }));
  });
  for (const std::atomic<bool>& is_one_busy : is_busy) {
    while (!is_one_busy) std::this_thread::yield();
  }
  EXPECT_EQ(GatherAll(runtime.get(), &background, 1), 3);
  EXPECT_LT(background.ran_before_end(), Background::kMost / 2)
      << "not at once";
  prefill.join();
  EXPECT_TRUE(background.RanToItsEnd());
}

TEST(PriorityTest, WorkersLeaveAGraphBetweenTwoNodes) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  Background background;
  constexpr int kNodes = 200;
  LaunchGraph graph;
  std::vector<GraphNode> after;
  for (int i = 0; i < kNodes; ++i) {
    const Result<GraphNode> node = graph.AddLaunch(
        "n", Background::kMost / kNodes,
        [&](const Threadgroup&, void*) { background.Body(); }, after);
    VARLANE_ASSERT_OK(node);
    after = {*node};
  }
  VARLANE_ASSERT_OK(graph.Build());
  std::thread prefill([&] { VARLANE_EXPECT_OK(runtime->Run(graph)); });
  while (!background.IsUnderWay()) std::this_thread::yield();
  EXPECT_EQ(GatherAll(runtime.get(), &background, 1), 3);
  prefill.join();
  EXPECT_TRUE(background.RanToItsEnd());
}

// Nobody is sent for again: those that left find the launch on the board.
TEST(PriorityTest, WorkersComeBackToWhatTheyLeft) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  std::array<std::atomic<bool>, 3> is_busy = {};
  std::array<std::atomic<bool>, 3> is_back = {};
  std::atomic<bool> was_urgent = false;
  std::atomic<bool> is_over = false;
  const auto all = [](const auto& flags) {
    return std::all_of(
        flags.begin(), flags.end(),
        [](const std::atomic<bool>& flag) { return bool(flag); });
  };
  std::thread prefill([&] {
    VARLANE_EXPECT_OK(runtime->Launch({5000}, [&](const Threadgroup& group) {
      const auto worker = static_cast<size_t>(group.worker());
      is_busy[worker] = true;
      if (was_urgent) is_back[worker] = true;
      if (!all(is_back))
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }));
    is_over = true;
  });
  while (!all(is_busy) && !is_over) std::this_thread::yield();
  std::atomic<int> arrived = 0;
  VARLANE_EXPECT_OK(runtime->Launch({3},
                                    [&](const Threadgroup&) {
                                      arrived.fetch_add(1);
                                      while (arrived < 3 && !is_over)
                                        std::this_thread::yield();
                                      was_urgent = true;
                                    },
                                    {.priority = 1}));
  prefill.join();
  EXPECT_TRUE(all(is_back));
}

// --- an embedder's threads ---------------------------------------------------

// Tasks on their way to an arena. TBB hands its own over inside a library that
// ThreadSanitizer does not see; a mutex it does.
class TaskQueue {
 public:
  void Put(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  void RunOne() {
    std::unique_lock lock(mutex_);
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
  }

 private:
  std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;
};
TaskQueue& Tasks() {
  static TaskQueue tasks;
  return tasks;
}

void Enqueue(tbb::task_arena* arena, std::function<void()> task) {
  Tasks().Put(std::move(task));
  arena->enqueue([] { Tasks().RunOne(); });
}

// TBB's own limit is a thread a core, of which there may be few here: tests
// raise it.
RuntimeOptions On(tbb::task_arena* arena, int num_threads) {
  RuntimeOptions options;
  options.num_threads = num_threads;
  options.executor = [arena](std::function<void()> task) {
    Enqueue(arena, std::move(task));
  };
  return options;
}

TEST(ExecutorTest, LaunchesAndGraphsRunOnTheEmbeddersArena) {
  const tbb::global_control control(
      tbb::global_control::max_allowed_parallelism, 4);
  tbb::task_arena arena(3, 0);
  const std::unique_ptr<Runtime> runtime = MakeRuntime(On(&arena, 4));
  EXPECT_EQ(runtime->num_workers(), 4);
  EXPECT_EQ(runtime->num_nodes(), 1);
  EXPECT_EQ(runtime->PuOfWorker(1), -1) << "where it runs is not our business";
  EXPECT_EQ(runtime->MemoryOfNode(0), -1);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> strangers = 0;
  std::atomic<int> helped = 0;
  std::vector<std::atomic<int>> inside(4);
  const auto body = [&](const Threadgroup& group) {
    auto& mine = inside[static_cast<size_t>(group.worker())];
    EXPECT_EQ(mine.fetch_add(1), 0) << "two bodies are one worker";
    if (std::this_thread::get_id() != caller) {
      helped.fetch_add(1);
      // TBB numbers the threads of the arena that runs this one.
      const int slot = tbb::this_task_arena::current_thread_index();
      if (slot < 0 || slot >= 3) strangers.fetch_add(1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    mine.fetch_sub(1);
  };
  LaunchGraph graph;
  VARLANE_ASSERT_OK(graph.AddLaunch(
      "n", 40, [&](const Threadgroup& group, void*) { body(group); }));
  VARLANE_ASSERT_OK(graph.Build());
  for (int round = 0; round < 30; ++round) {
    VARLANE_ASSERT_OK(runtime->Launch({40}, body));
    VARLANE_ASSERT_OK(runtime->Run(graph));
  }
  EXPECT_GT(helped.load(), 0) << "nobody helped";
  EXPECT_EQ(strangers.load(), 0);
}

// A service may launch from its arena, where all threads are busy doing that.
TEST(ExecutorTest, LaunchesFromEveryThreadOfTheArenaNeverWaitForOne) {
  const tbb::global_control control(
      tbb::global_control::max_allowed_parallelism, 4);
  tbb::task_arena arena(2, 0);
  const std::unique_ptr<Runtime> runtime = MakeRuntime(On(&arena, 3));
  std::atomic<int> done = 0;
  std::atomic<int64_t> ran = 0;
  for (int i = 0; i < 50; ++i) {
    Enqueue(&arena, [&] {
      (void)runtime->Launch({20},
                            [&](const Threadgroup&) { ran.fetch_add(1); });
      done.fetch_add(1);
    });
  }
  const auto give_up = Clock::now() + std::chrono::seconds(60);
  while (done < 50 && Clock::now() < give_up) std::this_thread::yield();
  EXPECT_EQ(done.load(), 50);
  EXPECT_EQ(ran.load(), 50 * 20);
}

TEST(ExecutorTest, OneThatRefusesOrRunsAtOnceIsNoHindrance) {
  RuntimeOptions options;
  options.num_threads = 3;
  for (const bool refuses : {true, false}) {
    options.executor = [refuses](const std::function<void()>& task) {
      if (refuses) throw std::runtime_error("shutting down");
      task();
    };
    const std::unique_ptr<Runtime> runtime = MakeRuntime(options);
    std::atomic<int> ran = 0;
    for (int round = 0; round < 20; ++round) {
      VARLANE_EXPECT_OK(
          runtime->Launch({10}, [&](const Threadgroup&) { ran.fetch_add(1); }));
    }
    EXPECT_EQ(ran.load(), 200);
  }
}

}  // namespace
}  // namespace varlane
