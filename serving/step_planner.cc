// SPDX-License-Identifier: Apache-2.0

#include "serving/step_planner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/strings.h"

namespace varlane {

Status StepPlanner::Plan() {
  plan_.clear();
  // Whatever may throw comes before blocks are taken.
  plan_.reserve(static_cast<size_t>(
      std::min({options_.token_budget, options_.max_seqs,
                static_cast<int64_t>(queue_->running().size() +
                                     queue_->waiting().size())})));
  plan_decodes_ = 0;
  budget_left_ = options_.token_budget;
  preempted_ = false;
  deferred_ = false;
  completions_before_ = swaps_.completions();
  bool loading = false;
  for (TrackedRequest* request : queue_->running()) {
    loading |= !swaps_.Settle(request);
  }
  VARLANE_RETURN_IF_ERROR(PlanRunning(/*decodes=*/true));
  VARLANE_RETURN_IF_ERROR(PlanRunning(/*decodes=*/false));
  // Blocks were short a moment ago: whoever starts now would be the next
  // victim, if it is not the last one. Unless a quota sent the only one back.
  if ((!preempted_ || plan_.empty()) && !deferred_) {
    VARLANE_RETURN_IF_ERROR(PlanWaiting());
  }
  waits_for_swap_ =
      plan_.empty() && (loading || deferred_ || swaps_.busy() ||
                        swaps_.completions() != completions_before_);
  if (waits_for_swap_) return {};
  if (plan_.empty() && !queue_->waiting().empty()) {
    return Stuck(**queue_->waiting().begin());
  }
  return {};
}

Status StepPlanner::PlanRunning(bool decodes) {
  const RequestQueue::Ordered& running = queue_->running();
  for (auto it = running.begin(); it != running.end() && budget_left_ > 0;) {
    TrackedRequest* request = *it;
    if (request->loading || (request->outstanding() == 1) != decodes) {
      ++it;
      continue;
    }
    const Result<int64_t> count = Grow(request);
    VARLANE_RETURN_IF_ERROR(count.status());
    if (*count == 0) {  // preempted itself, and with it the last of its tenant
      it = running.upper_bound(request);
      continue;
    }
    if (*count == kDeferred) {
      deferred_ = true;
      ++it;
      continue;
    }
    plan_.push_back(request);
    plan_decodes_ += decodes ? 1 : 0;
    budget_left_ -= *count;
    ++it;  // only now: those behind may have been preempted
  }
  return {};
}

// In strict order: a request that does not fit is not overtaken by a smaller
// one, or it might wait for ever. But one that its tenant's quota holds back
// waits for that tenant alone: others' requests go past it, its own do not.
Status StepPlanner::PlanWaiting() {
  if (queue_->waiting().empty()) return {};
  int64_t promised = CatchUpBlocks();
  quota_bound_.clear();
  auto next = queue_->waiting().begin();
  while (budget_left_ > 0 && next != queue_->waiting().end() &&
         (!hold_starts_ || queue_->running().empty()) &&
         static_cast<int64_t>(queue_->running().size()) < options_.max_seqs) {
    TrackedRequest* request = *next++;  // it may leave the queue
    const TenantId tenant = request->request.tenant;
    if (std::find(quota_bound_.begin(), quota_bound_.end(), tenant) !=
        quota_bound_.end()) {
      continue;
    }
    const Result<Start> start = TryStart(
        request, queue_->running().empty() ? 0 : promised + WatermarkBlocks());
    VARLANE_RETURN_IF_ERROR(start.status());
    if (*start == Start::kNotNow) break;
    if (*start == Start::kQuotaFull) {
      quota_bound_.push_back(tenant);
      continue;
    }
    promised += Blocks(request->known()) - Blocks(request->length);
  }
  return {};
}

// Starts the request, from the swap file or from what the prefix cache knows of
// it, if that leaves `spare` blocks to those that run.
Result<StepPlanner::Start> StepPlanner::TryStart(TrackedRequest* request,
                                                 int64_t spare) {
  const RequestSwaps::Resume resume = swaps_.ResumeOf(request);
  if (resume == RequestSwaps::Resume::kNotYet) return Start::kNotNow;
  const bool reads_back = resume == RequestSwaps::Resume::kReadBack;
  const Result<Start> start = MayStart(*request, spare, !reads_back);
  if (!start.ok() || *start != Start::kNow) return start;
  const Result<bool> begun =
      reads_back ? BeginReadBack(request) : BeginComputing(request);
  VARLANE_RETURN_IF_ERROR(begun.status());
  return *begun ? Start::kNow : Start::kNotNow;
}

// False: others took blocks meanwhile.
Result<bool> StepPlanner::BeginComputing(TrackedRequest* request) {
  VARLANE_RETURN_IF_ERROR(MakeSequence(request));
  const int64_t cached = request->computed;
  const bool is_decode = request->outstanding() == 1;
  const Result<int64_t> count = AppendWhatFits(request, ChunkOf(*request));
  if (!count.ok() || *count == 0) {
    GiveBack(request);
    VARLANE_RETURN_IF_ERROR(count.status());
    return false;
  }
  started_tokens_ += request->known();
  cached_tokens_ += cached;
  queue_->Start(request);
  // A prompt of one token is a decode: it stands with them.
  plan_.insert(is_decode ? plan_.begin() + plan_decodes_ : plan_.end(),
               request);
  plan_decodes_ += is_decode ? 1 : 0;
  budget_left_ -= *count;
  return true;
}

// Starts a request that goes on from the swap file, once it is read. False:
// others took blocks meanwhile, or it must be computed again: next time.
Result<bool> StepPlanner::BeginReadBack(TrackedRequest* request) {
  request->sequence =
      pool_->CreateSequence({.tenant = request->request.tenant});
  const Result<Admission> room =
      pool_->Append(request->sequence, request->stored);
  const bool has_room = room.ok() && room->admitted();
  if (!has_room || !swaps_.ReadBack(request)) {
    GiveBack(request);
    VARLANE_RETURN_IF_ERROR(room.status());
    deferred_ |= has_room;  // the plan may stay empty: another one follows
    return false;
  }
  request->length = request->stored;
  queue_->Start(request);
  return true;
}

// Blocks that the prefix cache has need not be found, but those that nobody
// references now are no longer there for others, and count anew against the
// quota.
Result<StepPlanner::Start> StepPlanner::MayStart(const TrackedRequest& request,
                                                 int64_t spare,
                                                 bool may_match) const {
  const TenantId tenant = request.request.tenant;
  const int64_t free = pool_->free_blocks() - spare;
  const int64_t quota = QuotaFor(tenant);
  int64_t needed = Blocks(request.known());
  if (needed > std::min(free, quota) && std::min(free, quota) > 0 &&
      may_match && !request.tokens.empty()) {
    const Result<PrefixMatch> match = pool_->FindPrefix(tenant, request.tokens);
    VARLANE_RETURN_IF_ERROR(match.status());
    needed += match->cached_blocks - match->shared_blocks;
  }
  if (needed > quota) return Start::kQuotaFull;
  return needed > free ? Start::kNotNow : Start::kNow;
}

// What a starting request of the tenant may take: what its running ones do not
// need yet to catch up, as with SpareBlocks.
int64_t StepPlanner::QuotaFor(TenantId tenant) const {
  const KvTenantStats stats = pool_->tenant_stats(tenant);
  if (stats.quota_blocks < 0) return std::numeric_limits<int64_t>::max();
  int64_t left = stats.quota_blocks - stats.used_blocks;
  for (const TrackedRequest* running : queue_->running()) {
    if (running->request.tenant != tenant) continue;
    left -= Blocks(running->known()) - Blocks(running->length);
  }
  return left;
}

// Gives the request a sequence, with what is computed of it already.
Status StepPlanner::MakeSequence(TrackedRequest* request) {
  const SequenceOptions options = {.tenant = request->request.tenant};
  if (request->tokens.empty()) {
    request->sequence = pool_->CreateSequence(options);
    return {};
  }
  const Result<PrefixMatch> match =
      pool_->MatchPrefix(options, request->tokens);
  VARLANE_RETURN_IF_ERROR(match.status());
  request->sequence = match->seq;
  request->computed = match->tokens;
  request->committed = match->tokens;
  request->length = match->tokens;
  return {};
}

// What it computed is not kept, but the prefix cache may find it again.
void StepPlanner::GiveBack(TrackedRequest* request) {
  (void)pool_->Free(std::exchange(request->sequence, kNoSequence));
  request->computed = 0;
  request->committed = 0;
  request->length = 0;
}

void StepPlanner::Abandon() {
  for (TrackedRequest* request : plan_) {
    (void)pool_->Truncate(request->sequence, request->computed);
    request->length = request->computed;
  }
  plan_.clear();
}

// --- blocks ------------------------------------------------------------------

// Makes room for the request's next chunk, or for what fits of it, at least one
// token, preempting from the back of the order while not even one fits.
// Where it is the tenant's quota that is used up, the victim is one of that
// tenant. 0: `request` was itself the last.
Result<int64_t> StepPlanner::Grow(TrackedRequest* request) {
  for (;;) {
    // Asked first: blocks that came meanwhile are found, none is missed.
    const bool blocks_come = swaps_.blocks_come();
    // Again in each round: a planned victim's share of the budget comes back.
    const Result<int64_t> count = AppendWhatFits(request, ChunkOf(*request));
    if (!count.ok() || *count > 0) return count;
    if (blocks_come) return kDeferred;
    const bool by_quota = refused_by_ == Admission::Limit::kQuota;
    if (!by_quota && queue_->running().size() == 1) return Stuck(*request);
    TrackedRequest* victim =
        by_quota ? LastOf(request->request.tenant) : queue_->victim();
    Preempt(victim);
    if (victim == request) return int64_t{0};
  }
}

// Requires: one of the tenant's is running.
TrackedRequest* StepPlanner::LastOf(TenantId tenant) const {
  const RequestQueue::Ordered& running = queue_->running();
  return *std::find_if(running.rbegin(), running.rend(),
                       [tenant](const TrackedRequest* request) {
                         return request->request.tenant == tenant;
                       });
}

// A shorter chunk is better than a preemption: nothing is computed twice.
Result<int64_t> StepPlanner::AppendWhatFits(TrackedRequest* request,
                                            int64_t want) {
  while (want > 0) {
    const Result<Admission> answer = pool_->Append(request->sequence, want);
    VARLANE_RETURN_IF_ERROR(answer.status());
    if (answer->admitted()) {
      request->length += want;
      return want;
    }
    refused_by_ = answer->limit;
    const int64_t missing =
        std::max<int64_t>(1, answer->needed_blocks - answer->free_blocks);
    const int64_t end =
        (Blocks(request->length + want) - missing) * pool_->layout().block_size;
    want = end - request->length;
  }
  return int64_t{0};
}

// Gives all its blocks back and queues it again. What it generated is kept;
// what it computed may be, in the swap file: then the blocks come free later.
void StepPlanner::Preempt(TrackedRequest* victim) {
  const auto planned = std::find(plan_.begin(), plan_.end(), victim);
  if (planned != plan_.end()) {
    // A decode planned before a better request's prefill ran out of blocks.
    budget_left_ += victim->length - victim->computed;
    plan_.erase(planned);
  }
  swaps_.Evict(victim, /*may_swap=*/true);
  queue_->Return(victim);
  ++preemptions_;
  preempted_ = true;
}

int64_t StepPlanner::PreemptFor(int64_t blocks) {
  blocks -= swaps_.coming_blocks();
  int64_t given_up = 0;
  while (given_up < blocks && queue_->running().size() > 1) {
    TrackedRequest* const victim = queue_->victim();
    given_up += Blocks(victim->length);
    Preempt(victim);
  }
  return given_up;
}

int64_t StepPlanner::ChunkOf(const TrackedRequest& request) const {
  int64_t chunk = std::min(request.outstanding(), budget_left_);
  if (options_.max_chunk > 0) chunk = std::min(chunk, options_.max_chunk);
  return chunk;
}

int64_t StepPlanner::OwnedBlocks() const {
  int64_t blocks = 0;
  for (const TrackedRequest* request : queue_->running()) {
    blocks += Blocks(request->length);
  }
  return blocks;
}

int64_t StepPlanner::CatchUpBlocks() const {
  int64_t blocks = 0;
  for (const TrackedRequest* request : queue_->running()) {
    blocks += Blocks(request->known()) - Blocks(request->length);
  }
  return blocks;
}

// Nobody is left to preempt, yet `request` cannot have a block. Submit promised
// that it fits the whole pool, so either somebody else holds blocks, which the
// caller can cure and try again, or the books are wrong.
Status StepPlanner::Stuck(const TrackedRequest& request) const {
  const KvTenantStats tenant = pool_->tenant_stats(request.request.tenant);
  VARLANE_REQUIRE(
      tenant.quota_blocks < 0 ||
          Blocks(request.known()) <= tenant.quota_blocks - tenant.used_blocks,
      StatusCode::kResourceExhausted, "request ", request.request.id,
      " cannot go on: sequences that are not the scheduler's hold ",
      tenant.used_blocks, " of the ", tenant.quota_blocks,
      " blocks that tenant ", request.request.tenant, " may have");
  const int64_t capacity = pool_->capacity_blocks();
  const int64_t foreign = capacity - pool_->free_blocks() - OwnedBlocks();
  VARLANE_REQUIRE(foreign <= 0, StatusCode::kResourceExhausted, "request ",
                  request.request.id, " cannot go on: ", foreign, " of ",
                  capacity,
                  " blocks are held by sequences that are not the scheduler's, "
                  "or pinned");
  return Status(
      StatusCode::kInternal,
      StrCat("request ", request.request.id, " with ", request.known(),
             " tokens cannot go on, though it is "
             "alone in a pool of ",
             capacity, " blocks"));
}

}  // namespace varlane
