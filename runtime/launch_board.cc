// SPDX-License-Identifier: Apache-2.0

#include "runtime/launch_board.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace varlane {

LaunchBoard::LaunchBoard(std::vector<int> num_threads)
    : num_threads_(std::move(num_threads)), num_tasks_(num_threads_.size()) {}

LaunchBoard::~LaunchBoard() {
  VARLANE_DCHECK(first_ == nullptr);
  while (unused_ != nullptr) delete std::exchange(unused_, unused_->next_);
}

LaunchState* LaunchBoard::Take() {
  {
    const std::lock_guard lock(mutex_);
    if (unused_ != nullptr) {
      unused_->is_closed_ = false;
      return std::exchange(unused_, unused_->next_);
    }
  }
  return new LaunchState(static_cast<int>(num_threads_.size()));
}

void LaunchBoard::Put(LaunchState* state) noexcept {
  const std::lock_guard lock(mutex_);
  state->next_ = unused_;
  unused_ = state;
}

int LaunchBoard::HandOut(int left, SharedGrid* grid,
                         std::vector<int>* num_tasks) const noexcept {
  const auto most = [&](size_t node) {
    const int64_t threads = num_threads_[node];
    return grid == nullptr
               ? threads
               : std::min(threads, grid->range(static_cast<int>(node))->left());
  };
  for (bool is_done = false; left > 0 && !is_done;) {
    is_done = true;
    for (size_t node = 0; node < num_threads_.size() && left > 0; ++node) {
      if ((*num_tasks)[node] >= most(node)) continue;
      is_done = false;
      --left;
      ++(*num_tasks)[node];
    }
  }
  return left;
}

void LaunchBoard::Open(LaunchState* state, LaunchEngine* engine,
                       int joins) noexcept {
  const std::lock_guard lock(mutex_);
  if (state->is_closed_) joins = 0;
  state->engine_ = engine;
  state->joins_left_ = joins;
  if (joins > 0 && !state->is_listed_) List(state);

  // Tasks that are under way will find this launch too.
  std::vector<int>& num_tasks = state->num_tasks;
  std::fill(num_tasks.begin(), num_tasks.end(), 0);
  int left = joins;
  // First those who have work of their own in a grid that is cut by node; a
  // graph's grids are not known yet.
  if (state->graph == nullptr && state->grid.num_ranges() > 1) {
    left = HandOut(left, &state->grid, &num_tasks);
  }
  (void)HandOut(left, nullptr, &num_tasks);
  for (size_t node = 0; node < num_threads_.size(); ++node) {
    int& wanted = num_tasks[node];
    wanted = std::max(wanted - num_tasks_[node], 0);
    num_tasks_[node] += wanted;
  }
}

void LaunchBoard::Close(LaunchState* state) noexcept {
  const std::lock_guard lock(mutex_);
  state->is_closed_ = true;
  if (state->is_listed_) Unlist(state);
}

void LaunchBoard::TaskStarted(int node) noexcept {
  const std::lock_guard lock(mutex_);
  --num_tasks_[static_cast<size_t>(node)];
}

bool LaunchBoard::Idle() noexcept {
  const std::lock_guard lock(mutex_);
  return std::all_of(num_tasks_.begin(), num_tasks_.end(),
                     [](int tasks) { return tasks == 0; });
}

LaunchState* LaunchBoard::Join(LaunchEngine** engine) noexcept {
  const std::lock_guard lock(mutex_);
  LaunchState* const state = first_;
  if (state == nullptr) return nullptr;
  *engine = state->engine_;
  state->num_helpers_.fetch_add(1, std::memory_order_relaxed);
  if (--state->joins_left_ == 0) Unlist(state);
  return state;
}

void LaunchBoard::Rejoin(LaunchState* state) noexcept {
  const std::lock_guard lock(mutex_);
  if (state->is_closed_) return;
  ++state->joins_left_;
  if (!state->is_listed_) List(state);
}

// Behind those of its priority.
void LaunchBoard::List(LaunchState* state) noexcept {
  LaunchState* before = last_;
  while (before != nullptr && before->priority < state->priority) {
    before = before->previous_;
  }
  state->previous_ = before;
  state->next_ = before != nullptr ? before->next_ : first_;
  (state->next_ != nullptr ? state->next_->previous_ : last_) = state;
  (before != nullptr ? before->next_ : first_) = state;
  state->is_listed_ = true;
  NoteMostUrgent();
}

void LaunchBoard::Unlist(LaunchState* state) noexcept {
  (state->previous_ != nullptr ? state->previous_->next_ : first_) =
      state->next_;
  (state->next_ != nullptr ? state->next_->previous_ : last_) =
      state->previous_;
  state->is_listed_ = false;
  NoteMostUrgent();
}

void LaunchBoard::NoteMostUrgent() noexcept {
  most_urgent_.store(
      first_ != nullptr ? first_->priority : std::numeric_limits<int>::min(),
      std::memory_order_relaxed);
}

}  // namespace varlane
