// SPDX-License-Identifier: Apache-2.0

#include "runtime/arenas.h"

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>

#include "base/strings.h"
#include "runtime/handover.h"
#include "runtime/launch.h"

namespace varlane {
namespace {

// The slot that no TBB thread takes. One is always reserved: TBB makes arenas
// of two slots at least, and slot numbers must not exceed our workers'.
constexpr int kReservedSlots = 1;

// What is enqueued: by value, since it may outlive arenas and Runtime.
class HelperTask {
 public:
  HelperTask(std::shared_ptr<LaunchBoard> board, int node, int first_worker,
             int num_threads)
      : board_(std::move(board)),
        node_(node),
        first_worker_(first_worker),
        num_threads_(num_threads) {}
  // TBB copies it into the memory it hands over.
  HelperTask(const HelperTask& other)
      : board_(other.board_),
        node_(other.node_),
        first_worker_(other.first_worker_),
        num_threads_(other.num_threads_) {
    HandedOver(this);
  }
  HelperTask& operator=(const HelperTask&) = delete;

  void operator()() const {
    TakenOver(this);
    const int slot = tbb::this_task_arena::current_thread_index();
    const bool is_known = slot >= kReservedSlots && slot <= num_threads_;
    HelpTask(*board_, node_,
             is_known ? first_worker_ + slot - kReservedSlots : -1);
  }

 private:
  std::shared_ptr<LaunchBoard> board_;
  int node_;
  int first_worker_;
  int num_threads_;
};

// Pins threads as they enter an arena, by slot, and unpins them as they leave.
class PinningObserver final : public tbb::task_scheduler_observer {
 public:
  // `masks` has an entry a slot; `outside` is for threads that leave.
  PinningObserver(tbb::task_arena& arena, std::vector<CpuMask> masks,
                  const CpuMask& outside)
      : tbb::task_scheduler_observer(arena),
        masks_(std::move(masks)),
        outside_(outside) {
    HandedOver(this);
    observe(true);
  }

  // TBB does not tell an observer that goes about the threads still inside,
  // and they would stay pinned for the rest of the process: let them leave
  // first. Idle threads do so at once; a forked child has none to wait for.
  ~PinningObserver() override {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    while (num_inside_.load(std::memory_order_acquire) > 0 &&
           getpid() == process_ &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    observe(false);
  }

  void on_scheduler_entry(bool /*is_worker*/) override {
    TakenOver(this);
    num_inside_.fetch_add(1, std::memory_order_relaxed);
    const int slot = tbb::this_task_arena::current_thread_index();
    if (slot < 0 || static_cast<size_t>(slot) >= masks_.size()) return;
    // A refusal leaves the thread where it is: slower, not wrong.
    (void)masks_[static_cast<size_t>(slot)].ApplyToThread();
  }

  void on_scheduler_exit(bool /*is_worker*/) override {
    TakenOver(this);
    // Not the mask the thread came with: TBB starts threads from threads that
    // may be pinned themselves, and that mask would be inherited.
    (void)outside_.ApplyToThread();
    num_inside_.fetch_sub(1, std::memory_order_release);
  }

 private:
  std::vector<CpuMask> masks_;
  CpuMask outside_;
  std::atomic<int> num_inside_ = 0;
  pid_t process_ = getpid();
};

// One node's arena. Worker of slot s (s >= 1) is first_worker + s - 1.
struct NodeArena {
  NodeArena(int first, int threads)
      : first_worker(first),
        num_threads(threads),
        arena(threads + kReservedSlots, kReservedSlots) {}

  int first_worker;
  int num_threads;
  tbb::task_arena arena;
  std::unique_ptr<PinningObserver> observer;  // goes before the arena
};

class TbbArenas final : public Arenas {
 public:
  TbbArenas(const Placement& placement, bool pin)
      : parallelism_(placement.num_workers()) {
    CpuMask outside;
    pin = pin && CpuMask::ReadThread(&outside).ok();
    for (int node = 0; node < placement.num_nodes(); ++node) {
      const auto n = static_cast<size_t>(node);
      // Worker 0 is the calling thread's.
      const int first = std::max(placement.first_worker[n], 1);
      const int threads = placement.first_worker[n + 1] - first;
      auto& made =
          nodes_.emplace_back(std::make_unique<NodeArena>(first, threads));
      if (threads == 0) continue;
      made->arena.initialize();
      if (!pin) continue;
      std::vector<CpuMask> masks(static_cast<size_t>(threads) + 1, outside);
      for (int i = 0; i < threads; ++i) {
        CpuMask& mask = masks[static_cast<size_t>(i + kReservedSlots)];
        mask = CpuMask();
        mask.Add(placement.pu_of_worker[static_cast<size_t>(first + i)]);
      }
      made->observer = std::make_unique<PinningObserver>(
          made->arena, std::move(masks), outside);
    }
  }

  int num_threads(int node) const noexcept override {
    return nodes_[static_cast<size_t>(node)]->num_threads;
  }

  bool EnqueueHelper(
      int node, const std::shared_ptr<LaunchBoard>& board) noexcept override {
    NodeArena& to = *nodes_[static_cast<size_t>(node)];
    try {
      to.arena.enqueue(
          HelperTask(board, node, to.first_worker, to.num_threads));
      return true;
    } catch (...) {
      return false;
    }
  }

 private:
  ParallelismLease parallelism_;  // before the arenas: TBB sizes itself by it
  std::vector<std::unique_ptr<NodeArena>> nodes_;
};

// What ParallelismLeases share. Never destroyed: leases may outlive statics.
struct SharedParallelism {
  std::mutex mutex;
  std::multiset<int> needs;
  std::unique_ptr<tbb::global_control> control;

  // Requires: mutex. The new limit is set before the old one goes, so that
  // the limit never dips below what a running launch was promised.
  void Update() {
    constexpr auto kLimit = tbb::global_control::max_allowed_parallelism;
    const int need = needs.empty() ? 0 : *needs.rbegin();
    std::unique_ptr<tbb::global_control> old = std::move(control);
    const auto had = tbb::global_control::active_value(kLimit);
    if (static_cast<size_t>(need) > had) {
      control = std::make_unique<tbb::global_control>(
          kLimit, static_cast<size_t>(need));
      return;
    }
    if (old == nullptr) return;
    old.reset();
    const auto without = tbb::global_control::active_value(kLimit);
    if (static_cast<size_t>(need) > without) {
      control = std::make_unique<tbb::global_control>(
          kLimit, static_cast<size_t>(need));
    }
  }
};

SharedParallelism& Shared() {
  static auto* const shared = new SharedParallelism;
  return *shared;
}

}  // namespace

Result<std::unique_ptr<Arenas>> Arenas::Create(const Placement& placement,
                                               bool pin) {
  try {
    return std::unique_ptr<Arenas>(std::make_unique<TbbArenas>(placement, pin));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for TBB arenas");
  } catch (const std::exception& error) {
    return Status(StatusCode::kUnavailable,
                  StrCat("TBB cannot make arenas: ", error.what()));
  }
}

ParallelismLease::ParallelismLease(int num_threads)
    : num_threads_(num_threads) {
  SharedParallelism& shared = Shared();
  const std::lock_guard lock(shared.mutex);
  shared.needs.insert(num_threads_);
  shared.Update();
}

ParallelismLease::~ParallelismLease() {
  SharedParallelism& shared = Shared();
  const std::lock_guard lock(shared.mutex);
  shared.needs.erase(shared.needs.find(num_threads_));
  shared.Update();
}

ScopedAffinity::ScopedAffinity(const CpuMask* mask) noexcept {
  if (mask == nullptr || !CpuMask::ReadThread(&before_).ok()) return;
  if (before_.IsWithin(*mask)) return;
  must_restore_ = mask->ApplyToThread().ok();
}

ScopedAffinity::~ScopedAffinity() {
  if (must_restore_) (void)before_.ApplyToThread();
}

}  // namespace varlane
