// What the participants of one launch share.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_LAUNCH_STATE_H_
#define VARLANE_RUNTIME_LAUNCH_STATE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "runtime/tracing.h"
#include "varlane/runtime.h"

namespace varlane {

class GraphRun;
class LaunchEngine;

// Half-open; empty when begin == end.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// A range of the grid that participants claim chunks of.
class alignas(64) SharedRange {
 public:
  void Reset(int64_t begin, int64_t end) noexcept {
    next_.store(begin, std::memory_order_relaxed);
    end_ = end;
  }
  // At most `grain` indices, fewer towards the end: never more than an eighth
  // of an even share of what is left. The counter may overshoot the end, by
  // less than the range's length in all.
  IndexRange Claim(int64_t grain, int participants) noexcept;

  // Around the drain of a worker whose node's range this is. It then runs what
  // is left when thieves keep away.
  void EnterHome() noexcept {
    num_home_.fetch_add(1, std::memory_order_relaxed);
  }
  void LeaveHome() noexcept {
    num_home_.fetch_sub(1, std::memory_order_relaxed);
  }
  int64_t left() const noexcept {
    return end_ - next_.load(std::memory_order_relaxed);
  }
  // Whether a worker of another node should claim here: Grid says when. A
  // counter read too late costs time at most: whoever is at home leaves only
  // once everything is claimed, the launch is cancelled, or for something more
  // urgent; then the launch's caller takes what is left in the end.
  bool IsWorthStealing() const noexcept {
    const int64_t home = num_home_.load(std::memory_order_relaxed);
    const int64_t unclaimed = left();
    return unclaimed > 0 && unclaimed >= home;
  }

 private:
  std::atomic<int64_t> next_ = 0;
  int64_t end_ = 0;
  std::atomic<int> num_home_ = 0;
};

// A grid's ranges, one a NUMA node or one for all.
class SharedGrid {
 public:
  // Throws std::bad_alloc.
  explicit SharedGrid(int num_nodes)
      : ranges_(
            std::make_unique<SharedRange[]>(static_cast<size_t>(num_nodes))) {}

  // Requires: `grid` is valid for a runtime of as many nodes.
  void Reset(const Grid& grid) noexcept;
  int num_ranges() const noexcept { return num_ranges_; }
  bool claims_ahead() const noexcept { return claims_ahead_; }
  bool HasUnclaimed() const noexcept {
    for (int i = 0; i < num_ranges_; ++i) {
      if (ranges_[static_cast<size_t>(i)].left() > 0) return true;
    }
    return false;
  }
  SharedRange* range(int i) noexcept {
    return &ranges_[static_cast<size_t>(i)];
  }

 private:
  int num_ranges_ = 0;
  bool claims_ahead_ = false;
  std::unique_ptr<SharedRange[]> ranges_;  // [nodes]
};

// One launch, or one run of a graph.
class LaunchState {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws std::bad_alloc.
  explicit LaunchState(int num_nodes)
      : grid(num_nodes), num_tasks(static_cast<size_t>(num_nodes)) {}

  // Forgets the launch before; `grid` and `body` are the caller's to set.
  void Reset(const LaunchOptions& options, int num_participants) noexcept;

  // A helper's exit; its entry is LaunchBoard::Join.
  void Leave() noexcept;
  // Requires: no helper can enter any more. Returns when all have left.
  void WaitForHelpers(std::chrono::nanoseconds patience) noexcept;

  // True once a body threw, scratch failed, a stop was asked for or somebody
  // saw the deadline pass.
  bool IsCancelled() noexcept {
    return stopped_.load(std::memory_order_relaxed) || SawStop();
  }
  // The same without asking the token.
  bool WasCancelled() const noexcept {
    return stopped_.load(std::memory_order_relaxed);
  }
  // Cancels the launch where `now` is past its deadline.
  void CheckDeadline(Clock::time_point now) noexcept {
    if (now >= deadline_) SawDeadline();
  }
  bool has_deadline() const noexcept {
    return deadline_ != Clock::time_point::max();
  }
  // The first failure wins; the rest of the grid is cancelled.
  void Fail(Status status) noexcept;
  // Requires: all helpers have left.
  Status TakeResult() noexcept;

  // Written before the launch opens, then constant.
  const FunctionRef<void(const Threadgroup&)>* body = nullptr;
  const FunctionRef<void(const Threadgroup&)>* traced_body = nullptr;
  GraphRun* graph = nullptr;  // a graph's run: body and grid are its nodes'
  LaunchTrace trace;
  size_t scratch_bytes = 0;
  std::span<double> worker_seconds = {};
  int participants = 0;
  int priority = 0;
  SharedGrid grid;
  std::vector<int> num_tasks;  // [nodes], see LaunchBoard::Open

 private:
  friend class LaunchBoard;
  bool SawStop() noexcept;
  void SawDeadline() noexcept;

  const std::stop_token* stop_ = nullptr;  // null: nobody can ask
  Clock::time_point deadline_ = Clock::time_point::max();

  // Written by any participant, read by all; apart from the constants above.
  alignas(64) std::atomic<bool> stopped_ = false;
  std::atomic<bool> stop_seen_ = false;
  std::atomic<bool> deadline_seen_ = false;
  std::atomic<bool> has_failed_ = false;
  Status failure_;  // by whoever set has_failed_; read when all have left

  // Written by every helper as it comes and goes.
  alignas(64) std::atomic<int> num_helpers_ = 0;

  // The board's, under its lock.
  LaunchEngine* engine_ = nullptr;
  LaunchState* next_ = nullptr;
  LaunchState* previous_ = nullptr;
  int joins_left_ = 0;
  bool is_listed_ = false;
  bool is_closed_ = false;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_LAUNCH_STATE_H_
