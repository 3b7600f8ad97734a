// Proves that the stamps of traces are times: in nanoseconds, in order, and the
// same on every CPU.
//
// SPDX-License-Identifier: Apache-2.0

#include "runtime/trace_clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/affinity.h"
#include "tests/testing/files.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using Steady = std::chrono::steady_clock;

// Steady_clock's, and the CPU's where there is one to be trusted.
std::vector<bool> Sources() {
  return HasSteadyCounter() ? std::vector<bool>{false, true}
                            : std::vector<bool>{false};
}

// A stamp, and steady_clock before and after it.
struct Stamp {
  double earliest_ns = 0;
  int64_t ticks = 0;
  double latest_ns = 0;
};

Stamp TakeStamp(const TraceClock& clock) {
  const auto now = [] {
    return std::chrono::duration<double, std::nano>(
               Steady::now().time_since_epoch())
        .count();
  };
  Stamp stamp;
  stamp.earliest_ns = now();
  stamp.ticks = clock.Now();
  stamp.latest_ns = now();
  return stamp;
}

TEST(TraceClockTest, TicksAreTheSystemsTime) {
  for (const bool uses_counter : Sources()) {
    const TraceClock clock(uses_counter);
    EXPECT_EQ(clock.uses_counter(), uses_counter);
    const Stamp first = TakeStamp(clock);
    EXPECT_GE(first.ticks, 0);
    for (const int ms : {1, 120}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
      const Stamp last = TakeStamp(clock);
      const double ns =
          static_cast<double>(last.ticks - first.ticks) * clock.NsPerTick();
      const double slack = 1e-3 * ns + 100;
      EXPECT_GE(ns, last.earliest_ns - first.latest_ns - slack);
      EXPECT_LE(ns, last.latest_ns - first.earliest_ns + slack);
    }
    const double ticks =
        static_cast<double>(clock.TicksIn(std::chrono::microseconds(100)));
    EXPECT_NEAR(ticks * clock.NsPerTick(), 1e5, 1e3);
  }
}

TEST(TraceClockTest, OnlyTheKernelsOwnCounterIsTrusted) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("clocksource");
  const auto trusts = [&](const char* name) {
    std::ofstream(path) << name << "\n";
    return HasSteadyCounter(path);
  };
  for (const char* other : {"kvm-clock", "hpet", "tscx", ""}) {
    EXPECT_FALSE(trusts(other)) << other;
  }
  EXPECT_FALSE(HasSteadyCounter("/no/such/file"));
  if (HasSteadyCounter()) {
    EXPECT_TRUE(trusts("tsc"));
  }
}

// A hand-over, from CPU to CPU: the stamp after it is not before the one of
// whoever handed over. The counter may be read a little early, as loads may.
TEST(TraceClockTest, StampsOfSeveralCpusCompare) {
  CpuMask ours;
  VARLANE_ASSERT_OK(CpuMask::ReadThread(&ours));
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CpuMask::kMaxCpus; ++cpu) {
    if (ours.Has(cpu)) cpus.push_back(cpu);
  }
  for (const bool uses_counter : Sources()) {
    const TraceClock clock(uses_counter);
    const int64_t slack = clock.TicksIn(std::chrono::microseconds(2));
    std::atomic<int> turn = 0;
    int64_t stamp = clock.Now();
    std::vector<std::thread> threads;
    constexpr int kThreads = 2;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        CpuMask own;
        own.Add(cpus[static_cast<size_t>(i) % cpus.size()]);
        (void)own.ApplyToThread();
        for (int round = i; round < 500; round += kThreads) {
          while (turn.load(std::memory_order_acquire) != round) {
            std::this_thread::yield();
          }
          const int64_t now = clock.Now();
          EXPECT_GE(now, stamp - slack) << "round " << round;
          stamp = now;
          turn.store(round + 1, std::memory_order_release);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace varlane
