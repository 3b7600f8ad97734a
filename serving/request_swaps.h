// RequestSwaps: what becomes of a preempted request's K/V: dropped and computed
// again, or written to the swap file and read back.
//
// Knows requests and the swapper; the planner knows when. Not thread-safe: the
// scheduler's lock guards it.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SERVING_REQUEST_SWAPS_H_
#define VARLANE_SERVING_REQUEST_SWAPS_H_

#include <cstdint>

#include "base/rate_estimate.h"
#include "serving/request_queue.h"
#include "varlane/kv_pool.h"
#include "varlane/scheduler.h"
#include "varlane/swap.h"

namespace varlane {

class RequestSwaps {
 public:
  RequestSwaps(const SchedulerOptions& options, KvPool* pool)
      : swapper_(options.swapper), policy_(options.eviction), pool_(pool) {}

  // A step of `tokens`, mostly prefill, took `seconds`.
  void NotePrefill(double tokens, double seconds) {
    prefill_rate_.Add(tokens, seconds);
  }

  // The victim's sequence leaves it: to the file where that is cheaper, whose
  // blocks come free later, or to the pool at once. What is being read back
  // stays in the file.
  void Evict(TrackedRequest* victim, bool may_swap);
  // Forgets what the file holds of the request. Before its sequence is freed.
  void Forget(TrackedRequest* request);

  // Whether the waiting request can go on from the file; not yet where it is
  // still being written. A write that failed is forgotten.
  enum class Resume { kRecompute, kReadBack, kNotYet };
  Resume ResumeOf(TrackedRequest* request);
  // Begins to read into the request's sequence, which has room for all of it.
  // False: it must be computed again, into an empty sequence.
  bool ReadBack(TrackedRequest* request);
  // Ends a reading that is done: `computed` says from where to go on. True
  // where the request is not being read (any more).
  bool Settle(TrackedRequest* request);

  // Blocks will come free without a preemption.
  bool blocks_come() const { return coming_blocks() > 0; }
  int64_t coming_blocks() const {
    return swapper_ == nullptr ? 0 : swapper_->stats().pending_blocks;
  }
  bool busy() const { return swapper_ != nullptr && swapper_->busy(); }
  int64_t completions() const {
    return swapper_ == nullptr ? 0 : swapper_->completions();
  }
  SequenceSwapper* swapper() const { return swapper_; }

  int64_t outs() const { return outs_; }
  int64_t ins() const { return ins_; }
  int64_t losses() const { return losses_; }

 private:
  bool TryOut(TrackedRequest* victim);

  SequenceSwapper* const swapper_;  // may be null
  const EvictionPolicy policy_;
  KvPool* const pool_;
  RateEstimate prefill_rate_;
  int64_t outs_ = 0;    // preempted to the file
  int64_t ins_ = 0;     // that went on from there
  int64_t losses_ = 0;  // that had to be computed again after all
};

}  // namespace varlane

#endif  // VARLANE_SERVING_REQUEST_SWAPS_H_
