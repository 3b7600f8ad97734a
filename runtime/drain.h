// The loop that empties a grid: what launches and the nodes of graphs share.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_DRAIN_H_
#define VARLANE_RUNTIME_DRAIN_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

#include "runtime/launch_state.h"
#include "varlane/runtime.h"

namespace varlane {

// Claims grow while their bodies are this cheap, so that surplus threadgroups
// share one atomic, and fall back to one index as soon as bodies do real work,
// so that the last of them starts no later than it must. The limit bounds what
// a large claim can take of a stretch of real work that follows a surplus one.
inline constexpr auto kCheapClaim = std::chrono::nanoseconds(2000);
inline constexpr int64_t kMaxGrain = 32;

// One participant in one grid.
struct Drainer {
  LaunchState* state;  // of the launch or of the graph's run
  SharedGrid* grid;
  int worker;
  int node;                    // the worker's
  int sharers;                 // workers that may take part
  const char* name = nullptr;  // of the graph's node, for messages
  std::span<std::byte> scratch = {};
  const int* nearest = nullptr;  // [nodes], see Placement
};

// "the body of threadgroup 3 threw: ..." becomes the launch's result.
void FailBody(const Drainer& drainer, int64_t index, const char* what) noexcept;

// For Threadgroup::cancelled.
bool IsLaunchCancelled(const void* state) noexcept;

// Runs one claim; false once the launch is cancelled.
template <typename Body>
bool RunClaim(const Drainer& drainer, IndexRange claim,
              const Body& body) noexcept {
  LaunchState* const state = drainer.state;
  int64_t index = claim.begin;
  try {
    for (; index < claim.end; ++index) {
      if (state->IsCancelled()) return false;
      body(Threadgroup(index, drainer.worker, drainer.node, drainer.scratch,
                       &IsLaunchCancelled, state));
    }
    return true;
  } catch (const std::exception& error) {
    FailBody(drainer, index, error.what());
  } catch (...) {
    FailBody(drainer, index, "something that is not a std::exception");
  }
  return false;
}

// Empties one range, or with `kSteals` takes of another node's what is worth
// it; false once the launch is cancelled.
template <bool kSteals = false, typename Body>
bool DrainRange(const Drainer& drainer, SharedRange* range,
                const Body& body) noexcept {
  using Clock = LaunchState::Clock;
  int64_t grain = 1;
  Clock::time_point before = Clock::now();
  while (true) {
    if constexpr (kSteals) {
      if (!range->IsWorthStealing()) return true;
    }
    const IndexRange claim = range->Claim(grain, drainer.sharers);
    if (claim.begin == claim.end) return true;
    drainer.state->CheckDeadline(before);
    if (!RunClaim(drainer, claim, body)) return false;
    const Clock::time_point after = Clock::now();
    grain = after - before < kCheapClaim ? std::min(grain * 2, kMaxGrain) : 1;
    before = after;
  }
}

// Empties the grid, the worker's own range first; false once cancelled.
template <typename Body>
bool DrainGrid(const Drainer& drainer, const Body& body) noexcept {
  const int num_ranges = drainer.grid->num_ranges();
  if (num_ranges == 1) return DrainRange(drainer, drainer.grid->range(0), body);
  SharedRange* const own = drainer.grid->range(drainer.node);
  own->EnterHome();
  const bool is_drained = DrainRange(drainer, own, body);
  own->LeaveHome();
  if (!is_drained) return false;
  for (int i = 1; i < num_ranges; ++i) {
    SharedRange* const other = drainer.grid->range(drainer.nearest[i]);
    if (!DrainRange<true>(drainer, other, body)) return false;
  }
  return true;
}

// The same, recording each threadgroup. An instantiation of its own, chosen
// once a drain: loops that are not traced are the same code with and without
// it.
template <typename Body>
bool DrainGridTraced(const Drainer& drainer, LaunchTrace* trace,
                     const Body& body) noexcept {
  TraceRecorder recorder(trace, drainer.worker);
  return DrainGrid(drainer, [&](const Threadgroup& group) {
    recorder.Begin();
    body(group);
    recorder.End(group.index());
  });
}

}  // namespace varlane

#endif  // VARLANE_RUNTIME_DRAIN_H_
