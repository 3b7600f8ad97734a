// The clock that the tools time with.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_CLOCK_H_
#define VARLANE_TOOLS_CLOCK_H_

#include <chrono>

namespace varlane::tools {

using Clock = std::chrono::steady_clock;

inline double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_CLOCK_H_
