// Proves what a launch promises: every index once, exclusive workers, private
// scratch, and a runtime that survives every failure.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/launches.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using testing::Counts;
using testing::MakeRuntime;
using testing::RunsAllOnce;

constexpr std::array<int, 5> kThreadCounts = {1, 2, 3, 4, 8};

TEST(LaunchTest, EveryIndexRunsOnceAtEverySizeAndThreadCount) {
  for (const int threads : kThreadCounts) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    EXPECT_EQ(runtime->num_workers(), threads);
    for (const int64_t n : {1,  2,  3,  4,  5,  7,  8,   9,    15,   16,
                            17, 31, 33, 63, 64, 65, 127, 1000, 4097, 20000}) {
      EXPECT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = n}))
          << threads << " threads";
    }
  }
}

TEST(LaunchTest, WorkersThatClaimAheadKnowWhatTheyRunNext) {
  for (const int threads : kThreadCounts) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    for (const int64_t n : {1, 2, 5, 16, 333, 5000}) {
      Counts counts(n);
      std::vector<int64_t> told(static_cast<size_t>(threads),
                                Threadgroup::kUnknown);
      std::atomic<int64_t> known = 0;
      VARLANE_ASSERT_OK(runtime->Launch(
          {.num_threadgroups = n, .claims_ahead = true},
          [&](const Threadgroup& group) {
            counts.Add(group.index());
            int64_t& next = told[static_cast<size_t>(group.worker())];
            if (next != Threadgroup::kUnknown) {
              EXPECT_EQ(group.index(), next);
            }
            next = group.next();
            if (next != Threadgroup::kUnknown) known.fetch_add(1);
          }));
      EXPECT_EQ(counts.FirstWrong(), -1);
      for (const int64_t next : told) EXPECT_EQ(next, Threadgroup::kUnknown);
      // Only where fewer than two for each are left.
      EXPECT_GE(known, n - 3 * threads) << threads << " threads";
    }
  }
}

TEST(LaunchTest, ManySmallLaunchesInARowAllRun) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  for (int i = 0; i < 5000; ++i) {
    ASSERT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = 1 + i % 9}));
  }
}

TEST(LaunchTest, AnEmptyGridRunsNothing) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  ASSERT_NE(runtime, nullptr);
  VARLANE_ASSERT_OK(
      runtime->Launch({}, [](const Threadgroup&) { ADD_FAILURE(); }));
}

TEST(LaunchTest, BadGridsAreRefusedWithTheirValues) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2, "numa:2 core:1 pu:1");
  ASSERT_NE(runtime, nullptr);
  const auto refusal = [&](const Grid& grid, int max_workers) {
    const Status status =
        runtime->Launch(grid, [](const Threadgroup&) { ADD_FAILURE(); },
                        {.max_workers = max_workers});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    return std::string(status.message());
  };
  EXPECT_NE(refusal({-1}, 0).find("num_threadgroups = -1"), std::string::npos);
  refusal({std::numeric_limits<int64_t>::max()}, 0);
  EXPECT_NE(refusal({4}, -3).find("max_workers = -3"), std::string::npos);
  const std::array<int64_t, 2> two = {0, 4};
  EXPECT_NE(refusal({4, two}, 0).find("2 entries"), std::string::npos);
  const std::array<int64_t, 3> first = {1, 2, 4};
  EXPECT_NE(refusal({4, first}, 0).find("[0] = 1"), std::string::npos);
  const std::array<int64_t, 3> down = {0, 5, 4};
  EXPECT_NE(refusal({4, down}, 0).find("[2] = 4"), std::string::npos);
  const std::array<int64_t, 3> last = {0, 2, 3};
  EXPECT_NE(refusal({4, last}, 0).find("must be num_threadgroups = 4"),
            std::string::npos);
}

TEST(LaunchTest, WorkersAreInRangeAndNeverShared) {
  for (const int threads : kThreadCounts) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    std::vector<std::atomic<int>> busy(static_cast<size_t>(threads));
    std::vector<int64_t> sums(static_cast<size_t>(threads));  // no atomics
    VARLANE_ASSERT_OK(runtime->Launch({5000}, [&](const Threadgroup& group) {
      ASSERT_GE(group.worker(), 0);
      ASSERT_LT(group.worker(), threads);
      const auto worker = static_cast<size_t>(group.worker());
      EXPECT_EQ(busy[worker].fetch_add(1), 0) << "worker " << worker;
      sums[worker] += group.index();
      EXPECT_EQ(group.node(), runtime->NodeOfWorker(group.worker()));
      busy[worker].fetch_sub(1);
    }));
    int64_t sum = 0;
    for (const int64_t part : sums) sum += part;
    EXPECT_EQ(sum, int64_t{5000} * 4999 / 2);
  }
}

TEST(LaunchTest, OversubscriptionReallyRunsFourWorkersAtOnce) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  std::atomic<int> arrived = 0;
  std::array<std::thread::id, 4> ids;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(60);
  VARLANE_ASSERT_OK(runtime->Launch({4}, [&](const Threadgroup& group) {
    ids[static_cast<size_t>(group.worker())] = std::this_thread::get_id();
    arrived.fetch_add(1);
    while (arrived.load() < 4 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }));
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end())
      << "four bodies that wait for each other need four threads";
}

TEST(LaunchTest, MaxWorkersBoundsTheBodiesAtOnce) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  for (int max = 1; max <= 5; ++max) {
    std::atomic<int> now = 0;
    std::atomic<int> most = 0;
    VARLANE_ASSERT_OK(runtime->Launch(
        {400},
        [&](const Threadgroup&) {
          const int mine = now.fetch_add(1) + 1;
          int seen = most.load();
          while (seen < mine && !most.compare_exchange_weak(seen, mine)) {
          }
          std::this_thread::yield();
          now.fetch_sub(1);
        },
        {.max_workers = max}));
    EXPECT_LE(most.load(), std::min(max, 4));
  }
}

TEST(LaunchTest, ALaunchOfOneRunsInTheCaller) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  const std::thread::id self = std::this_thread::get_id();
  VARLANE_ASSERT_OK(runtime->Launch({1}, [&](const Threadgroup& group) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    EXPECT_EQ(group.worker(), 0);
  }));
  VARLANE_ASSERT_OK(runtime->Launch(
      {100},
      [&](const Threadgroup&) { EXPECT_EQ(std::this_thread::get_id(), self); },
      {.max_workers = 1}));
}

TEST(LaunchTest, ScratchIsAlignedPrivateAndGrows) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  for (const size_t bytes : {0, 1, 64, 1000, 100000, 500, 3 << 20, 1}) {
    VARLANE_ASSERT_OK(runtime->Launch(
        {64},
        [&](const Threadgroup& group) {
          const std::span<std::byte> scratch = group.scratch();
          ASSERT_GE(scratch.size(), bytes);
          if (bytes == 0) return;
          EXPECT_EQ(reinterpret_cast<uintptr_t>(scratch.data()) % 64, 0u);
          const auto mark = static_cast<unsigned char>(group.index());
          std::memset(scratch.data(), mark, bytes);
          std::this_thread::yield();
          EXPECT_EQ(scratch[0], std::byte{mark});
          EXPECT_EQ(scratch[bytes / 2], std::byte{mark});
          EXPECT_EQ(scratch[bytes - 1], std::byte{mark});
        },
        {.scratch_bytes = bytes}));
  }
}

TEST(LaunchTest, ScratchThatCannotBeHadIsAnErrorAndNothingMore) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  ASSERT_NE(runtime, nullptr);
  for (const size_t bytes :
       {size_t{1} << 55, std::numeric_limits<size_t>::max()}) {
    const Status status =
        runtime->Launch({64}, [](const Threadgroup&) { ADD_FAILURE(); },
                        {.scratch_bytes = bytes});
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted)
        << status.ToString();
    EXPECT_FALSE(status.message().empty());
  }
  EXPECT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = 100}));
}

TEST(LaunchTest, AnExceptionAtAnyIndexLeavesTheRuntimeAsGoodAsNew) {
  for (const int threads : {1, 2, 4}) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    for (int64_t bad = 0; bad < 64; ++bad) {
      Counts counts(64);
      const Status status =
          runtime->Launch({64}, [&](const Threadgroup& group) {
            counts.Add(group.index());
            if (group.index() == bad) throw std::runtime_error("boom");
          });
      ASSERT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
      EXPECT_NE(status.message().find("boom"), std::string_view::npos);
      EXPECT_NE(status.message().find(std::to_string(bad)),
                std::string_view::npos);
      ASSERT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = 64}));
    }
  }
}

TEST(LaunchTest, AnExceptionCancelsTheRestAndBodiesCanSeeIt) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  ASSERT_NE(runtime, nullptr);
  std::atomic<int64_t> ran = 0;
  const Status status =
      runtime->Launch({1000000}, [&](const Threadgroup& group) {
        ran.fetch_add(1);
        if (group.index() == 3) throw 7;  // not a std::exception
        if (group.index() == 0) {
          while (!group.cancelled() && ran.load() < 4) {
            std::this_thread::yield();
          }
        }
      });
  EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
  EXPECT_LT(ran.load(), 1000000);
}

TEST(LaunchTest, TellsWhatEachWorkerSpent) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  ASSERT_NE(runtime, nullptr);
  std::array<double, 3> seconds = {};
  std::array<std::atomic<int>, 3> bodies = {};
  LaunchOptions options;
  options.worker_seconds = seconds;
  VARLANE_ASSERT_OK(runtime->Launch(
      {30},
      [&](const Threadgroup& group) {
        bodies[static_cast<size_t>(group.worker())].fetch_add(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      options));
  for (size_t worker = 0; worker < seconds.size(); ++worker) {
    EXPECT_GE(seconds[worker], bodies[worker].load() * 0.001) << worker;
    if (bodies[worker].load() == 0) {
      EXPECT_LT(seconds[worker], 0.1) << worker;
    }
  }
  const double before = seconds[0];
  VARLANE_ASSERT_OK(runtime->Launch(
      {1}, [](const Threadgroup&) {}, options));
  EXPECT_GT(seconds[0], before) << "it is added to what is there";
  options.worker_seconds = std::span(seconds).first(2);
  const Status refused = runtime->Launch(
      {30}, [](const Threadgroup&) {}, options);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("worker_seconds has 2 entries"),
            std::string_view::npos);
}

TEST(LaunchTest, AStopRequestCancels) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  ASSERT_NE(runtime, nullptr);
  {
    std::stop_source stop;
    stop.request_stop();
    const Status status =
        runtime->Launch({10}, [](const Threadgroup&) { ADD_FAILURE(); },
                        {.stop = stop.get_token()});
    EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.ToString();
  }
  std::stop_source stop;
  std::atomic<int64_t> ran = 0;
  const Status status = runtime->Launch({1000000},
                                        [&](const Threadgroup& group) {
                                          if (ran.fetch_add(1) == 50)
                                            stop.request_stop();
                                          if (stop.stop_requested()) {
                                            EXPECT_TRUE(group.cancelled());
                                          }
                                        },
                                        {.stop = stop.get_token()});
  EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.ToString();
  EXPECT_LT(ran.load(), 1000000);
  std::stop_source quiet;
  VARLANE_EXPECT_OK(runtime->Launch({10}, [](const Threadgroup&) {},
                                    {.stop = quiet.get_token()}));
}

TEST(LaunchTest, ABodyThatReturnsEarlyForAStopMakesTheLaunchCancelled) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(1);
  ASSERT_NE(runtime, nullptr);
  std::stop_source stop;
  const Status status = runtime->Launch({1},
                                        [&](const Threadgroup& group) {
                                          stop.request_stop();
                                          if (group.cancelled())
                                            return;  // its output is unwritten
                                          ADD_FAILURE();
                                        },
                                        {.stop = stop.get_token()});
  EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.ToString();
}

// Launches three deep; each level checks exclusiveness and scratch.
void LaunchNested(Runtime& runtime, int depth, std::atomic<int64_t>* leaves) {
  std::vector<std::atomic<int>> busy(
      static_cast<size_t>(runtime.num_workers()));
  const Status status =
      runtime.Launch({6},
                     [&](const Threadgroup& group) {
                       const auto worker = static_cast<size_t>(group.worker());
                       EXPECT_EQ(busy[worker].fetch_add(1), 0);
                       const auto mark = static_cast<unsigned char>(
                           depth * 16 + static_cast<int>(group.index()));
                       std::memset(group.scratch().data(), mark, 256);
                       if (depth > 0) {
                         LaunchNested(runtime, depth - 1, leaves);
                       } else {
                         leaves->fetch_add(1);
                       }
                       EXPECT_EQ(group.scratch()[0], std::byte{mark});
                       EXPECT_EQ(group.scratch()[255], std::byte{mark});
                       busy[worker].fetch_sub(1);
                     },
                     {.scratch_bytes = 256});
  EXPECT_TRUE(testing::IsOk(status));
}

TEST(LaunchTest, LaunchesNestWithPrivateScratchAndWorkers) {
  for (const int threads : kThreadCounts) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    for (int repeat = 0; repeat < 5; ++repeat) {
      std::atomic<int64_t> leaves = 0;
      LaunchNested(*runtime, 3, &leaves);
      EXPECT_EQ(leaves.load(), 6 * 6 * 6 * 6);
    }
  }
}

TEST(LaunchTest, ABodyThatLaunchesKeepsItsWorkerNumberAsTheCaller) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  VARLANE_ASSERT_OK(runtime->Launch({200}, [&](const Threadgroup& outer) {
    const std::thread::id self = std::this_thread::get_id();
    VARLANE_EXPECT_OK(runtime->Launch({3}, [&](const Threadgroup& inner) {
      if (std::this_thread::get_id() == self) {
        EXPECT_EQ(inner.worker(), outer.worker());
      } else {
        EXPECT_NE(inner.worker(), outer.worker());
      }
    }));
    std::this_thread::yield();
  }));
}

TEST(LaunchTest, TwoRuntimesNestInEachOther) {
  const std::unique_ptr<Runtime> a = MakeRuntime(2);
  const std::unique_ptr<Runtime> b = MakeRuntime(3);
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  std::atomic<int64_t> leaves = 0;
  for (int repeat = 0; repeat < 10; ++repeat) {
    VARLANE_ASSERT_OK(a->Launch({5}, [&](const Threadgroup&) {
      VARLANE_EXPECT_OK(b->Launch({5}, [&](const Threadgroup&) {
        VARLANE_EXPECT_OK(
            a->Launch({5}, [&](const Threadgroup&) { leaves.fetch_add(1); }));
      }));
    }));
  }
  EXPECT_EQ(leaves.load(), 10 * 125);
}

TEST(LaunchTest, FourCallersAtOnceDoNotDisturbEachOther) {
  for (const int threads : {1, 2, 4}) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&, caller] {
        for (int i = 0; i < 100; ++i) {
          const int64_t n = 1 + (i * 37 + caller) % 200;
          if (i % 10 == 9) {
            std::atomic<int64_t> leaves = 0;
            LaunchNested(*runtime, 1, &leaves);
            EXPECT_EQ(leaves.load(), 36);
          } else if (i % 7 == caller) {
            const Status status = runtime->Launch(
                {n}, [](const Threadgroup&) { throw std::runtime_error("x"); });
            EXPECT_EQ(status.code(), StatusCode::kAborted);
          } else {
            EXPECT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = n}));
          }
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

TEST(LaunchTest, TwoRuntimesAtOnceHaveTheirOwnWorkers) {
  const std::unique_ptr<Runtime> small = MakeRuntime(2);
  const std::unique_ptr<Runtime> large = MakeRuntime(4);
  ASSERT_NE(small, nullptr);
  ASSERT_NE(large, nullptr);
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) {
      EXPECT_TRUE(RunsAllOnce(*small, {.num_threadgroups = 100}));
    }
  });
  for (int i = 0; i < 200; ++i) {
    EXPECT_TRUE(RunsAllOnce(*large, {.num_threadgroups = 100}));
  }
  other.join();
}

TEST(LaunchTest, RuntimesComeAndGoWithLaunchesJustDone) {
  for (int i = 0; i < 100; ++i) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(1 + i % 4);
    ASSERT_NE(runtime, nullptr);
    ASSERT_TRUE(RunsAllOnce(*runtime, {.num_threadgroups = i % 5}));
  }
}

}  // namespace
}  // namespace varlane
