// One TBB arena per NUMA node, whose threads are pinned to their workers' PUs.
//
// TBB threads are the process's: an observer pins a thread as it enters one of
// our arenas and gives it the process's mask back as it leaves, so that other
// users of TBB in the process see no change. Threads that call Launch never
// enter an arena; they are worker 0 and are pinned by CallerPin.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_ARENAS_H_
#define VARLANE_RUNTIME_ARENAS_H_

#include <memory>
#include <vector>

#include "runtime/affinity.h"
#include "runtime/placement.h"
#include "varlane/status.h"

namespace varlane {

class LaunchBoard;

class Arenas {
 public:
  // Errors: kUnavailable, kResourceExhausted (TBB refused).
  static Result<std::unique_ptr<Arenas>> Create(const Placement& placement,
                                                bool pin);
  // The same on threads of the embedder's (RuntimeOptions::executor), for a
  // placement of one node. Errors: kResourceExhausted.
  static Result<std::unique_ptr<Arenas>> On(const RuntimeOptions::Executor& run,
                                            const Placement& placement);
  virtual ~Arenas() = default;

  // TBB threads that node's arena can have: its workers without the caller.
  virtual int num_threads(int node) const noexcept = 0;

  // Has HelpTask run on a thread of the node's arena, some time. False when TBB
  // has no memory for the task: launches then do without.
  virtual bool EnqueueHelper(
      int node, const std::shared_ptr<LaunchBoard>& board) noexcept = 0;
};

// Raises TBB's process-wide limit of threads to what the live Runtimes need
// while one of these lives. TBB applies the *smallest* of all limits that are
// set at a time, so Runtimes must share one that holds the largest of their
// needs; it is only set where TBB's own limit (a thread a core, or the
// service's global_control) is too small, and never lowers that.
class ParallelismLease {
 public:
  explicit ParallelismLease(int num_threads);
  ~ParallelismLease();
  ParallelismLease(const ParallelismLease&) = delete;
  ParallelismLease& operator=(const ParallelismLease&) = delete;

 private:
  int num_threads_;
};

// Puts the calling thread on other CPUs for a scope; the mask it had is
// restored at the end. Nothing happens when `mask` is null, when the thread may
// be nowhere else anyway or when the kernel refuses.
class ScopedAffinity {
 public:
  explicit ScopedAffinity(const CpuMask* mask) noexcept;
  ~ScopedAffinity();
  ScopedAffinity(const ScopedAffinity&) = delete;
  ScopedAffinity& operator=(const ScopedAffinity&) = delete;

 private:
  CpuMask before_;
  bool must_restore_ = false;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_ARENAS_H_
