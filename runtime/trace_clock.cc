// SPDX-License-Identifier: Apache-2.0

#include "runtime/trace_clock.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

namespace varlane {
namespace {

int64_t ReadCounter() noexcept {
#if defined(__x86_64__)
  return static_cast<int64_t>(__builtin_ia32_rdtsc());
#else
  return 0;
#endif
}

bool HasInvariantCounter() noexcept {
#if defined(__x86_64__)
  constexpr unsigned kPowerManagement = 0x80000007;
  constexpr unsigned kInvariantTsc = 1U << 8;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(kPowerManagement, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & kInvariantTsc) != 0;
#else
  return false;
#endif
}

}  // namespace

bool HasSteadyCounter(const std::string& file) {
  std::string clock;
  return HasInvariantCounter() && std::getline(std::ifstream(file), clock) &&
         clock == "tsc";
}

TraceClock::TraceClock(bool uses_counter) : uses_counter_(uses_counter) {
  if (uses_counter_) {
    static const double rough = CompareBriefly();
    rough_ns_per_tick_ = rough;
  }
  start_ = ReadMoment();
}

// The closest of some pairs: an interrupt may fall between.
TraceClock::Moment TraceClock::ReadMoment() noexcept {
  Moment best;
  int64_t closest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < 8; ++i) {
    const int64_t before = ReadCounter();
    const int64_t ns = SteadyNs();
    const int64_t apart = ReadCounter() - before;
    if (apart >= closest) continue;
    closest = apart;
    best = {before + apart / 2, ns};
  }
  return best;
}

double TraceClock::Compare(const Moment& from, const Moment& to) noexcept {
  return static_cast<double>(to.ns - from.ns) /
         static_cast<double>(to.ticks - from.ticks);
}

double TraceClock::CompareBriefly() noexcept {
  constexpr int64_t kBriefNs = 2'000'000;
  const Moment from = ReadMoment();
  Moment to = ReadMoment();
  while (to.ns - from.ns < kBriefNs) to = ReadMoment();
  return Compare(from, to);
}

double TraceClock::NsPerTick() const noexcept {
  constexpr int64_t kLongNs = 100'000'000;
  constexpr double kPlausible = 1e-2;
  if (!uses_counter_) return 1;
  const Moment now = ReadMoment();
  if (now.ns - start_.ns < kLongNs) return rough_ns_per_tick_;
  // One of them may have stood still while the machine was suspended.
  const double ns_per_tick = Compare(start_, now);
  const bool is_plausible = std::abs(ns_per_tick - rough_ns_per_tick_) <=
                            kPlausible * rough_ns_per_tick_;
  return is_plausible ? ns_per_tick : rough_ns_per_tick_;
}

}  // namespace varlane
