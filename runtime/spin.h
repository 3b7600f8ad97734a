// Waiting awake for another thread.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_SPIN_H_
#define VARLANE_RUNTIME_SPIN_H_

#include <chrono>

namespace varlane {

// How long who finds nothing to do stays awake. A helper then leaves for
// another's work. A caller can only sleep, and is woken much later than it is
// asked to be: on a virtual machine 25 us where the core sleeps too, 55 us
// after a few ms of it. Threadgroups that end a launch take up to 200 us, and
// TBB keeps its own threads awake for more than 100.
inline constexpr std::chrono::microseconds kHelperPatience(20);
inline constexpr std::chrono::microseconds kCallerPatience(200);

inline void RelaxCpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `is_done` or for as long as `patience`; whether it is done.
template <typename Predicate>
bool SpinUntil(std::chrono::nanoseconds patience,
               const Predicate& is_done) noexcept {
  using Clock = std::chrono::steady_clock;
  constexpr int kPolls = 16;  // between looks at the clock
  if (is_done()) return true;
  if (patience.count() == 0) return false;
  const Clock::time_point give_up = Clock::now() + patience;
  do {
    for (int i = 0; i < kPolls; ++i) {
      RelaxCpu();
      if (is_done()) return true;
    }
  } while (Clock::now() < give_up);
  return false;
}

}  // namespace varlane

#endif  // VARLANE_RUNTIME_SPIN_H_
