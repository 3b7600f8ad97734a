// SPDX-License-Identifier: Apache-2.0

#include "serving/request_swaps.h"

#include <utility>

#include "base/math.h"

namespace varlane {

void RequestSwaps::Evict(TrackedRequest* victim, bool may_swap) {
  if (victim->loading) swapper_->CancelSwapIn(victim->swap);
  if (victim->loading && swapper_->state(victim->swap) == SwapState::kStored) {
    victim->loading = false;
  } else {
    (void)Settle(victim);  // it was read, or lost, in the meantime
    if (may_swap && TryOut(victim)) victim->sequence = kNoSequence;
  }
  if (victim->sequence != kNoSequence) {
    (void)pool_->Free(std::exchange(victim->sequence, kNoSequence));
  }
  victim->computed = 0;
  victim->committed = 0;
  victim->length = 0;
}

// True: the swapper has the sequence.
bool RequestSwaps::TryOut(TrackedRequest* victim) {
  if (swapper_ == nullptr || policy_ == EvictionPolicy::kRecompute ||
      victim->computed == 0) {
    return false;
  }
  const KvLayout& layout = pool_->layout();
  const SwapStats stats = swapper_->stats();
  EvictionCosts costs;
  costs.tokens = victim->computed;
  costs.bytes = DivCeil<int64_t>(victim->computed, layout.block_size) *
                layout.block_bytes();
  costs.free_swap_bytes = swapper_->free_bytes();
  if (policy_ == EvictionPolicy::kByCost) {  // else: whatever it costs
    costs.write_bytes_per_s = stats.write_bytes_per_s;
    costs.read_bytes_per_s = stats.read_bytes_per_s;
    costs.prefill_tokens_per_s = prefill_rate_.per_second();
  }
  if (ChooseEviction(costs) != Eviction::kSwap) return false;
  // Room for a step that will not be.
  (void)pool_->Truncate(victim->sequence, victim->computed);
  const Result<SwapId> swap = swapper_->SwapOut(victim->sequence);
  if (!swap.ok()) return false;
  victim->swap = *swap;
  victim->stored = victim->computed;
  ++outs_;
  return true;
}

void RequestSwaps::Forget(TrackedRequest* request) {
  if (request->swap == kNoSwap) return;
  swapper_->Drop(std::exchange(request->swap, kNoSwap));
  request->stored = 0;
  request->loading = false;
}

RequestSwaps::Resume RequestSwaps::ResumeOf(TrackedRequest* request) {
  if (request->swap == kNoSwap) return Resume::kRecompute;
  switch (swapper_->state(request->swap)) {
    case SwapState::kStored:
      return Resume::kReadBack;
    case SwapState::kWriting:
      return Resume::kNotYet;
    default:
      ++losses_;
      Forget(request);
      return Resume::kRecompute;
  }
}

bool RequestSwaps::ReadBack(TrackedRequest* request) {
  if (swapper_->SwapIn(request->swap, request->sequence).ok()) {
    request->loading = true;
    return true;
  }
  ++losses_;
  Forget(request);
  return false;
}

bool RequestSwaps::Settle(TrackedRequest* request) {
  if (!request->loading) return true;
  const SwapState state = swapper_->state(request->swap);
  if (state == SwapState::kReading) return false;
  request->computed = 0;
  if (state == SwapState::kLoaded) {
    ++ins_;
    request->computed = request->stored;
  } else {
    ++losses_;
    (void)pool_->Truncate(request->sequence, 0);
  }
  request->length = request->computed;
  Forget(request);
  return true;
}

}  // namespace varlane
