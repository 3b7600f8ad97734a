// Rows on the pressure monitor: what it costs while nothing happens, and what
// one measurement of the limits costs.
//
// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/status_util.h"
#include "varlane/pressure.h"

namespace varlane::tools {
namespace {

constexpr std::chrono::milliseconds kIdle{1500};

double ThreadCpuSeconds() {
  timespec now = {};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

std::string SourcesText(const PressureMonitor& monitor) {
  std::string text;
  for (const PressureSource& source : monitor.sources()) {
    if (!source.active) continue;
    text += (text.empty() ? "" : ", ") + source.name;
  }
  return text.empty() ? "no events: polls" : text;
}

// A thread sleeps in Wait for some time; how often it woke, and for how long.
Status MeasureIdle(BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const PressureOptions options,
                       PressureOptions::FromEnvironment());
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<PressureMonitor> monitor,
                       PressureMonitor::Create(options));
  std::atomic<bool> is_over{false};
  double cpu_seconds = 0;
  Status status;
  std::thread sleeper([&] {
    const double start = ThreadCpuSeconds();
    while (!is_over.load() && status.ok()) {
      status = monitor->Wait(-1).status();
    }
    cpu_seconds = ThreadCpuSeconds() - start;
  });
  std::this_thread::sleep_for(kIdle / 10);  // begins to sleep
  const int64_t before = monitor->wakeups();
  std::this_thread::sleep_for(kIdle);
  const int64_t wakeups = monitor->wakeups() - before;
  is_over.store(true);
  monitor->Wake();
  sleeper.join();
  VARLANE_TOOLS_TRY(status);
  const double seconds = std::chrono::duration<double>(kIdle).count();
  row->detail = fmt::format("{:.0f} us of CPU a second; {}",
                            cpu_seconds / seconds * 1e6, SourcesText(*monitor));
  if (!monitor->has_events()) row->must.reset();
  SetValues({static_cast<double>(wakeups) / seconds}, 0, row);
  return {};
}

Status MeasurePoll(BenchSession* session, BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<PressureMonitor> monitor,
                       PressureMonitor::Create({}));
  const std::vector<Sampler> samplers = {{[&]() -> Result<double> {
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(monitor->Poll().status());
    return std::chrono::duration<double>(Clock::now() - start).count();
  }}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> micros;
  for (const double seconds : samples.of[0]) micros.push_back(seconds * 1e6);
  SetValues(micros, samples.disturbed, row);
  return {};
}

}  // namespace

void AddMonitorRows(BenchSession* session) {
  BenchRow idle;
  idle.name = "wakeups of the idle monitor";
  idle.unit = "1/s";
  idle.sense = Sense::kValueAtMost;
  idle.must = 0;
  session->Add(idle, [](BenchRow* out) { return MeasureIdle(out); });
  BenchRow poll;
  poll.name = "one measurement of all limits";
  poll.unit = "us";
  session->Add(poll, [=](BenchRow* out) { return MeasurePoll(session, out); });
}

}  // namespace varlane::tools
