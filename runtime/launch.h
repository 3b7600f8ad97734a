// The launch engine: drain loops that claim ranges of a flat grid.
//
// A launch hangs on the board (launch_board.h) for TBB threads to help; its
// caller drains the grid too and could finish it alone. At its end the caller
// takes the launch down and waits only for helpers that have joined, each of
// which is running on a thread of its own. So no launch ever waits for a thread
// to become free, and none executes foreign work while it waits: launches nest
// and overlap without deadlock.
//
// A helper task also ends at once where its thread is already inside a body (a
// body that uses TBB may pick up tasks of ours while it waits): that keeps
// worker numbers unique and the argument above true.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_LAUNCH_H_
#define VARLANE_RUNTIME_LAUNCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "runtime/affinity.h"
#include "runtime/arenas.h"
#include "runtime/drain.h"
#include "runtime/launch_board.h"
#include "runtime/launch_state.h"
#include "runtime/placement.h"
#include "runtime/scratch.h"
#include "runtime/spin.h"
#include "varlane/runtime.h"

namespace varlane {

class LaunchEngine {
 public:
  // `placement` and `arenas` must outlive the engine. `pin`: a caller that is
  // elsewhere is put on worker 0's PU while a launch of several workers lasts.
  // `confine`: callers run on no other PUs than the placement's, ever.
  LaunchEngine(const Placement& placement, Arenas& arenas, bool pin,
               bool confine);
  ~LaunchEngine();

  // See Runtime::Launch.
  Status Launch(const Grid& grid, FunctionRef<void(const Threadgroup&)> body,
                const LaunchOptions& options);

  // See Runtime::Run. Starts and finishes `run`, which nobody else uses.
  Status Run(GraphRun* run, const LaunchOptions& options);

  // --- for GraphRun ----------------------------------------------------------

  Status Validate(const Grid& grid, const LaunchOptions& options) const;
  // Lets `joins` helpers in and sends for them. One caller at a time a state.
  void Summon(LaunchState* state, int joins) noexcept;
  // Empties drainer->grid with scratch of the worker; false once cancelled.
  // `traced` is what runs where `trace` has a tracer.
  template <typename Body, typename TracedBody>
  bool Drain(Drainer* drainer, size_t scratch_bytes, const Body& body,
             LaunchTrace* trace, const TracedBody& traced) noexcept {
    ScratchPool::Lease scratch;
    if (Status status =
            scratch_.Acquire(drainer->worker, scratch_bytes, &scratch);
        !status.ok()) {
      drainer->state->Fail(std::move(status));
      return false;
    }
    drainer->scratch = scratch.bytes();
    const WorkerTimer timer(drainer->worker_seconds, drainer->worker);
    if (trace->tracer != nullptr) {
      return DrainGridTraced(*drainer, trace, traced);
    }
    return DrainGrid(*drainer, body);
  }
  void SetTracer(Tracer* tracer) noexcept {
    tracer_.store(tracer, std::memory_order_release);
  }
  // Not at all where workers share PUs.
  std::chrono::nanoseconds helper_patience() const noexcept {
    return spins_ ? kHelperPatience : std::chrono::nanoseconds(0);
  }
  std::chrono::nanoseconds caller_patience() const noexcept {
    return spins_ ? kCallerPatience : std::chrono::nanoseconds(0);
  }
  int num_nodes() const noexcept { return placement_.num_nodes(); }

 private:
  friend void HelpTask(LaunchBoard& board, int node, int worker) noexcept;

  void Trace(LaunchState* state, std::string_view name) noexcept;
  int Participants(int64_t at_most,
                   const LaunchOptions& options) const noexcept;
  Status Execute(LaunchState* state, int64_t num_threadgroups);
  bool MustMoveCaller() const noexcept;
  const CpuMask* WhereToConfineCaller() const noexcept;
  void RunWithHelpers(LaunchState* state, int worker, bool is_nested);
  void TakePart(LaunchState* state, int worker, bool is_caller) noexcept;

  const Placement& placement_;
  Arenas& arenas_;
  std::vector<int> node_of_worker_;
  ScratchPool scratch_;
  std::shared_ptr<LaunchBoard> board_;
  CpuMask caller_mask_;  // worker 0's PU
  CpuMask own_mask_;     // all PUs of the placement
  bool pin_;
  bool confine_;
  bool spins_;
  std::atomic<Tracer*> tracer_ = nullptr;  // null: nothing is traced
  // Held by the one caller at a time that is moved to worker 0's PU; others run
  // where the system puts them rather than share one core.
  alignas(64) std::atomic<bool> caller_seat_taken_ = false;
};

// A helper task of `node`, on the TBB thread that is worker `worker` (-1: a
// thread we do not know, which does not help).
void HelpTask(LaunchBoard& board, int node, int worker) noexcept;

}  // namespace varlane

#endif  // VARLANE_RUNTIME_LAUNCH_H_
