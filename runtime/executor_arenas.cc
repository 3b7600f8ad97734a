// Arenas on an embedder's threads: whichever thread a helper task gets, it
// takes a worker number that is free.
//
// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "runtime/arenas.h"
#include "runtime/handover.h"
#include "runtime/launch.h"

namespace varlane {
namespace {

// Shared with the tasks, which may outlive the Runtime.
class FreeWorkers {
 public:
  explicit FreeWorkers(int num_workers) {
    for (int worker = num_workers - 1; worker > 0; --worker) {
      free_.push_back(worker);  // 0 is the caller
    }
  }

  // -1 when all are at work.
  int Take() noexcept {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return -1;
    const int worker = free_.back();
    free_.pop_back();
    return worker;
  }
  void Put(int worker) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(worker);  // there is room: it was here before
  }

 private:
  std::mutex mutex_;
  std::vector<int> free_;  // guarded by mutex_
};

class ExecutorArenas final : public Arenas {
 public:
  ExecutorArenas(RuntimeOptions::Executor run, int num_workers)
      : run_(std::move(run)),
        num_threads_(num_workers - 1),
        workers_(std::make_shared<FreeWorkers>(num_workers)) {}

  int num_threads(int) const noexcept override { return num_threads_; }

  bool EnqueueHelper(
      int node, const std::shared_ptr<LaunchBoard>& board) noexcept override {
    try {
      HandedOver(board.get());
      run_([node, board, workers = workers_] {
        TakenOver(board.get());
        const int worker = workers->Take();
        HelpTask(*board, node, worker);
        if (worker >= 0) workers->Put(worker);
      });
      return true;
    } catch (...) {
      return false;
    }
  }

 private:
  RuntimeOptions::Executor run_;
  int num_threads_;
  std::shared_ptr<FreeWorkers> workers_;
};

}  // namespace

Result<std::unique_ptr<Arenas>> Arenas::On(const RuntimeOptions::Executor& run,
                                           const Placement& placement) {
  try {
    return std::unique_ptr<Arenas>(
        std::make_unique<ExecutorArenas>(run, placement.num_workers()));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for an executor");
  }
}

}  // namespace varlane
