// Scheduler: continuous batching. Requests in, one ragged batch a step out.
//
// There is no prefill phase and no decode phase: each request catches up with
// its known tokens, within one token budget a step, decodes first. It emits
// exactly the Batch of attention.h plus slot_mapping and knows no kernels; the
// caller owns weights and sampling, and says which tokens there are where
// prefixes are to be found again. Layer 4.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SCHEDULER_H_
#define VARLANE_SCHEDULER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "varlane/attention.h"
#include "varlane/export.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"
#include "varlane/swap.h"

namespace varlane {

using RequestId = int64_t;

// What a preemption does with what the request has computed.
enum class EvictionPolicy : uint8_t {
  kByCost,     // the cheaper of the two, as measured (ChooseEviction)
  kRecompute,  // drop it
  kSwap,       // write it to the swap file while there is room
};

struct SchedulerOptions {
  int64_t token_budget = 2048;  // query tokens a step, at least 1
  int64_t max_seqs = 256;       // requests running at once
  int64_t max_chunk = 0;        // prefill tokens of one request a step; 0 = any
  double watermark = 0.01;      // share of blocks a new request must leave free
  // Where preempted sequences may go; null = they are computed again. Must
  // outlive the scheduler.
  SequenceSwapper* swapper = nullptr;
  EvictionPolicy eviction = EvictionPolicy::kByCost;
};

struct Request {
  RequestId id = 0;            // unique among those not finished
  int64_t prompt_tokens = 0;   // at least 1
  int64_t max_new_tokens = 1;  // at least 1; the EOS counts
  int priority = 0;            // higher first; ties by arrival
  TenantId tenant = 0;         // whose quota, and whose prefixes
  // The prompt's tokens, prompt_tokens of them: what the pool's prefix cache
  // knows of them is not computed again. Empty = not told. Submit copies them.
  std::span<const int32_t> prompt = {};
};

// One sequence's part of a step: query tokens at absolute positions
// [begin, begin + count). Positions below the prompt length are prompt tokens,
// others are generated ones (after a preemption those are fed again too).
struct StepEntry {
  RequestId request = 0;
  SeqId sequence = 0;
  int64_t begin = 0;
  int64_t count = 0;
  bool is_prefill = false;  // more known tokens than one were outstanding
  bool samples = false;     // its last row yields the request's next token
};

// A step: what to run. Reused between calls; no allocation once warm.
struct Step {
  std::vector<StepEntry> entries;     // [N], decodes first
  std::vector<int32_t> cu_seqlens_q;  // [N+1]
  std::vector<int32_t> seq_lens;      // [N]
  std::vector<int32_t> block_tables;  // [N, block_table_stride]
  int64_t block_table_stride = 0;
  std::vector<int64_t> slot_mapping;  // [total_q]

  int64_t total_q() const { return static_cast<int64_t>(slot_mapping.size()); }
  bool empty() const { return entries.empty(); }
  Batch batch() const {
    return {cu_seqlens_q, seq_lens, block_tables, block_table_stride};
  }
};

struct SchedulerStats {
  int64_t steps = 0;
  int64_t waiting = 0;
  int64_t running = 0;
  int64_t finished = 0;
  int64_t cancelled = 0;
  int64_t preemptions = 0;     // requests sent back to recompute
  int64_t prefill_tokens = 0;  // scheduled, recomputed ones included
  int64_t decode_tokens = 0;
  int64_t recomputed_tokens = 0;  // computed again after a preemption
  int64_t swapped_out = 0;        // of the preemptions: to the swap file
  int64_t swapped_in = 0;         // of these: went on from there
  int64_t swap_losses = 0;        // of these: computed again, I/O failed
  int64_t started_tokens = 0;     // known tokens of starts, resumed ones too,
                                  // but those that the swap file had
  int64_t cached_tokens = 0;      // of these, found in the prefix cache
  int64_t refused = 0;            // submitted while no new work was taken
  bool takes_work = true;
};

// Threads: Submit, Cancel and stats are safe from any thread; Schedule and
//          Complete belong to one engine thread, alternating.
class VARLANE_EXPORT Scheduler {
 public:
  // Errors: kInvalidArgument naming the option.
  // Lifetime: `pool` must outlive it.
  static Result<std::unique_ptr<Scheduler>> Create(
      const SchedulerOptions& options, KvPool* pool);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Queues a request. kNeverFits when prompt + max_new tokens need more blocks
  // than the pool can ever hold: then it is not queued. Otherwise kAdmitted or
  // kWait (queued; the pool is too full to start it now): needed_blocks counts
  // it, those before it and what a start must leave free.
  // Errors: kInvalidArgument (bad counts, or a prompt of another length),
  //         kAlreadyExists (id in use); kUnavailable while TakeWork(false)
  //         holds, and where only blocks that the pool has lent
  //         (KvPool::GiveBack) would make it fit.
  Result<Admission> Submit(const Request& request);

  // Drops a request wherever it is; its blocks come back before the next step.
  // Errors: kNotFound.
  Status Cancel(RequestId id);

  // Fills `step` with the next batch; empty when there is nothing to do. Each
  // running request's blocks for this step are allocated here; when the pool
  // runs dry the lowest-priority, youngest request is preempted: its blocks are
  // freed and it starts over from its first token, generated ones included -
  // or, with a swapper, may be written to its file and go on from there. While
  // nothing can run before a transfer ends, this waits for it.
  // Errors: kFailedPrecondition when the previous step was not completed;
  //         kResourceExhausted when sequences of others leave too few blocks
  //         for even one request; the pool's. `step` is empty then, and the
  //         call may be repeated.
  Status Schedule(Step* step);

  // Tells that `step` was computed. `finished` names requests that produced
  // their EOS: they end and free their blocks at once, as do those that reached
  // max_new_tokens, which are appended to `ended` (may be null; those named in
  // `finished` are not repeated there). An empty step may be completed or not.
  // `sampled` has the new token of each entry that samples, in their order, or
  // is empty: then the prefix cache knows a request's prompt, but not what
  // follows it.
  // Errors: kFailedPrecondition (no step outstanding, or not this one),
  //         kNotFound (an id that sampled nothing in it), kInvalidArgument (too
  //         few or too many `sampled`). Nothing changes then.
  Status Complete(const Step& step, std::span<const RequestId> finished,
                  std::vector<RequestId>* ended = nullptr,
                  std::span<const int32_t> sampled = {});

  // --- under memory pressure -----------------------------------------------
  // Whether new work is taken: if not, Submit refuses, and none of the waiting
  // requests starts beside a running one. Any thread.
  void TakeWork(bool take);
  // Sends the lowest-priority, youngest running requests back, as Schedule does
  // when the pool runs dry, until they give up `blocks` blocks or one request
  // is left. Returns how many they held, shared ones included; with a swap file
  // these come free once it is written, and count against the next call's wish
  // until then. Engine thread, between steps.
  // Errors: kFailedPrecondition while a step is outstanding.
  Result<int64_t> Preempt(int64_t blocks);
  // Blocks without which a request that was accepted could never end: those of
  // the longest one. A pool that shrinks below strands it. O(requests).
  int64_t LeastBlocks() const;

  SchedulerStats stats() const;
  bool idle() const;  // nothing waiting, nothing running

 private:
  class Impl;
  explicit Scheduler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_SCHEDULER_H_
