// TraceClock: time stamps that cost less than what they time.
//
// Where the system itself keeps time by the CPU's time stamp counter, that is
// read: some nanoseconds, against 20 to 40 of steady_clock, which also waits
// for all instructions before it. Ticks become nanoseconds when a trace is
// written, by as long a comparison of the two as there is by then.
//
// Linux takes the counter for its clock only where it is invariant (the same
// rate at any frequency and in sleep states) and the same on all CPUs, and
// gives it up when a watchdog finds otherwise: so stamps of several workers can
// be compared. Elsewhere - no such counter, a hypervisor's clock, another
// processor - a tick is a nanosecond of steady_clock.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_TRACE_CLOCK_H_
#define VARLANE_RUNTIME_TRACE_CLOCK_H_

#include <chrono>
#include <cstdint>
#include <string>

namespace varlane {

inline constexpr const char* kKernelsClock =
    "/sys/devices/system/clocksource/clocksource0/current_clocksource";

// Whether the kernel keeps time by an invariant time stamp counter: the CPU
// says so, and `file` that it is the one in use.
bool HasSteadyCounter(const std::string& file = kKernelsClock);

// Immutable once made; any thread.
class TraceClock {
 public:
  // Without `uses_counter`: of steady_clock. With it the first one of a process
  // takes some milliseconds, to compare the two.
  explicit TraceClock(bool uses_counter = HasSteadyCounter());

  // Ticks since the clock was made. Two reads of one thread may be in either
  // order where nothing lies between them.
  int64_t Now() const noexcept {
#if defined(__x86_64__)
    if (uses_counter_) {
      return static_cast<int64_t>(__builtin_ia32_rdtsc()) - start_.ticks;
    }
#endif
    return SteadyNs() - start_.ns;
  }
  // To some parts in 10^4, for thresholds.
  int64_t TicksIn(std::chrono::nanoseconds time) const noexcept {
    return static_cast<int64_t>(static_cast<double>(time.count()) /
                                rough_ns_per_tick_);
  }
  // The best that is known by now: to a part in 10^6 after a tenth of a second.
  double NsPerTick() const noexcept;
  bool uses_counter() const noexcept { return uses_counter_; }

 private:
  // What both showed at one time.
  struct Moment {
    int64_t ticks = 0;
    int64_t ns = 0;
  };
  static int64_t SteadyNs() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static Moment ReadMoment() noexcept;
  static double Compare(const Moment& from, const Moment& to) noexcept;
  static double CompareBriefly() noexcept;

  bool uses_counter_;
  double rough_ns_per_tick_ = 1;
  Moment start_;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_TRACE_CLOCK_H_
