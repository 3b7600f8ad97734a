// SPDX-License-Identifier: Apache-2.0

#include "varlane/scheduler.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "memory/step_pin.h"
#include "serving/request_queue.h"
#include "serving/step_builder.h"
#include "serving/step_planner.h"

namespace varlane {
namespace {

// cu_seqlens_q and seq_lens are int32.
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

Status ValidateOptions(const SchedulerOptions& options) {
  VARLANE_REQUIRE_ARG(
      options.token_budget >= 1 && options.token_budget <= kMaxTokens,
      "token_budget = ", options.token_budget, ", but must be in [1, ",
      kMaxTokens, "]");
  VARLANE_REQUIRE_ARG(options.max_seqs >= 1, "max_seqs = ", options.max_seqs,
                      ", but must be at least 1");
  VARLANE_REQUIRE_ARG(options.max_chunk >= 0, "max_chunk = ", options.max_chunk,
                      ", but must be at least 0 (0 = any)");
  VARLANE_REQUIRE_ARG(options.watermark >= 0 && options.watermark < 1,
                      "watermark = ", options.watermark,
                      ", but must be in [0, 1)");
  return {};
}

Status ValidateRequest(const Request& request) {
  VARLANE_REQUIRE_ARG(
      request.prompt_tokens >= 1 && request.prompt_tokens <= kMaxTokens,
      "request ", request.id, ": prompt_tokens = ", request.prompt_tokens,
      ", but must be in [1, ", kMaxTokens, "]");
  VARLANE_REQUIRE_ARG(
      request.max_new_tokens >= 1 &&
          request.max_new_tokens <= kMaxTokens - request.prompt_tokens,
      "request ", request.id, ": max_new_tokens = ", request.max_new_tokens,
      ", but must be in [1, ", kMaxTokens - request.prompt_tokens, "] beside ",
      request.prompt_tokens, " prompt tokens");
  VARLANE_REQUIRE_ARG(request.prompt.empty() ||
                          std::ssize(request.prompt) == request.prompt_tokens,
                      "request ", request.id, ": prompt has ",
                      request.prompt.size(),
                      " tokens, but prompt_tokens = ", request.prompt_tokens);
  return {};
}

// Capacity for `count` more; grows by doubling, as push_back would.
template <typename T>
void MakeRoom(size_t count, std::vector<T>* values) {
  const size_t needed = values->size() + count;
  if (needed > values->capacity()) {
    values->reserve(std::max(needed, 2 * values->capacity()));
  }
}

}  // namespace

class Scheduler::Impl {
 public:
  Impl(const SchedulerOptions& options, KvPool* pool)
      : pool_(pool), planner_(options, pool, &queue_) {}
  ~Impl();

  Result<Admission> Submit(const Request& request);
  Status Cancel(RequestId id);
  Status Schedule(Step* step);
  Status Complete(const Step& step, std::span<const RequestId> finished,
                  std::vector<RequestId>* ended,
                  std::span<const int32_t> sampled);
  void TakeWork(bool take);
  Result<int64_t> Preempt(int64_t blocks);
  int64_t LeastBlocks() const;
  SchedulerStats stats() const;
  bool idle() const;

 private:
  // What Complete may be called for. An empty step needs no Complete, but one
  // is not an error: a driver need not treat it apart.
  enum class Outstanding { kNone, kEmptyStep, kStep };

  // All below: `mutex_` is held.
  void Release(TrackedRequest* request);
  void CountStep(const Step& step);
  void NotePace(const Step& step);
  Status CheckCompletion(const Step& step, std::span<const RequestId> finished,
                         std::span<const int32_t> sampled);
  void CommitTokens(TrackedRequest* request);

  KvPool* const pool_;

  mutable std::mutex mutex_;  // guards all below; taken before the pool's
  RequestQueue queue_;
  StepPlanner planner_;
  SchedulerStats stats_;  // but those that queue and planner know
  Outstanding outstanding_ = Outstanding::kNone;
  Clock::time_point step_start_;
  std::optional<StepPin> step_pin_;  // while a step is outstanding
};

Scheduler::Impl::~Impl() {
  for (TrackedRequest* request : queue_.waiting()) {
    planner_.swaps().Forget(request);
  }
  for (TrackedRequest* request : queue_.running()) {
    planner_.swaps().Forget(request);
    (void)pool_->Free(request->sequence);
  }
}

// --- any thread --------------------------------------------------------------

Result<Admission> Scheduler::Impl::Submit(const Request& request) try {
  VARLANE_RETURN_IF_ERROR(ValidateRequest(request));
  const std::lock_guard lock(mutex_);
  VARLANE_REQUIRE(queue_.Find(request.id) == nullptr,
                  StatusCode::kAlreadyExists, "request ", request.id,
                  " is in use by one that has not finished");
  Admission admission;
  admission.capacity_blocks = pool_->capacity_blocks();
  admission.free_blocks = pool_->free_blocks();
  admission.needed_blocks =
      planner_.Blocks(request.prompt_tokens + request.max_new_tokens);
  const bool fits_later = admission.needed_blocks > admission.capacity_blocks &&
                          admission.needed_blocks <=
                              admission.capacity_blocks + pool_->lent_blocks();
  if (!stats_.takes_work || fits_later) {
    ++stats_.refused;
    return Status(StatusCode::kUnavailable,
                  MessageCat("request ", request.id,
                             " is refused: memory is short; try again later"));
  }
  if (admission.needed_blocks > admission.capacity_blocks) {
    admission.kind = Admission::Kind::kNeverFits;
    return admission;
  }
  const KvTenantStats tenant = pool_->tenant_stats(request.tenant);
  if (tenant.quota_blocks >= 0 &&
      admission.needed_blocks > tenant.quota_blocks) {
    admission.kind = Admission::Kind::kNeverFits;
    admission.limit = Admission::Limit::kQuota;
    admission.free_blocks =
        std::max<int64_t>(0, tenant.quota_blocks - tenant.used_blocks);
    admission.capacity_blocks = tenant.quota_blocks;
    return admission;
  }
  // What must be free for it to start: itself and all that go before it. Ends
  // early, so a long queue costs no more than the pool's blocks.
  const TrackedRequest* self = queue_.Add(request);
  const bool alone =
      queue_.running().empty() && *queue_.waiting().begin() == self;
  int64_t needed = alone ? 0 : planner_.SpareBlocks();
  for (const TrackedRequest* waiting : queue_.waiting()) {
    needed += planner_.Blocks(waiting->known());
    if (waiting == self || needed > admission.free_blocks) break;
  }
  admission.needed_blocks = needed;
  admission.kind = needed > admission.free_blocks ? Admission::Kind::kWait
                                                  : Admission::Kind::kAdmitted;
  return admission;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory left to queue the request");
}

Status Scheduler::Impl::Cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  TrackedRequest* request = queue_.Find(id);
  VARLANE_REQUIRE(request != nullptr && !request->cancelled,
                  StatusCode::kNotFound, "request ", id,
                  " is neither waiting nor running");
  ++stats_.cancelled;
  // Its blocks may be being read and written right now: Complete frees them.
  request->cancelled = true;
  if (!request->in_step) Release(request);
  return {};
}

SchedulerStats Scheduler::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  SchedulerStats stats = stats_;
  stats.swapped_out = planner_.swaps().outs();
  stats.swapped_in = planner_.swaps().ins();
  stats.swap_losses = planner_.swaps().losses();
  stats.waiting = static_cast<int64_t>(queue_.waiting().size());
  stats.running = static_cast<int64_t>(queue_.running().size());
  stats.preemptions = planner_.preemptions();
  stats.started_tokens = planner_.started_tokens();
  stats.cached_tokens = planner_.cached_tokens();
  return stats;
}

bool Scheduler::Impl::idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.waiting().empty() && queue_.running().empty();
}

void Scheduler::Impl::TakeWork(bool take) {
  const std::lock_guard lock(mutex_);
  stats_.takes_work = take;
  planner_.HoldStarts(!take);
}

int64_t Scheduler::Impl::LeastBlocks() const {
  const std::lock_guard lock(mutex_);
  int64_t tokens = 0;
  for (const RequestQueue::Ordered* side :
       {&queue_.running(), &queue_.waiting()}) {
    for (const TrackedRequest* tracked : *side) {
      tokens = std::max(tokens, tracked->request.prompt_tokens +
                                    tracked->request.max_new_tokens);
    }
  }
  return planner_.Blocks(tokens);
}

// --- the engine thread -------------------------------------------------------

Status Scheduler::Impl::Schedule(Step* step) {
  VARLANE_REQUIRE_ARG(step != nullptr, "step is null");
  std::unique_lock lock(mutex_);
  VARLANE_REQUIRE(outstanding_ != Outstanding::kStep,
                  StatusCode::kFailedPrecondition,
                  "the previous step was not completed");
  // From before the first table is copied until Complete.
  step_pin_.emplace(pool_);
  Status status;
  try {
    status = planner_.Plan();
    while (status.ok() && planner_.waits_for_swap()) {
      // Between two plans nothing points into the books.
      step_pin_.reset();
      const int64_t seen = planner_.completions_before();
      lock.unlock();
      planner_.swaps().swapper()->WaitForCompletion(seen);
      lock.lock();
      step_pin_.emplace(pool_);
      status = planner_.Plan();
    }
    if (status.ok()) status = BuildStep(*pool_, planner_.plan(), step);
    if (!status.ok()) ClearStep(step);
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kResourceExhausted,
                    "no memory left for the step's arrays");
    step->entries.clear();
    step->seq_lens.clear();
    step->slot_mapping.clear();
  }
  if (!status.ok()) {
    step_pin_.reset();
    planner_.Abandon();
    return status;
  }
  CountStep(*step);
  step_start_ = Clock::now();
  outstanding_ = step->empty() ? Outstanding::kEmptyStep : Outstanding::kStep;
  if (outstanding_ != Outstanding::kStep) step_pin_.reset();
  return {};
}

Result<int64_t> Scheduler::Impl::Preempt(int64_t blocks) {
  VARLANE_REQUIRE_ARG(blocks >= 0, "blocks = ", blocks,
                      ", must not be negative");
  const std::lock_guard lock(mutex_);
  VARLANE_REQUIRE(outstanding_ != Outstanding::kStep,
                  StatusCode::kFailedPrecondition,
                  "the previous step was not completed");
  return planner_.PreemptFor(blocks);
}

Status Scheduler::Impl::Complete(const Step& step,
                                 std::span<const RequestId> finished,
                                 std::vector<RequestId>* ended,
                                 std::span<const int32_t> sampled) try {
  const std::lock_guard lock(mutex_);
  VARLANE_RETURN_IF_ERROR(CheckCompletion(step, finished, sampled));
  if (ended != nullptr) MakeRoom(planner_.plan().size(), ended);
  if (!sampled.empty()) {
    for (TrackedRequest* request : planner_.plan()) {
      MakeRoom(1, &request->tokens);
    }
  }
  // From here on nothing fails.
  NotePace(step);
  auto token = sampled.begin();
  for (const RequestId id : finished) queue_.Find(id)->eos = true;
  for (TrackedRequest* request : planner_.plan()) {
    const bool samples = request->samples();
    request->in_step = false;
    request->computed = request->length;
    request->ever_computed =
        std::max(request->ever_computed, request->computed);
    CommitTokens(request);
    if (samples && !sampled.empty()) {
      if (request->knows_all_tokens()) request->tokens.push_back(*token);
      ++token;
    }
    if (request->cancelled) {
      Release(request);
      continue;
    }
    if (samples) ++request->generated;
    const bool full = request->generated == request->request.max_new_tokens;
    if (!request->eos && !full) continue;
    ++stats_.finished;
    if (!request->eos && ended != nullptr) {
      ended->push_back(request->request.id);
    }
    Release(request);
  }
  planner_.Clear();
  step_pin_.reset();
  outstanding_ = Outstanding::kNone;
  return {};
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory left for the ids of ended requests");
}

// Tells the pool which tokens the step computed, so that others find them. What
// the pool cannot take now it is told again after the next step.
void Scheduler::Impl::CommitTokens(TrackedRequest* request) {
  const int64_t end = std::min(request->computed, std::ssize(request->tokens));
  if (end <= request->committed) return;
  const std::span<const int32_t> tokens =
      std::span<const int32_t>(request->tokens)
          .subspan(static_cast<size_t>(request->committed),
                   static_cast<size_t>(end - request->committed));
  const Status committed =
      pool_->CommitTokens(request->sequence, request->committed, tokens);
  if (committed.ok()) request->committed = end;
}

Status Scheduler::Impl::CheckCompletion(const Step& step,
                                        std::span<const RequestId> finished,
                                        std::span<const int32_t> sampled) {
  VARLANE_REQUIRE(outstanding_ != Outstanding::kNone,
                  StatusCode::kFailedPrecondition, "no step is outstanding");
  const std::span<TrackedRequest* const> plan = planner_.plan();
  VARLANE_REQUIRE(
      std::equal(step.entries.begin(), step.entries.end(), plan.begin(),
                 plan.end(),
                 [](const StepEntry& entry, const TrackedRequest* planned) {
                   return entry.request == planned->request.id &&
                          entry.begin == planned->computed &&
                          entry.begin + entry.count == planned->length;
                 }),
      StatusCode::kFailedPrecondition,
      "step is not the one that Schedule filled last");
  const int64_t num_samples =
      std::count_if(plan.begin(), plan.end(),
                    [](const TrackedRequest* r) { return r->samples(); });
  VARLANE_REQUIRE_ARG(sampled.empty() || std::ssize(sampled) == num_samples,
                      "sampled has ", sampled.size(), " tokens, but ",
                      num_samples, " entries sample one");
  for (const RequestId id : finished) {
    const TrackedRequest* request = queue_.Find(id);
    VARLANE_REQUIRE(
        request != nullptr && request->in_step && request->samples(),
        StatusCode::kNotFound, "finished names request ", id,
        ", which produced no token in this step");
  }
  return {};
}

void Scheduler::Impl::CountStep(const Step& step) {
  if (step.empty()) return;
  ++stats_.steps;
  const std::span<TrackedRequest* const> plan = planner_.plan();
  for (size_t i = 0; i < plan.size(); ++i) {
    const StepEntry& entry = step.entries[i];
    plan[i]->in_step = true;
    (entry.is_prefill ? stats_.prefill_tokens : stats_.decode_tokens) +=
        entry.count;
    stats_.recomputed_tokens += std::max<int64_t>(
        0, std::min(plan[i]->ever_computed, entry.begin + entry.count) -
               entry.begin);
  }
}

// How long computing takes, where prefill was most of it.
void Scheduler::Impl::NotePace(const Step& step) {
  int64_t prefill = 0;
  for (const StepEntry& entry : step.entries) {
    if (entry.is_prefill) prefill += entry.count;
  }
  if (2 * prefill <= step.total_q()) return;
  planner_.swaps().NotePrefill(double(step.total_q()),
                               SecondsSince(step_start_));
}

void Scheduler::Impl::Release(TrackedRequest* request) {
  planner_.swaps().Forget(request);
  if (request->sequence != kNoSequence) (void)pool_->Free(request->sequence);
  queue_.Erase(request);
}

// --- the public face ---------------------------------------------------------

Scheduler::Scheduler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scheduler::~Scheduler() = default;

Result<std::unique_ptr<Scheduler>> Scheduler::Create(
    const SchedulerOptions& options, KvPool* pool) try {
  VARLANE_RETURN_IF_ERROR(ValidateOptions(options));
  VARLANE_REQUIRE_ARG(pool != nullptr, "pool is null");
  return std::unique_ptr<Scheduler>(
      new Scheduler(std::make_unique<Impl>(options, pool)));
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory left for the scheduler");
}

Result<Admission> Scheduler::Submit(const Request& request) {
  return impl_->Submit(request);
}
Status Scheduler::Cancel(RequestId id) { return impl_->Cancel(id); }
Status Scheduler::Schedule(Step* step) { return impl_->Schedule(step); }
Status Scheduler::Complete(const Step& step,
                           std::span<const RequestId> finished,
                           std::vector<RequestId>* ended,
                           std::span<const int32_t> sampled) {
  return impl_->Complete(step, finished, ended, sampled);
}
void Scheduler::TakeWork(bool take) { impl_->TakeWork(take); }
Result<int64_t> Scheduler::Preempt(int64_t blocks) {
  return impl_->Preempt(blocks);
}
int64_t Scheduler::LeastBlocks() const { return impl_->LeastBlocks(); }
SchedulerStats Scheduler::stats() const { return impl_->stats(); }
bool Scheduler::idle() const { return impl_->idle(); }

}  // namespace varlane
