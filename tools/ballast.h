// Ballast: a neighbour that takes memory in waves and gives it back.
//
// It is no bully: it never takes the last bytes of a limit, where the kernel
// would have to kill somebody, but waits for others to give way.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_BALLAST_H_
#define VARLANE_TOOLS_BALLAST_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "tools/random.h"

namespace varlane::tools {

// May stand in memory that processes share. The taker writes the first two and
// `presses`, everybody reads all.
struct BallastState {
  // A wave's height is drawn from [least_bytes, most_bytes].
  std::atomic<int64_t> least_bytes{0};
  std::atomic<int64_t> most_bytes{0};
  std::atomic<bool> presses{false};  // else it gives everything back

  std::atomic<int64_t> held_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
  std::atomic<int64_t> waves{0};    // that reached their height
  std::atomic<int64_t> starved{0};  // that gave up waiting
  std::atomic<int64_t> waits{0};    // for others to give way
  std::atomic<int64_t> wait_ns{0};  // in all
  std::atomic<int64_t> longest_wait_ns{0};
};

struct BallastTimes {
  double grow_s = 1;       // to the greatest height, if nobody is in the way
  double hold_s = 1;       // at the height
  double rest_s = 3;       // half to one and a half of it, holding nothing
  double patience_s = 20;  // of one wait
};

// Threads: one.
class Ballast {
 public:
  // Lifetime: `state` must outlive it.
  Ballast(const BallastTimes& times, uint64_t seed, BallastState* state)
      : times_(times), random_(seed), state_(state) {}
  ~Ballast() { ReleaseTo(0); }
  Ballast(const Ballast&) = delete;
  Ballast& operator=(const Ballast&) = delete;

  // Does what is due; call it every few milliseconds. `now_ns` of a clock that
  // does not go back.
  void Tick(int64_t now_ns);

 private:
  enum class Phase : uint8_t { kIdle, kRest, kGrow, kHold };

  void Begin(Phase phase, int64_t now_ns);
  void Grow(int64_t now_ns, int64_t elapsed_ns);
  // At most `bytes`; returns whether it got as much as it wanted.
  bool Take(int64_t bytes);
  void ReleaseTo(int64_t bytes);
  void EndWait(int64_t now_ns);

  const BallastTimes times_;
  SplitMix64 random_;
  BallastState* const state_;
  std::vector<void*> chunks_;
  Phase phase_ = Phase::kIdle;
  int64_t phase_ns_ = 0;  // when it began
  int64_t last_ns_ = 0;   // of the last Tick
  int64_t rest_ns_ = 0;
  int64_t height_bytes_ = 0;
  int64_t wait_begin_ns_ = -1;  // -1 = does not wait
};

// What can be taken with the last bytes of every limit left alone.
int64_t BallastRoomBytes();

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_BALLAST_H_
