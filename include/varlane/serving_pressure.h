// ServingPressure: a KvPool and its Scheduler answer to memory pressure.
//
// A PressureMonitor on a thread of its own hears of it; the engine thread takes
// the ladder's steps between two steps of its own: stop growing, drop cached
// prefixes, compact, preempt, refuse new work - and back. What running and
// accepted requests need stays. docs/serving.md. Layer 4.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SERVING_PRESSURE_H_
#define VARLANE_SERVING_PRESSURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "varlane/export.h"
#include "varlane/kv_pool.h"
#include "varlane/pressure.h"
#include "varlane/scheduler.h"
#include "varlane/status.h"

namespace varlane {

// What a pool and its scheduler give back, for a PressureController of the
// service's own; ServingPressure has one of each.
//
// Threads: one at a time; all but SetGrowth, DropCached and SetAdmission belong
//          to the engine thread, between steps.
class VARLANE_EXPORT ServingPressureTarget final : public PressureTarget {
 public:
  // The pool keeps `keep_blocks` and what the longest accepted request needs.
  // Lifetime: both must outlive it. `scheduler` may be null: there is nobody to
  // preempt and nothing to refuse then.
  ServingPressureTarget(KvPool* pool, Scheduler* scheduler,
                        int64_t keep_blocks);

  void SetGrowth(bool allowed) override;
  // Whole slabs, without moving what a sequence has.
  int64_t DropCached(int64_t bytes) override;
  // Whole slabs, moving blocks out of them. 0 while a step is outstanding.
  int64_t Compact(int64_t bytes) override;
  // With a swap file blocks come free once they are written: then the next call
  // gives them back.
  int64_t Preempt(int64_t bytes) override;
  void SetAdmission(bool allowed) override;
  int64_t Regrow(int64_t bytes) override;

 private:
  int64_t KeptBlocks() const;
  int64_t GiveBack(int64_t bytes, bool move_blocks);

  KvPool* const pool_;
  Scheduler* const scheduler_;
  const int64_t keep_blocks_;
};

struct ServingPressureOptions {
  PressureOptions monitor = {};
  PressureControllerOptions controller = {};
  // The share of the pool that stays even where nobody needs it, so that work
  // can go on; [0, 1].
  double keep_share = 1.0 / 16;
  // Called by the listening thread when Update has something to do: to wake an
  // engine that waits for requests. Must not block, throw or call back.
  std::function<void()> on_news = {};
};

struct ServingPressureStats {
  PressureStats ladder;
  PressureSample last;  // what the ladder last acted upon
  std::vector<PressureSource> sources;
  int64_t updates = 0;  // of Update that had something to do
  // What those took of the engine thread: moving blocks, returning memory.
  int64_t last_update_ns = 0;
  int64_t longest_update_ns = 0;
  int64_t total_update_ns = 0;
};

// What listening costs, since Create.
struct PressureListenerUse {
  int64_t wakeups = 0;           // of the monitor
  int64_t context_switches = 0;  // of its thread, both kinds; -1 = unknown
  int64_t cpu_ns = 0;            // likewise
};

// Threads: Update belongs to the engine thread, the rest to any; one thread of
//          its own, which sleeps while there is no pressure.
class VARLANE_EXPORT ServingPressure {
 public:
  // Errors: kInvalidArgument (pool, keep_share); kResourceExhausted (heap,
  //         threads, eventfd).
  // Lifetime: `pool` and `scheduler` must outlive it; scheduler may be null.
  static Result<std::unique_ptr<ServingPressure>> Create(
      const ServingPressureOptions& options, KvPool* pool,
      Scheduler* scheduler);
  // Allows growth and new work again. What was given back stays so: see
  // KvPool::TakeBack.
  ~ServingPressure();
  ServingPressure(const ServingPressure&) = delete;
  ServingPressure& operator=(const ServingPressure&) = delete;

  // Takes the steps that are due; call it between any two of the scheduler's.
  // One atomic load where there are none. Returns whether the rung changed or
  // bytes moved.
  bool Update();
  // Whether Update has something to do.
  bool HasNews() const noexcept;

  // The embedder's own word: PressureMonitor::Notify. Async-signal safe.
  void Notify(PressureLevel level, int64_t wanted_bytes = 0) noexcept;

  ServingPressureStats stats() const;
  PressureListenerUse listener_use() const;

 private:
  class Impl;
  explicit ServingPressure(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_SERVING_PRESSURE_H_
