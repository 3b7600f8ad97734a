// ServingPressure: a thread that listens, and an engine that acts.
//
// The two take turns: the listener sleeps in the monitor until there is news,
// then until the engine has dealt with it. So one of them at a time is in the
// monitor, and a slow engine is not told twice.
// SPDX-License-Identifier: Apache-2.0

#include "varlane/serving_pressure.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/math.h"
#include "base/strings.h"
#include "memory/proc_file.h"

namespace varlane {

class ServingPressure::Impl {
 public:
  Impl(const ServingPressureOptions& options, KvPool* pool,
       Scheduler* scheduler, std::unique_ptr<PressureMonitor> monitor)
      : options_(options),
        monitor_(std::move(monitor)),
        target_(pool, scheduler,
                static_cast<int64_t>(options.keep_share *
                                     double(pool->capacity_blocks()))),
        controller_(options.controller, &target_) {
    Publish(0);
    listener_ = std::thread([this] { Listen(); });
  }
  ~Impl();

  bool Update();
  bool HasNews() const noexcept {
    return has_news_.load(std::memory_order_acquire);
  }
  PressureMonitor& monitor() { return *monitor_; }
  ServingPressureStats stats() const;
  PressureListenerUse listener_use() const;

 private:
  void Listen();
  bool IsNews(const PressureSample& sample) const;
  int MillisecondsToUpdate() const;
  void Publish(int64_t took_ns);

  const ServingPressureOptions options_;
  const std::unique_ptr<PressureMonitor> monitor_;

  std::mutex mutex_;  // guards all but stats_
  std::condition_variable news_taken_;
  bool stops_ = false;
  std::atomic<bool> has_news_{false};  // written under mutex_
  ServingPressureTarget target_;
  PressureController controller_;
  PressureSample last_;
  int64_t updates_ = 0;

  mutable std::mutex stats_mutex_;  // guards stats_; taken last
  ServingPressureStats stats_;
  std::atomic<pid_t> listener_id_{0};
  std::thread listener_;
};

ServingPressure::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  news_taken_.notify_all();
  monitor_->Wake();
  listener_.join();
  target_.SetGrowth(true);
  target_.SetAdmission(true);
}

// --- the listening thread ----------------------------------------------------

int ServingPressure::Impl::MillisecondsToUpdate() const {
  const int64_t next = controller_.next_update_ns();
  if (next == std::numeric_limits<int64_t>::max()) return -1;
  return static_cast<int>(std::clamp<int64_t>(
      DivCeil(std::max<int64_t>(0, next - NowNs()), int64_t{1'000'000}), 0,
      std::numeric_limits<int>::max()));
}

bool ServingPressure::Impl::IsNews(const PressureSample& sample) const {
  return sample.level != PressureLevel::kNone ||
         NowNs() >= controller_.next_update_ns();
}

void ServingPressure::Impl::Listen() {
  listener_id_.store(gettid(), std::memory_order_release);
  std::unique_lock lock(mutex_);
  while (!stops_) {
    const int timeout_ms = MillisecondsToUpdate();
    lock.unlock();
    const Result<PressureSample> sample = monitor_->Wait(timeout_ms);
    lock.lock();
    if (stops_) break;
    if (!sample
             .ok()) {  // no heap, or the kernel's memory is short: not at once
      news_taken_.wait_for(lock,
                           std::chrono::nanoseconds(options_.monitor.poll_ns),
                           [this] { return stops_; });
      continue;
    }
    if (!IsNews(*sample)) continue;
    has_news_.store(true, std::memory_order_release);
    if (options_.on_news) {
      lock.unlock();
      options_.on_news();
      lock.lock();
    }
    news_taken_.wait(lock, [this] { return stops_ || !HasNews(); });
  }
}

// --- the engine thread -------------------------------------------------------

// The listener is parked meanwhile, so the monitor is ours. Without heap the
// news stays: the next call tries again.
bool ServingPressure::Impl::Update() try {
  if (!HasNews()) return false;
  const int64_t start_ns = NowNs();
  const std::lock_guard lock(mutex_);
  // Anew: the engine may have been in a long step.
  Result<PressureSample> sample = monitor_->Poll();
  if (sample.ok()) {
    last_ = *std::move(sample);
  } else {
    last_.level = PressureLevel::kNone;
    last_.measured = sample.status();
  }
  const bool changed = controller_.Update(last_, start_ns);
  ++updates_;
  Publish(NowNs() - start_ns);
  has_news_.store(false, std::memory_order_release);
  news_taken_.notify_all();
  return changed;
} catch (const std::bad_alloc&) {
  return false;
}

void ServingPressure::Impl::Publish(int64_t took_ns) {
  const std::lock_guard lock(stats_mutex_);
  stats_.ladder = controller_.stats();
  stats_.last = last_;
  stats_.updates = updates_;
  stats_.last_update_ns = took_ns;
  stats_.longest_update_ns = std::max(stats_.longest_update_ns, took_ns);
  stats_.total_update_ns += took_ns;
}

// --- any thread --------------------------------------------------------------

ServingPressureStats ServingPressure::Impl::stats() const {
  ServingPressureStats stats;
  {
    const std::lock_guard lock(stats_mutex_);
    stats = stats_;
  }
  stats.sources = monitor_->sources();
  return stats;
}

PressureListenerUse ServingPressure::Impl::listener_use() const {
  PressureListenerUse use = {
      .wakeups = monitor_->wakeups(), .context_switches = -1, .cpu_ns = -1};
  const pid_t id = listener_id_.load(std::memory_order_acquire);
  if (id == 0) return use;  // not begun yet
  const std::string task = StrCat("/proc/self/task/", id);
  if (const Result<std::string> text = ReadProcFile(task + "/status");
      text.ok()) {
    const auto slept = FindCount(*text, "voluntary_ctxt_switches:");
    const auto displaced = FindCount(*text, "nonvoluntary_ctxt_switches:");
    if (slept && displaced) use.context_switches = *slept + *displaced;
  }
  // Nanoseconds on a CPU come first.
  if (const Result<std::string> text = ReadProcFile(task + "/schedstat");
      text.ok()) {
    use.cpu_ns = ParseCount(*text).value_or(-1);
  }
  return use;
}

// --- the public face ---------------------------------------------------------

ServingPressure::ServingPressure(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
ServingPressure::~ServingPressure() = default;

Result<std::unique_ptr<ServingPressure>> ServingPressure::Create(
    const ServingPressureOptions& options, KvPool* pool,
    Scheduler* scheduler) try {
  VARLANE_REQUIRE_ARG(pool != nullptr, "pool is null");
  VARLANE_REQUIRE_ARG(options.keep_share >= 0 && options.keep_share <= 1,
                      "keep_share = ", options.keep_share,
                      ", but must be in [0, 1]");
  Result<std::unique_ptr<PressureMonitor>> monitor =
      PressureMonitor::Create(options.monitor);
  VARLANE_RETURN_IF_ERROR(monitor.status());
  return std::unique_ptr<ServingPressure>(new ServingPressure(
      std::make_unique<Impl>(options, pool, scheduler, *std::move(monitor))));
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory to listen for memory pressure");
} catch (const std::system_error& error) {
  return Status(StatusCode::kResourceExhausted,
                MessageCat("no thread to listen for memory pressure: ",
                           error.code().message()));
}

bool ServingPressure::Update() { return impl_->Update(); }
bool ServingPressure::HasNews() const noexcept { return impl_->HasNews(); }
void ServingPressure::Notify(PressureLevel level,
                             int64_t wanted_bytes) noexcept {
  impl_->monitor().Notify(level, wanted_bytes);
}
ServingPressureStats ServingPressure::stats() const { return impl_->stats(); }
PressureListenerUse ServingPressure::listener_use() const {
  return impl_->listener_use();
}

}  // namespace varlane
