// StepPlanner: chooses who takes part in a step and gets them their blocks.
//
// All policy stands here: order, budget, chunks, admission and the choice of
// the victim. Not thread-safe: the scheduler's lock guards it.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SERVING_STEP_PLANNER_H_
#define VARLANE_SERVING_STEP_PLANNER_H_

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/math.h"
#include "serving/request_queue.h"
#include "serving/request_swaps.h"
#include "varlane/kv_pool.h"
#include "varlane/scheduler.h"

namespace varlane {

class StepPlanner {
 public:
  StepPlanner(const SchedulerOptions& options, KvPool* pool,
              RequestQueue* queue)
      : options_(options), pool_(pool), queue_(queue), swaps_(options, pool) {}

  // Plans the next step: `length` of each request in plan() says how far it
  // gets, and its blocks are there. The plan has an entry whenever there is a
  // request: the first running one is preempted for nobody, so it is served
  // unless others took the whole budget; with nobody running the first waiting
  // one has the pool to itself.
  //
  // Errors: kResourceExhausted when sequences of others leave too few blocks
  //         for even one request, kInternal when that cannot be the reason;
  //         the pool's. Throws std::bad_alloc. Call Abandon() then.
  Status Plan();
  // Undoes a plan; preemptions and starts stay, which is harmless.
  void Abandon();
  // Sends running requests back, from the back of the order, until they
  // give up `blocks` blocks or one is left. Returns how many they held: with a
  // swap file these come free once it is written.
  // Requires: no plan.
  int64_t PreemptFor(int64_t blocks);
  // While held, no request starts beside a running one.
  void HoldStarts(bool hold) { hold_starts_ = hold; }
  // Forgets a plan that was carried out.
  void Clear() { plan_.clear(); }

  // Decodes first.
  std::span<TrackedRequest* const> plan() const { return plan_; }
  RequestSwaps& swaps() { return swaps_; }
  const RequestSwaps& swaps() const { return swaps_; }
  // The plan is empty only because transfers are under way: wait for one more
  // than completions_before() and plan again.
  bool waits_for_swap() const { return waits_for_swap_; }
  int64_t completions_before() const { return completions_before_; }
  // Since ever.
  int64_t preemptions() const { return preemptions_; }
  int64_t started_tokens() const { return started_tokens_; }
  int64_t cached_tokens() const { return cached_tokens_; }

  int64_t Blocks(int64_t tokens) const {
    return DivCeil<int64_t>(tokens, pool_->layout().block_size);
  }
  // Blocks a starting request must leave free when it is not the only one:
  // what running requests still lack to catch up with their known tokens - or
  // two long prompts would take turns in preempting each other half-way - and
  // the watermark, for what they will generate.
  int64_t SpareBlocks() const { return CatchUpBlocks() + WatermarkBlocks(); }

 private:
  Status PlanRunning(bool decodes);
  Status PlanWaiting();
  // Not now: blocks come free when a victim has been written.
  static constexpr int64_t kDeferred = -1;
  enum class Start { kNow, kNotNow, kQuotaFull };
  Result<Start> TryStart(TrackedRequest* request, int64_t spare);
  Result<Start> MayStart(const TrackedRequest& request, int64_t spare,
                         bool may_match) const;
  Result<bool> BeginReadBack(TrackedRequest* request);
  Result<bool> BeginComputing(TrackedRequest* request);
  Status MakeSequence(TrackedRequest* request);
  int64_t QuotaFor(TenantId tenant) const;
  TrackedRequest* LastOf(TenantId tenant) const;
  void GiveBack(TrackedRequest* request);
  Result<int64_t> Grow(TrackedRequest* request);
  Result<int64_t> AppendWhatFits(TrackedRequest* request, int64_t want);
  void Preempt(TrackedRequest* victim);
  int64_t ChunkOf(const TrackedRequest& request) const;
  Status Stuck(const TrackedRequest& request) const;
  int64_t OwnedBlocks() const;
  int64_t CatchUpBlocks() const;
  int64_t WatermarkBlocks() const {
    return static_cast<int64_t>(
        std::ceil(options_.watermark * double(pool_->capacity_blocks())));
  }

  const SchedulerOptions options_;
  KvPool* const pool_;
  RequestQueue* const queue_;
  RequestSwaps swaps_;
  std::vector<TrackedRequest*> plan_;
  std::vector<TenantId> quota_bound_;  // by this plan, none of theirs starts
  Admission::Limit refused_by_ = {};   // the last append that was
  int64_t plan_decodes_ = 0;           // stand first; only right if !preempted_
  int64_t budget_left_ = 0;
  bool preempted_ = false;  // by this plan
  bool deferred_ = false;   // somebody waits for blocks that come
  bool waits_for_swap_ = false;
  int64_t completions_before_ = 0;
  bool hold_starts_ = false;
  int64_t preemptions_ = 0;
  int64_t started_tokens_ = 0;
  int64_t cached_tokens_ = 0;
};

}  // namespace varlane

#endif  // VARLANE_SERVING_STEP_PLANNER_H_
