// PressureMonitor: what it hears, what it measures, and that it sleeps.
//
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/os_calls.h"
#include "memory/pressure_sources.h"
#include "tests/testing/machine_fixture.h"
#include "tests/testing/process_use.h"
#include "tests/testing/real_cgroup.h"
#include "tests/testing/testing.h"
#include "varlane/pressure.h"

namespace varlane {
namespace {

using namespace testing;  // NOLINT(*using-namespace*)

constexpr int64_t kMs = 1'000'000;

std::unique_ptr<PressureMonitor> Open(const PressureOptions& options) {
  Result<std::unique_ptr<PressureMonitor>> monitor =
      PressureMonitor::Create(options);
  EXPECT_TRUE(IsOk(monitor));
  return monitor.ok() ? std::move(monitor).value() : nullptr;
}

PressureSample Look(PressureMonitor* monitor, int timeout_ms = 0) {
  const Result<PressureSample> sample = monitor->Wait(timeout_ms);
  EXPECT_TRUE(IsOk(sample));
  return sample.ok() ? *sample : PressureSample();
}

PressureSource Find(const PressureMonitor& monitor, const std::string& part) {
  for (const PressureSource& source : monitor.sources()) {
    if (source.name.find(part) != std::string::npos) return source;
  }
  ADD_FAILURE() << "no source " << part;
  return {};
}

class PressureMonitorTest : public MachineTest {
 protected:
  PressureOptions Options() const {
    return {.root = root_, .hold_ns = 20 * kMs, .poll_ns = 10 * kMs};
  }
  void HostHas(int64_t available) {
    Write("/proc/meminfo", "MemTotal: " + Kb(100 * kGiB) +
                               " kB\nMemAvailable: " + Kb(available) + " kB\n");
  }
};

// The reserve of 100 GiB is 2 GiB: levels begin below 6, 4 and 2 eighths of it,
// and end an eighth later.
TEST_F(PressureMonitorTest, LevelsFollowTheReserveWithHysteresis) {
  const auto monitor = Open(Options());
  struct Step {
    int64_t available_mib;
    PressureLevel level;
  };
  for (const Step& step : {Step{9000, PressureLevel::kNone},
                           {1600, PressureLevel::kNone},
                           {1500, PressureLevel::kLow},
                           {1700, PressureLevel::kLow},
                           {1800, PressureLevel::kNone},
                           {1000, PressureLevel::kMedium},
                           {1100, PressureLevel::kMedium},
                           {1300, PressureLevel::kLow},
                           {500, PressureLevel::kCritical},
                           {700, PressureLevel::kCritical},
                           {800, PressureLevel::kMedium},
                           {9000, PressureLevel::kNone}}) {
    HostHas(step.available_mib * kMiB);
    const PressureSample sample = Look(monitor.get());
    EXPECT_EQ(sample.level, step.level) << step.available_mib;
    EXPECT_EQ(sample.limit, "host RAM");
    EXPECT_EQ(sample.available_bytes, step.available_mib * kMiB);
    EXPECT_EQ(sample.deficit_bytes(),
              std::max<int64_t>(0, 2048 - step.available_mib) * kMiB);
    EXPECT_EQ(sample.cause.empty(), step.level == PressureLevel::kNone);
  }
}

TEST_F(PressureMonitorTest, TheTightestLimitIsNamed) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", kGiB, kGiB - 10 * kMiB);
  const PressureSample sample = Look(Open(Options()).get());
  EXPECT_EQ(sample.level, PressureLevel::kCritical);
  EXPECT_EQ(sample.limit, "cgroup v2 memory.max /a");
  EXPECT_EQ(sample.deficit_bytes(), 54 * kMiB);
}

TEST_F(PressureMonitorTest, V2EventCountsAreHeardAndHeldForAWhile) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 16 * kGiB, kGiB);
  const std::string events = "/sys/fs/cgroup/a/memory.events";
  Write(events, "low 0\nhigh 3\nmax 5\noom 1\noom_kill 0\n");
  const auto monitor = Open(Options());
  EXPECT_EQ(Look(monitor.get()).level, PressureLevel::kNone) << "old counts";
  Write(events, "low 0\nhigh 4\nmax 5\noom 1\noom_kill 0\n");
  PressureSample sample = Look(monitor.get());
  EXPECT_EQ(sample.level, PressureLevel::kLow);
  EXPECT_EQ(sample.cause, "cgroup v2 memory.events /a");
  Write(events, "low 0\nhigh 4\nmax 5\noom 2\noom_kill 0\n");
  EXPECT_EQ(Look(monitor.get()).level, PressureLevel::kCritical);
  EXPECT_EQ(Look(monitor.get()).level, PressureLevel::kCritical) << "held";
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(Look(monitor.get()).level, PressureLevel::kNone);
  EXPECT_EQ(Find(*monitor, "memory.events").events, 2);
}

TEST_F(PressureMonitorTest, WhatCannotBeWatchedSaysWhy) {
  Write("/proc/self/cgroup", "4:memory:/a\n");
  Write("/proc/self/mountinfo", kV1Mount);
  V1("/sys/fs/cgroup/memory/a", kGiB, kMiB);
  V1("/sys/fs/cgroup/memory", kV1Unlimited, kMiB);
  const auto monitor = Open(Options());
  EXPECT_FALSE(monitor->has_events());
  const PressureSource level = Find(*monitor, "pressure_level medium /a");
  EXPECT_FALSE(level.active);
  EXPECT_NE(level.problem.find("memory.pressure_level: No such file"),
            std::string::npos)
      << level.problem;
  EXPECT_FALSE(Find(*monitor, "PSI").active);
  EXPECT_TRUE(Find(*monitor, "MemAvailable every 10 ms").active);
}

// Without events it measures at every poll_ns, however long the wait.
TEST_F(PressureMonitorTest, WithoutEventsItPolls) {
  const auto monitor = Open(Options());
  for (int i = 0; i < 3; ++i) Look(monitor.get(), 60'000);
  EXPECT_EQ(monitor->wakeups(), 3);
}

// --- systemd

TEST_F(PressureMonitorTest, AFifoOfTheServiceManagerIsHeard) {
  const std::string path = root_ + "/watch";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  PressureOptions options = Options();
  options.systemd_watch = path;
  const auto monitor = Open(options);
  EXPECT_TRUE(monitor->has_events());
  EXPECT_EQ(Look(monitor.get()).level, PressureLevel::kNone);
  ASSERT_TRUE(WriteFile(path, "pressure"));
  const PressureSample sample = Look(monitor.get(), 10'000);
  EXPECT_EQ(sample.level, PressureLevel::kMedium);
  EXPECT_EQ(sample.cause, "systemd " + path);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(Look(monitor.get()).level, PressureLevel::kNone) << "read and gone";
}

TEST_F(PressureMonitorTest, ASocketIsConnectedToAndToldWhatToWatch) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = root_ + "/socket";
  std::strcpy(address.sun_path, path.c_str());
  const OwnedFd server(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(server.get(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)),
            0);
  ASSERT_EQ(listen(server.get(), 1), 0);
  PressureOptions options = Options();
  options.systemd_watch = path;
  options.systemd_write = "c29tZSAyMDAwMDAgMjAwMDAwMA==";
  const auto monitor = Open(options);
  const OwnedFd peer(accept(server.get(), nullptr, nullptr));
  char text[64] = {};
  ASSERT_GT(read(peer.get(), text, sizeof(text)), 0);
  EXPECT_STREQ(text, "some 200000 2000000");
  ASSERT_EQ(write(peer.get(), "!", 1), 1);
  EXPECT_EQ(Look(monitor.get(), 10'000).level, PressureLevel::kMedium);
  shutdown(peer.get(), SHUT_RDWR);
  Look(monitor.get(), 10'000);
  EXPECT_EQ(Find(*monitor, "systemd").problem, "closed by the other side");
}

TEST_F(PressureMonitorTest, DevNullAsksForNoWatchingButTheEmbedderIsHeard) {
  HostHas(kMiB);
  PressureOptions options = Options();
  options.systemd_watch = "/dev/null";
  const auto monitor = Open(options);
  EXPECT_FALSE(monitor->has_events());
  EXPECT_EQ(Look(monitor.get(), 30).level, PressureLevel::kNone);
  EXPECT_EQ(monitor->wakeups(), 1) << "no polling either";
  monitor->Notify(PressureLevel::kCritical, 5 * kMiB);
  const PressureSample sample = Look(monitor.get(), 10'000);
  EXPECT_EQ(sample.level, PressureLevel::kCritical);
  EXPECT_EQ(sample.cause, "the embedder");
  EXPECT_EQ(sample.wanted_bytes, 5 * kMiB);
  monitor->Notify(PressureLevel::kNone);
  EXPECT_EQ(Look(monitor.get(), 10'000).level, PressureLevel::kNone);
}

TEST(PressureSourcesTest, Base64IsDecodedOrRefused) {
  EXPECT_EQ(DecodeBase64(""), "");
  EXPECT_EQ(DecodeBase64("TQ=="), "M");
  EXPECT_EQ(DecodeBase64("TWE="), "Ma");
  EXPECT_EQ(DecodeBase64("TWFu"), "Man");
  EXPECT_EQ(DecodeBase64("AAECAw=="), std::string("\0\1\2\3", 4));
  EXPECT_EQ(DecodeBase64("T"), std::nullopt);
  EXPECT_EQ(DecodeBase64("T?=="), std::nullopt);
}

// RLIMIT_DATA has no events: beside it the monitor polls, though it hears of
// the cgroup's.
TEST_F(PressureMonitorTest, ALimitWithoutEventsIsPolled) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 16 * kGiB, kGiB);
  Write("/sys/fs/cgroup/a/memory.events", "high 0\nmax 0\noom 0\n");
  const auto write_use = [&](int64_t use) {
    Write("/proc/self/status", "VmSize: 1 kB\nVmData: " + Kb(use) + " kB\n");
  };
  write_use(kGiB);
  Write("/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           "
        "Units\n"
        "Max data size             " +
            std::to_string(4 * kGiB) + "           unlimited   bytes\n");
  const auto monitor = Open(Options());
  ASSERT_TRUE(monitor->has_events());
  EXPECT_TRUE(Find(*monitor, "RLIMIT_DATA every 10 ms").active);
  write_use(4 * kGiB - kMiB);
  const auto before = std::chrono::steady_clock::now();
  const PressureSample sample = Look(monitor.get(), 60'000);
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::minutes(1));
  EXPECT_EQ(sample.level, PressureLevel::kCritical);
  EXPECT_EQ(sample.limit, "RLIMIT_DATA");
}

// --- this machine

// Where there are events an idle monitor sleeps: one wake-up is the timeout.
TEST(ThisMachinePressureTest, IdleItDoesNotWake) {
  const auto monitor = Open({});
  std::string all;
  for (const PressureSource& source : monitor->sources()) {
    all +=
        source.name + (source.active ? "" : " (" + source.problem + ")") + "\n";
  }
  if (!monitor->has_events()) GTEST_SKIP() << "no events here:\n" << all;
  const PressureSample sample = Look(monitor.get());
  if (sample.level != PressureLevel::kNone) {
    GTEST_SKIP() << "this machine is short of memory: " << sample.cause;
  }
  const auto before = std::chrono::steady_clock::now();
  Look(monitor.get(), 1200);
  const auto slept = std::chrono::steady_clock::now() - before;
  // An event of the machine's may end it early; a poll would at 500 ms.
  const bool heard = Look(monitor.get()).level != PressureLevel::kNone;
  EXPECT_TRUE(heard || slept > std::chrono::milliseconds(1100)) << all;
  EXPECT_EQ(monitor->wakeups(), 3);
}

// Nothing is leaked or thrown whichever call fails; what cannot be opened is
// said.
TEST_F(PressureMonitorTest, EverySystemCallMayFail) {
  const std::string fifo = root_ + "/watch";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  PressureOptions options = {.hold_ns = 0};
  options.systemd_watch = fifo;
  options.systemd_write = "eA==";
  for (const int error : {ENOMEM, EINTR}) {
    for (int64_t index = 0;; ++index) {
      ASSERT_LT(index, 10'000);
      const ProcessUse use = ProcessUse::Now();
      OsFaults::FailAfter(index, error);
      {
        const auto monitor = PressureMonitor::Create(options);
        if (monitor.ok()) {
          (*monitor)->Notify(PressureLevel::kLow);
          const auto sample = (*monitor)->Wait(0);
          EXPECT_TRUE(sample.ok() ||
                      sample.status().code() ==
                          StatusCode::kResourceExhausted ||
                      sample.status().code() == StatusCode::kInternal);
          if (sample.ok()) {
            EXPECT_GE(sample->level, PressureLevel::kLow);
          }
        } else {
          EXPECT_EQ(monitor.status().code(), StatusCode::kResourceExhausted);
        }
      }
      const bool failed = OsFaults::failed() > 0;
      OsFaults::Disarm();
      EXPECT_EQ(ProcessUse::Now().files, use.files) << index;
      if (HasFailure()) return;
      if (!failed) break;
    }
  }
}

// Takes `bytes` and keeps them. A bare system call that populates: a
// sanitizer would see mmap or a store, and touch as much again of its own.
bool TakeMemory(size_t bytes) {
  return syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0) != -1;
}

// Fills its cgroup to within kLeft, while the monitor sleeps on the kernel's
// events alone. kLeft is a quarter less than where kCritical begins, and more
// than a sanitizer takes of its own by then.
constexpr int64_t kFilledLimit = 256 * kMiB;  // its reserve: 32 MiB
constexpr int64_t kLeft = 6 * kMiB;

TEST(ThisMachinePressureTest, DISABLED_FillTheCgroup) {
  if (RealCgroup::Inside() == nullptr) GTEST_SKIP() << "run by the test below";
  PressureOptions options;
  options.psi = false;
  const auto monitor = Open(options);
  ASSERT_TRUE(monitor->has_events());
  std::atomic<bool> begins{false};
  std::atomic<bool> heard{false};
  std::atomic<int64_t> to_take{0};
  // A thread's own memory is there before what is available is measured.
  std::thread eater([&] {
    while (!begins.load()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (; to_take.load() >= kMiB && !heard.load(); to_take -= kMiB) {
      if (!TakeMemory(kMiB)) return;
    }
  });
  const PressureSample calm = Look(monitor.get());
  EXPECT_EQ(calm.level, PressureLevel::kNone) << calm.cause;
  to_take = calm.available_bytes - kLeft;
  const int64_t before = monitor->wakeups();
  begins = true;
  PressureSample sample;
  PressureLevel worst = PressureLevel::kNone;
  // No poll_ns before the first event: the level is none.
  for (int i = 0; i < 50 && worst != PressureLevel::kCritical; ++i) {
    sample = Look(monitor.get(), 10'000);
    worst = std::max(worst, sample.level);
  }
  heard = true;
  eater.join();
  EXPECT_EQ(worst, PressureLevel::kCritical) << sample.available_bytes;
  EXPECT_NE(sample.limit.find("cgroup v"), std::string::npos) << sample.limit;
  EXPECT_GT(monitor->wakeups(), before);
  int64_t events = 0;
  for (const PressureSource& source : monitor->sources()) {
    events += source.events;
  }
  std::printf("%d events, %d MiB left\n", int(events),
              int(sample.available_bytes / kMiB));
}

TEST(ThisMachinePressureTest, AFillingCgroupIsHeardOfBeforeItIsFull) {
  const RealCgroup cgroup(kFilledLimit);
  if (!cgroup.reason().empty()) GTEST_SKIP() << cgroup.reason();
  EXPECT_EQ(cgroup.RunInside("*DISABLED_FillTheCgroup"), 0);
  EXPECT_EQ(cgroup.oom_kills(), 0);
}

}  // namespace
}  // namespace varlane
