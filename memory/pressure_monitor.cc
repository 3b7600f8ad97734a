// PressureMonitor: sleeps on the sources, measures the limits, tells the level.
//
// SPDX-License-Identifier: Apache-2.0

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <limits>
#include <mutex>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/os_calls.h"
#include "base/strings.h"
#include "memory/pressure_sources.h"
#include "varlane/memory_budget.h"
#include "varlane/pressure.h"

namespace varlane {
namespace {

// A level begins where less than so many eighths of the reserve are left; a
// plan leaves all of them, so a pool that was planned to the edge is at rest.
// It ends an eighth later: the hysteresis.
constexpr int64_t kLowEighths = 6;
constexpr int64_t kMediumEighths = 4;
constexpr int64_t kCriticalEighths = 2;

PressureLevel LevelOf(const MemoryLimit& limit, PressureLevel before) {
  const auto below = [&](int64_t eighths, PressureLevel level) {
    const int64_t bonus = before >= level ? 1 : 0;
    return limit.available_bytes < limit.reserve_bytes / 8 * (eighths + bonus);
  };
  if (below(kCriticalEighths, PressureLevel::kCritical)) {
    return PressureLevel::kCritical;
  }
  if (below(kMediumEighths, PressureLevel::kMedium)) {
    return PressureLevel::kMedium;
  }
  return below(kLowEighths, PressureLevel::kLow) ? PressureLevel::kLow
                                                 : PressureLevel::kNone;
}

// Address space that is given back stays reserved: nothing to be gained there.
bool Counts(const MemoryLimit& limit) { return limit.name != "RLIMIT_AS"; }

// Limits that no event of the kernel tells of: beside them the monitor polls,
// whatever else it listens to.
bool HasSilentLimit(const MemoryLimits& limits) {
  return std::any_of(
      limits.limits.begin(), limits.limits.end(),
      [](const MemoryLimit& limit) { return limit.name == "RLIMIT_DATA"; });
}

}  // namespace

Result<PressureOptions> PressureOptions::FromEnvironment() {
  PressureOptions options;
  options.systemd_watch = EnvString("MEMORY_PRESSURE_WATCH").value_or("");
  options.systemd_write = EnvString("MEMORY_PRESSURE_WRITE").value_or("");
  return options;
}

class PressureMonitor::Impl {
 public:
  Impl(const PressureOptions& options, OwnedFd wake)
      : options_(options),
        disabled_(options.systemd_watch == "/dev/null"),
        wake_(std::move(wake)),
        watches_(OpenPressureSources(options)) {
    polled_.resize(watches_.size() + 1);
    if (!disabled_) {
      const Result<MemoryLimits> limits = MemoryLimits::Detect(options.root);
      has_silent_limit_ = limits.ok() && HasSilentLimit(*limits);
    }
    PublishSources();
  }

  Result<PressureSample> Wait(int timeout_ms);
  void Notify(PressureLevel level, int64_t wanted_bytes) noexcept {
    wanted_.store(wanted_bytes, std::memory_order_relaxed);
    notices_.fetch_add(1, std::memory_order_relaxed);
    notified_.store(level, std::memory_order_release);
    Wake();
  }
  void Wake() noexcept {
    const uint64_t one = 1;
    (void)os::Write(wake_.get(), &one, sizeof(one));
  }
  std::vector<PressureSource> sources() const {
    const std::lock_guard lock(mutex_);
    return sources_;
  }
  bool has_events() const {
    return has_events_.load(std::memory_order_relaxed);
  }
  int64_t wakeups() const { return wakeups_.load(std::memory_order_relaxed); }

 private:
  // Whether something must be measured that no event tells of.
  bool polls() const {
    return !disabled_ && (!has_events() || has_silent_limit_);
  }
  // The time until a measurement is due though nobody calls; -1 = never.
  int MillisecondsToMeasure() const;
  Status Sleep(int timeout_ms);
  void TakeEvents(int64_t now);
  PressureSample Measure(int64_t now);
  void PublishSources();

  const PressureOptions options_;
  const bool disabled_;  // by the service manager: only Notify counts
  OwnedFd wake_;
  std::vector<PressureWatch> watches_;
  std::vector<pollfd> polled_;                     // [wake, watches]
  PressureLevel level_ = PressureLevel::kNone;     // of the last sample
  PressureLevel measured_ = PressureLevel::kNone;  // without events
  bool has_silent_limit_ = false;                  // when last measured
  // Per level until when an event holds it, and which event that was.
  std::array<int64_t, 4> held_until_ns_{};
  std::array<size_t, 4> held_by_{};

  std::atomic<PressureLevel> notified_{PressureLevel::kNone};
  std::atomic<int64_t> wanted_{0};
  std::atomic<int64_t> notices_{0};
  std::atomic<int64_t> wakeups_{0};
  std::atomic<bool> has_events_{false};

  mutable std::mutex mutex_;  // guards sources_
  std::vector<PressureSource> sources_;
};

int PressureMonitor::Impl::MillisecondsToMeasure() const {
  const bool watch = level_ != PressureLevel::kNone || polls();
  if (!watch) return -1;
  return static_cast<int>(std::clamp<int64_t>(options_.poll_ns / 1'000'000, 1,
                                              std::numeric_limits<int>::max()));
}

Status PressureMonitor::Impl::Sleep(int timeout_ms) {
  polled_[0] = {wake_.get(), POLLIN, 0};
  for (size_t i = 0; i < watches_.size(); ++i) {
    polled_[i + 1] = {watches_[i].fd(), watches_[i].poll_events(), 0};
  }
  const int ready =
      os::Poll(polled_.data(), static_cast<nfds_t>(polled_.size()), timeout_ms);
  if (ready >= 0 || errno == EINTR) return {};
  for (pollfd& entry : polled_) entry.revents = 0;
  const int error = errno;
  return {
      error == ENOMEM ? StatusCode::kResourceExhausted : StatusCode::kInternal,
      MessageCat("waiting for memory pressure: ", ErrnoText(error))};
}

void PressureMonitor::Impl::TakeEvents(int64_t now) {
  if ((polled_[0].revents & POLLIN) != 0) {
    uint64_t count = 0;
    (void)os::Read(wake_.get(), &count, sizeof(count));
  }
  for (size_t i = 0; i < watches_.size(); ++i) {
    const auto level = watches_[i].Take(polled_[i + 1].revents);
    if (!level || *level == PressureLevel::kNone) continue;
    const auto at = static_cast<size_t>(*level);
    held_until_ns_[at] = now + options_.hold_ns;
    held_by_[at] = i;
  }
}

void PressureMonitor::Impl::PublishSources() {
  std::vector<PressureSource> sources;
  bool events = false;
  for (const PressureWatch& watch : watches_) {
    sources.push_back(watch.info());
    events = events || watch.info().active;
  }
  has_events_.store(events, std::memory_order_relaxed);
  if (disabled_) {
    sources.push_back({.name = "systemd",
                       .active = false,
                       .problem = "MEMORY_PRESSURE_WATCH=/dev/null"});
  } else {
    const char* const what =
        events && has_silent_limit_ ? "RLIMIT_DATA" : "MemAvailable";
    sources.push_back(
        {.name = StrCat(what, " every ", options_.poll_ns / 1'000'000, " ms"),
         .active = polls(),
         .problem = polls() ? "" : "not needed: there are events"});
  }
  const std::lock_guard lock(mutex_);
  sources_ = std::move(sources);
}

PressureSample PressureMonitor::Impl::Measure(int64_t now) {
  PressureSample sample;
  PressureLevel measured = PressureLevel::kNone;
  const Result<MemoryLimits> limits = disabled_
                                          ? Result<MemoryLimits>(MemoryLimits())
                                          : MemoryLimits::Detect(options_.root);
  sample.measured = limits.status();
  if (limits.ok()) {
    const MemoryLimit* worst = nullptr;
    const auto slack = [](const MemoryLimit& limit) {
      return limit.available_bytes - limit.reserve_bytes;
    };
    for (const MemoryLimit& limit : limits->limits) {
      if (!Counts(limit)) continue;
      const PressureLevel level = LevelOf(limit, measured_);
      if (worst == nullptr || level > measured ||
          (level == measured && slack(limit) < slack(*worst))) {
        worst = &limit;
      }
      measured = std::max(measured, level);
    }
    if (worst != nullptr) {
      sample.limit = worst->name;
      sample.available_bytes = worst->available_bytes;
      sample.reserve_bytes = worst->reserve_bytes;
    }
    measured_ = measured;
    has_silent_limit_ = HasSilentLimit(*limits);
  } else {
    measured = measured_;  // the last one that is known
  }
  sample.level = measured;
  if (measured != PressureLevel::kNone) {
    sample.cause = StrCat(sample.limit, ": ",
                          FormatBytes(sample.available_bytes), " available");
  }
  for (size_t i = held_until_ns_.size(); i-- > 0;) {
    const auto level = static_cast<PressureLevel>(i);
    if (held_until_ns_[i] <= now || level <= sample.level) continue;
    sample.level = level;
    sample.cause = watches_[held_by_[i]].info().name;
  }
  const PressureLevel notified = notified_.load(std::memory_order_acquire);
  if (notified > sample.level) {
    sample.level = notified;
    sample.cause = "the embedder";
  }
  sample.notices = notices_.load(std::memory_order_relaxed);
  if (notified != PressureLevel::kNone) {
    sample.wanted_bytes = wanted_.load(std::memory_order_relaxed);
  }
  level_ = sample.level;
  return sample;
}

Result<PressureSample> PressureMonitor::Impl::Wait(int timeout_ms) {
  const int due = MillisecondsToMeasure();
  if (due >= 0 && (timeout_ms < 0 || due < timeout_ms)) timeout_ms = due;
  VARLANE_RETURN_IF_ERROR(Sleep(timeout_ms));
  wakeups_.fetch_add(1, std::memory_order_relaxed);
  const int64_t now = NowNs();
  TakeEvents(now);
  PublishSources();
  return Measure(now);
}

// --- the public face -------------------------------------------------------

PressureMonitor::PressureMonitor(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
PressureMonitor::~PressureMonitor() = default;

Result<std::unique_ptr<PressureMonitor>> PressureMonitor::Create(
    const PressureOptions& options) try {
  VARLANE_REQUIRE_ARG(options.poll_ns > 0 && options.hold_ns >= 0,
                      "poll_ns = ", options.poll_ns,
                      " and hold_ns = ", options.hold_ns,
                      ", must be positive and not negative");
  OwnedFd wake(os::Eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  VARLANE_REQUIRE(wake.valid(), StatusCode::kResourceExhausted,
                  "no eventfd for the pressure monitor: ", ErrnoText(errno));
  return std::unique_ptr<PressureMonitor>(
      new PressureMonitor(std::make_unique<Impl>(options, std::move(wake))));
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory for the pressure monitor");
}

Result<PressureSample> PressureMonitor::Wait(int timeout_ms) try {
  return impl_->Wait(timeout_ms);
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory to measure the memory pressure");
}
void PressureMonitor::Notify(PressureLevel level,
                             int64_t wanted_bytes) noexcept {
  impl_->Notify(level, wanted_bytes);
}
void PressureMonitor::Wake() noexcept { impl_->Wake(); }
std::vector<PressureSource> PressureMonitor::sources() const {
  return impl_->sources();
}
bool PressureMonitor::has_events() const noexcept {
  return impl_->has_events();
}
int64_t PressureMonitor::wakeups() const noexcept { return impl_->wakeups(); }

}  // namespace varlane
