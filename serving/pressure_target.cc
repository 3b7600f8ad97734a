// ServingPressureTarget: the ladder's steps over a KvPool and its Scheduler.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "base/math.h"
#include "varlane/serving_pressure.h"

namespace varlane {

ServingPressureTarget::ServingPressureTarget(KvPool* pool, Scheduler* scheduler,
                                             int64_t keep_blocks)
    : pool_(pool), scheduler_(scheduler), keep_blocks_(keep_blocks) {}

void ServingPressureTarget::SetGrowth(bool allowed) {
  pool_->AllowGrowth(allowed);
}

int64_t ServingPressureTarget::KeptBlocks() const {
  return scheduler_ == nullptr
             ? keep_blocks_
             : std::max(keep_blocks_, scheduler_->LeastBlocks());
}

int64_t ServingPressureTarget::GiveBack(int64_t bytes, bool move_blocks) {
  GiveBackOptions options = {
      .bytes = bytes, .keep_blocks = KeptBlocks(), .move_blocks = move_blocks};
  Result<KvResize> given = pool_->GiveBack(options);
  // A swapper reads blocks just now: what needs no move can go all the same.
  if (given.status().code() == StatusCode::kFailedPrecondition) {
    options.move_blocks = false;
    given = pool_->GiveBack(options);
  }
  return given.ok() ? given->released_bytes : 0;
}

int64_t ServingPressureTarget::DropCached(int64_t bytes) {
  return GiveBack(bytes, /*move_blocks=*/false);
}

int64_t ServingPressureTarget::Compact(int64_t bytes) {
  return GiveBack(bytes, /*move_blocks=*/true);
}

// Only slabs go back: enough for whole ones, and nobody is sent back for blocks
// that have to stay anyway.
int64_t ServingPressureTarget::Preempt(int64_t bytes) {
  const KvPoolStats stats = pool_->stats();
  const int64_t wanted =
      DivCeil(RoundUp(bytes, stats.slab_bytes), pool_->layout().block_bytes());
  const int64_t spare = stats.capacity_blocks - KeptBlocks();
  const int64_t missing = std::min(wanted, spare) - pool_->free_blocks();
  if (missing > 0 && scheduler_ != nullptr) (void)scheduler_->Preempt(missing);
  return GiveBack(bytes, /*move_blocks=*/true);
}

void ServingPressureTarget::SetAdmission(bool allowed) {
  if (scheduler_ != nullptr) scheduler_->TakeWork(allowed);
}

int64_t ServingPressureTarget::Regrow(int64_t bytes) {
  const Result<KvResize> taken = pool_->TakeBack(bytes);
  return taken.ok() ? taken->regained_bytes : 0;
}

}  // namespace varlane
