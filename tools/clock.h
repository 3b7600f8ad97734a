// The clock that the tools time with.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_CLOCK_H_
#define VARLANE_TOOLS_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace varlane::tools {

using Clock = std::chrono::steady_clock;

inline double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             Clock::now().time_since_epoch())
      .count();
}

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_CLOCK_H_
