// Where open launches hang, and helpers look for one to join.
//
// Helpers are tasks that know the board, not a launch: one that starts late
// joins whatever is open by then, or nothing. So at most one task a thread
// needs to be under way, however many launches come and go meanwhile.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_LAUNCH_BOARD_H_
#define VARLANE_RUNTIME_LAUNCH_BOARD_H_

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/launch_state.h"

namespace varlane {

// Held by the engine and by every helper task, which may start when the
// Runtime is already gone. Threads: every member is safe from any thread.
class LaunchBoard {
 public:
  // `num_threads` [nodes]: how many threads can help from each node.
  explicit LaunchBoard(std::vector<int> num_threads);
  ~LaunchBoard();
  LaunchBoard(const LaunchBoard&) = delete;
  LaunchBoard& operator=(const LaunchBoard&) = delete;

  // A state nobody else sees; throws std::bad_alloc. States are reused and
  // freed with the board only: a helper may still be notifying its caller when
  // that has long seen it leave.
  LaunchState* Take();
  void Put(LaunchState* state) noexcept;

  // Lets `joins` helpers in, in place of what is left of an Open before. Sets
  // state->num_tasks to how many helper tasks must be enqueued for that; these
  // are counted as under way. Nothing happens once the state is closed.
  void Open(LaunchState* state, LaunchEngine* engine, int joins) noexcept;
  // Lets nobody in any more, until Take hands it out again.
  void Close(LaunchState* state) noexcept;

  // A helper task has begun, or could not be enqueued.
  void TaskStarted(int node) noexcept;
  // No helper task is under way.
  bool Idle() noexcept;
  // The launch that wants help, of the highest priority and then the oldest,
  // entered; null when there is none.
  LaunchState* Join(LaunchEngine** engine) noexcept;
  // Lets another helper in, in place of one that is about to leave early.
  void Rejoin(LaunchState* state) noexcept;

  // The priority of what Join would find; the least int when it is nothing.
  const std::atomic<int>& most_urgent() const noexcept { return most_urgent_; }

 private:
  void List(LaunchState* state) noexcept;
  // Gives `left` joins to the nodes, one a node in turn, no node more than it
  // has threads, nor with a grid more than it has threadgroups. Returns those
  // nobody took.
  int HandOut(int left, SharedGrid* grid,
              std::vector<int>* num_tasks) const noexcept;
  void Unlist(LaunchState* state) noexcept;
  void NoteMostUrgent() noexcept;

  const std::vector<int> num_threads_;  // [nodes]
  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<int> num_tasks_;    // [nodes], enqueued and not yet started
  LaunchState* first_ = nullptr;  // by priority and age
  LaunchState* last_ = nullptr;
  LaunchState* unused_ = nullptr;
  // Written under the lock; read by helpers between threadgroups.
  alignas(64) std::atomic<int> most_urgent_ = std::numeric_limits<int>::min();
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_LAUNCH_BOARD_H_
