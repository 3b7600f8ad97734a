// SPDX-License-Identifier: Apache-2.0

#include "runtime/launch_state.h"

#include <algorithm>
#include <utility>

#include "runtime/spin.h"

namespace varlane {

IndexRange SharedRange::Claim(int64_t grain, int participants) noexcept {
  const int64_t seen = next_.load(std::memory_order_relaxed);
  const int64_t left = end_ - seen;
  if (left <= 0) return {};
  // A participant that is alone needs no balance and no second claim.
  const int64_t chunk =
      participants == 1
          ? left
          : std::min(grain,
                     std::max<int64_t>(1, left / (8 * int64_t{participants})));
  const int64_t begin = next_.fetch_add(chunk, std::memory_order_relaxed);
  if (begin >= end_) return {};
  return {begin, std::min(begin + chunk, end_)};
}

void SharedGrid::Reset(const Grid& grid) noexcept {
  claims_ahead_ = grid.claims_ahead;
  if (grid.node_begin.empty()) {
    num_ranges_ = 1;
    ranges_[0].Reset(0, grid.num_threadgroups);
    return;
  }
  num_ranges_ = static_cast<int>(grid.node_begin.size()) - 1;
  for (size_t i = 0; i + 1 < grid.node_begin.size(); ++i) {
    ranges_[i].Reset(grid.node_begin[i], grid.node_begin[i + 1]);
  }
}

void LaunchState::Reset(const LaunchOptions& options,
                        int num_participants) noexcept {
  body = nullptr;
  graph = nullptr;
  trace.tracer = nullptr;
  stop_ = options.stop.stop_possible() ? &options.stop : nullptr;
  deadline_ = options.deadline;
  scratch_bytes = options.scratch_bytes;
  worker_seconds = options.worker_seconds;
  priority = options.priority;
  participants = num_participants;
  stopped_.store(false, std::memory_order_relaxed);
  stop_seen_.store(false, std::memory_order_relaxed);
  deadline_seen_.store(false, std::memory_order_relaxed);
  has_failed_.store(false, std::memory_order_relaxed);
}

void LaunchState::Leave() noexcept {
  // release: what the bodies wrote, for the caller. From here on the state may
  // serve another launch; a stray notification does no harm there.
  if (num_helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    num_helpers_.notify_one();
  }
}

void LaunchState::WaitForHelpers(std::chrono::nanoseconds patience) noexcept {
  int seen = 0;
  SpinUntil(patience, [&] {
    seen = num_helpers_.load(std::memory_order_acquire);
    return seen == 0;
  });
  while (seen != 0) {
    num_helpers_.wait(seen, std::memory_order_acquire);
    seen = num_helpers_.load(std::memory_order_acquire);
  }
}

bool LaunchState::SawStop() noexcept {
  if (stop_ == nullptr || !stop_->stop_requested()) return false;
  stop_seen_.store(true, std::memory_order_relaxed);
  stopped_.store(true, std::memory_order_relaxed);
  return true;
}

void LaunchState::SawDeadline() noexcept {
  deadline_seen_.store(true, std::memory_order_relaxed);
  stopped_.store(true, std::memory_order_relaxed);
}

void LaunchState::Fail(Status status) noexcept {
  if (!has_failed_.exchange(true, std::memory_order_relaxed)) {
    failure_ = std::move(status);
  }
  stopped_.store(true, std::memory_order_relaxed);
}

Status LaunchState::TakeResult() noexcept {
  if (has_failed_.load(std::memory_order_relaxed)) {
    return std::exchange(failure_, Status());
  }
  if (stop_seen_.load(std::memory_order_relaxed)) {
    return {StatusCode::kCancelled, "the launch was asked to stop"};
  }
  if (deadline_seen_.load(std::memory_order_relaxed)) {
    return {StatusCode::kDeadlineExceeded, "the launch's deadline passed"};
  }
  return {};
}

}  // namespace varlane
