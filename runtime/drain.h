// The loop that empties a grid: what launches and the nodes of graphs share.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_DRAIN_H_
#define VARLANE_RUNTIME_DRAIN_H_

#include <algorithm>
#include <atomic>
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
  const int* nearest = nullptr;           // [nodes], see Placement
  std::span<double> worker_seconds = {};  // LaunchOptions'
  // A helper's: LaunchBoard::most_urgent. Null for callers, who stay.
  const std::atomic<int>* most_urgent = nullptr;

  // Whether so much is left that a claim ahead takes from nobody.
  bool MayClaimAhead(const SharedRange& range) const noexcept {
    return grid->claims_ahead() && range.left() >= 2 * int64_t{sharers};
  }
  // Whether somebody with a higher priority wants this worker.
  bool IsWantedElsewhere() const noexcept {
    return most_urgent != nullptr &&
           most_urgent->load(std::memory_order_relaxed) > state->priority;
  }
};

// Adds its life's time to the worker's, where somebody asked for it.
class WorkerTimer {
 public:
  WorkerTimer(std::span<double> seconds, int worker) noexcept
      : seconds_(seconds.empty() ? nullptr
                                 : &seconds[static_cast<size_t>(worker)]) {
    if (seconds_ != nullptr) start_ = LaunchState::Clock::now();
  }
  ~WorkerTimer() {
    if (seconds_ == nullptr) return;
    const std::chrono::duration<double> spent =
        LaunchState::Clock::now() - start_;
    *seconds_ += spent.count();
  }
  WorkerTimer(const WorkerTimer&) = delete;
  WorkerTimer& operator=(const WorkerTimer&) = delete;

 private:
  double* seconds_;
  LaunchState::Clock::time_point start_;
};

// "the body of threadgroup 3 threw: ..." becomes the launch's result.
void FailBody(const Drainer& drainer, int64_t index, const char* what) noexcept;

// For Threadgroup::cancelled.
bool IsLaunchCancelled(const void* state) noexcept;

// A body that is recorded.
template <typename Body>
struct TracedBody {
  TraceRecorder* recorder;
  const Body* body;

  void operator()(const Threadgroup& group) const {
    recorder->Begin();
    (*body)(group);
    recorder->End(group.index());
  }
};

// Tells cheap claims, and looks at the deadline between claims.
template <typename Body>
class ClaimTimer {
 public:
  using Clock = LaunchState::Clock;

  explicit ClaimTimer(const Body&) noexcept : before_(Clock::now()) {}

  void CheckDeadline(LaunchState* state) const noexcept {
    state->CheckDeadline(before_);
  }
  // Of what ran since the last call.
  bool WasCheap() noexcept {
    const Clock::time_point after = Clock::now();
    const bool is_cheap = after - before_ < kCheapClaim;
    before_ = after;
    return is_cheap;
  }

 private:
  Clock::time_point before_;
};

// By the times that are recorded anyway.
template <typename Body>
class ClaimTimer<TracedBody<Body>> {
 public:
  explicit ClaimTimer(const TracedBody<Body>& body) noexcept
      : recorder_(body.recorder),
        cheap_ticks_(recorder_->TicksIn(kCheapClaim)),
        before_(recorder_->TimeAfter()) {}

  void CheckDeadline(LaunchState* state) const noexcept {
    if (!state->has_deadline()) return;
    state->CheckDeadline(LaunchState::Clock::now());
  }
  bool WasCheap() noexcept {
    const int64_t after = recorder_->TimeAfter();
    const bool is_cheap = after - before_ < cheap_ticks_;
    before_ = after;
    return is_cheap;
  }

 private:
  TraceRecorder* recorder_;
  int64_t cheap_ticks_;
  int64_t before_;
};

// Runs one claim, after which the worker runs `ahead`; false once the launch is
// cancelled.
template <typename Body>
bool RunClaim(const Drainer& drainer, IndexRange claim, IndexRange ahead,
              const Body& body) noexcept {
  const int64_t after =
      ahead.begin == ahead.end ? Threadgroup::kUnknown : ahead.begin;
  LaunchState* const state = drainer.state;
  int64_t index = claim.begin;
  try {
    for (; index < claim.end; ++index) {
      if (state->IsCancelled()) return false;
      body(Threadgroup(index, drainer.worker, drainer.node, drainer.scratch,
                       &IsLaunchCancelled, state,
                       index + 1 < claim.end ? index + 1 : after));
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
// it; false once the launch is cancelled, or the worker wanted elsewhere.
template <bool kSteals = false, typename Body>
bool DrainRange(const Drainer& drainer, SharedRange* range,
                const Body& body) noexcept {
  int64_t grain = 1;
  ClaimTimer<Body> timer(body);
  IndexRange ahead;
  while (true) {
    if constexpr (kSteals) {
      if (!range->IsWorthStealing()) return true;
    }
    const IndexRange claim =
        ahead.begin != ahead.end ? ahead : range->Claim(grain, drainer.sharers);
    if (claim.begin == claim.end) return true;
    ahead = {};
    if (!kSteals && drainer.MayClaimAhead(*range)) {
      ahead = range->Claim(grain, drainer.sharers);
    }
    timer.CheckDeadline(drainer.state);
    if (!RunClaim(drainer, claim, ahead, body)) return false;
    if (drainer.IsWantedElsewhere()) {
      // What is claimed nobody else can run.
      if (ahead.begin != ahead.end) (void)RunClaim(drainer, ahead, {}, body);
      return false;
    }
    grain = timer.WasCheap() ? std::min(grain * 2, kMaxGrain) : 1;
  }
}

// Empties the grid, the worker's own range first; false as DrainRange's. A
// function of its own, so that what surrounds it cannot change its code
// (tools/check_trace_code.py).
template <typename Body>
[[gnu::noinline]] bool DrainGrid(const Drainer& drainer,
                                 const Body& body) noexcept {
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
  return DrainGrid(drainer, TracedBody<Body>{&recorder, &body});
}

}  // namespace varlane

#endif  // VARLANE_RUNTIME_DRAIN_H_
