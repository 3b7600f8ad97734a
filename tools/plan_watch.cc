// SPDX-License-Identifier: Apache-2.0

#include "tools/plan_watch.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "tools/clock.h"
#include "tools/parse.h"
#include "tools/report.h"
#include "tools/status_util.h"
#include "varlane/pressure.h"

namespace varlane::tools {
namespace {

std::atomic<bool> stopped = false;
std::atomic<PressureMonitor*> to_wake = nullptr;

extern "C" void StopWatching(int /*signal*/) {
  stopped = true;
  if (PressureMonitor* const monitor = to_wake) monitor->Wake();
}

// Ends the watch at SIGINT and SIGTERM while it lives.
class ScopedSignals {
 public:
  explicit ScopedSignals(PressureMonitor* monitor) {
    to_wake = monitor;
    before_[0] = std::signal(SIGINT, StopWatching);
    before_[1] = std::signal(SIGTERM, StopWatching);
  }
  ~ScopedSignals() {
    std::signal(SIGINT, before_[0]);
    std::signal(SIGTERM, before_[1]);
    to_wake = nullptr;
  }
  ScopedSignals(const ScopedSignals&) = delete;
  ScopedSignals& operator=(const ScopedSignals&) = delete;

 private:
  void (*before_[2])(int);
};

// What was printed last, to tell what has changed.
class Watch {
 public:
  Watch(const PlanWatchOptions& options, const BudgetRequest& request,
        const KvLayout& layout)
      : options_(options),
        request_(request),
        layout_(layout),
        begin_(Clock::now()) {}

  double elapsed_s() const {
    return std::chrono::duration<double>(Clock::now() - begin_).count();
  }

  void PrintSources(const std::vector<PressureSource>& sources) {
    for (const PressureSource& source : sources) {
      Line(source.active ? fmt::format("listening to {}", source.name)
                         : fmt::format("not listening to {}: {}", source.name,
                                       source.problem));
    }
  }

  void Look(const PressureSample& sample) {
    LookAtPressure(sample);
    const Result<MemoryLimits> limits =
        MemoryLimits::Detect(options_.memory_root);
    if (!limits.ok()) {
      Once("limits", std::string(limits.status().message()));
      return;
    }
    texts_.erase("limits");
    LookAtLimits(*limits);
    LookAtPlan(*limits);
  }

 private:
  void Line(const std::string& text) {
    std::printf("%9.3f  %s\n", elapsed_s(), text.c_str());
    std::fflush(stdout);
  }

  // Prints `text` where it differs from the last one of this key.
  void Once(const std::string& key, const std::string& text) {
    std::string& last = texts_[key];
    if (last == text) return;
    last = text;
    Line(text);
  }

  void LookAtPressure(const PressureSample& sample) {
    std::string text =
        fmt::format("pressure {}", PressureLevelName(sample.level));
    if (!sample.cause.empty()) text += fmt::format(" ({})", sample.cause);
    // The bytes in the cause move all the time; the level is the change.
    std::string& last = texts_["pressure"];
    const std::string level = PressureLevelName(sample.level);
    if (last == level) return;
    last = level;
    Line(text);
  }

  void LookAtLimits(const MemoryLimits& limits) {
    std::map<std::string, MemoryLimit> now;
    for (const MemoryLimit& limit : limits.limits) now[limit.name] = limit;
    for (const auto& [name, limit] : limits_) {
      if (now.contains(name)) continue;
      Line(fmt::format("{}: gone", name));
    }
    for (const MemoryLimit& limit : limits.limits) {
      const auto before = limits_.find(limit.name);
      if (before != limits_.end() && !Changed(before->second, limit)) {
        now[limit.name] = before->second;  // compare with what was printed
        continue;
      }
      Line(fmt::format("{}: limit {}, {} in use, {} available", limit.name,
                       FormatBytes(limit.limit_bytes),
                       FormatBytes(limit.used_bytes),
                       FormatBytes(limit.available_bytes)));
    }
    limits_ = std::move(now);
  }

  bool Changed(const MemoryLimit& before, const MemoryLimit& now) const {
    const double step =
        options_.change_share * static_cast<double>(before.limit_bytes);
    return before.limit_bytes != now.limit_bytes ||
           std::abs(static_cast<double>(now.available_bytes -
                                        before.available_bytes)) > step;
  }

  void LookAtPlan(const MemoryLimits& limits) {
    const Result<MemoryBudget> budget =
        PlanMemoryBudget(request_, layout_, limits);
    if (!budget.ok()) {
      Once("plan", std::string(budget.status().message()));
      return;
    }
    // A refusal's bytes move with every look: which limit binds is the change.
    if (!budget->granted) {
      std::string& last = texts_["plan"];
      const std::string key = "refused under " + budget->binding_limit;
      if (last == key) return;
      last = key;
      Line(fmt::format("plan refused: {}", budget->refusal));
      return;
    }
    Once("plan",
         fmt::format("plan granted: {} for KV, {} tokens; {} binds",
                     FormatBytes(budget->bytes), FormatCount(budget->tokens),
                     budget->binding_limit.empty() ? "nothing"
                                                   : budget->binding_limit));
  }

  const PlanWatchOptions& options_;
  const BudgetRequest& request_;
  const KvLayout& layout_;
  const Clock::time_point begin_;
  std::map<std::string, std::string> texts_;
  std::map<std::string, MemoryLimit> limits_;
};

}  // namespace

Status WatchPlan(const PlanWatchOptions& options, const BudgetRequest& request,
                 const KvLayout& layout) {
  VARLANE_TOOLS_ASSIGN(PressureOptions pressure,
                       PressureOptions::FromEnvironment());
  pressure.root = options.memory_root;
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<PressureMonitor> monitor,
                       PressureMonitor::Create(pressure));
  stopped = false;
  const ScopedSignals signals(monitor.get());
  Watch watch(options, request, layout);
  watch.PrintSources(monitor->sources());
  for (int timeout_ms = 0; !stopped;) {
    VARLANE_TOOLS_ASSIGN(const PressureSample sample,
                         monitor->Wait(timeout_ms));
    watch.Look(sample);
    double left_s = options.interval_s;
    if (options.for_s > 0) {
      left_s = std::min(left_s, options.for_s - watch.elapsed_s());
      if (left_s <= 0) break;
    }
    timeout_ms = std::max(1, static_cast<int>(left_s * 1000));
  }
  return {};
}

}  // namespace varlane::tools
