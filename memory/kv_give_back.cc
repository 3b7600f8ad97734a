// KvPool::Impl: memory that goes back to the system for a while, and returns.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <new>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "memory/kv_pool_impl.h"

namespace varlane {
namespace {

// How often a plan is made anew because sequences took blocks in between.
constexpr int kPlanAttempts = 4;

// A smaller pool may fit again by then.
bool IsWorthAnotherPlan(const Status& status) {
  return status.code() == StatusCode::kResourceExhausted ||
         status.code() == StatusCode::kFailedPrecondition;
}

}  // namespace

// A step that is outstanding while it lives; none for null.
class KvPool::Impl::OwnStep {
 public:
  explicit OwnStep(Impl* pool) : pool_(pool) {
    if (pool_ != nullptr) pool_->BeginStep();
  }
  ~OwnStep() {
    if (pool_ != nullptr) pool_->EndStep();
  }
  OwnStep(const OwnStep&) = delete;
  OwnStep& operator=(const OwnStep&) = delete;

 private:
  Impl* const pool_;
};

// How many blocks each node keeps. All groups are locked.
std::vector<int64_t> KvPool::Impl::PlanGiveBack(
    const GiveBackOptions& options) const {
  const int64_t slab_bytes = memory_->stats().slab_bytes;
  const auto nodes = static_cast<size_t>(num_nodes());
  std::vector<int64_t> blocks(nodes);
  std::vector<int64_t> least(nodes);  // what stands in front of it must stay
  std::vector<int64_t> bytes(nodes);
  int64_t total = 0;
  for (size_t i = 0; i < nodes; ++i) {
    const int node = static_cast<int>(i);
    blocks[i] = allocator_.capacity(node);
    bytes[i] = memory_->committed_bytes(node);
    total += blocks[i];
    if (options.move_blocks) continue;
    const BlockId first = allocator_.FirstBlockOf(node);
    least[i] = blocks[i];
    while (least[i] > 0 && allocator_.reference_count(static_cast<BlockId>(
                               first + least[i] - 1)) == 0) {
      --least[i];
    }
  }
  const int64_t needed = std::max(options.keep_blocks, NeededBlocks());
  // A slab at a time, of the largest node that can spare one.
  for (int64_t released = 0; released < options.bytes;) {
    size_t chosen = nodes;
    int64_t fewer = 0;
    for (size_t i = 0; i < nodes; ++i) {
      if (bytes[i] == 0 || (chosen < nodes && bytes[i] <= bytes[chosen])) {
        continue;
      }
      const int64_t left = RoundUp(bytes[i], slab_bytes) - slab_bytes;
      const int64_t kept = std::min(blocks[i], left / block_bytes_);
      if (kept < least[i] || total - (blocks[i] - kept) < needed) continue;
      chosen = i;
      fewer = blocks[i] - kept;
    }
    if (chosen == nodes) break;
    const int64_t left = RoundUp(bytes[chosen], slab_bytes) - slab_bytes;
    released += bytes[chosen] - left;
    bytes[chosen] = left;
    blocks[chosen] -= fewer;
    total -= fewer;
  }
  return blocks;
}

Result<KvResize> KvPool::Impl::GiveBack(const GiveBackOptions& options) try {
  VARLANE_REQUIRE_ARG(options.bytes >= 0, "bytes = ", options.bytes,
                      ", must not be negative");
  VARLANE_REQUIRE_ARG(options.keep_blocks >= 0,
                      "keep_blocks = ", options.keep_blocks,
                      ", must not be negative");
  const std::lock_guard resize(resize_mutex_);
  // A step of our own: whoever shrinks keeps its hands off referenced blocks.
  const OwnStep step(options.move_blocks ? nullptr : this);
  KvResize report;
  Status status;
  for (int attempt = 0; attempt < kPlanAttempts; ++attempt) {
    std::vector<int64_t> targets;
    {
      const SequenceTable::AllLocked all(sequences_);
      VARLANE_REQUIRE(!options.move_blocks || outstanding_steps_ == 0,
                      StatusCode::kFailedPrecondition,
                      "blocks cannot move: ", outstanding_steps_,
                      " steps are outstanding (BeginStep)");
      targets = PlanGiveBack(options);
    }
    const int64_t before = allocator_.capacity();
    status = ShrinkTo(targets, &report);
    lent_blocks_.fetch_add(before - allocator_.capacity(),
                           std::memory_order_relaxed);
    if (!IsWorthAnotherPlan(status)) break;
  }
  VARLANE_RETURN_IF_ERROR(status);
  Finish(&report);
  return report;
} catch (const std::bad_alloc&) {
  return NoHeapFor("giving memory back");
}

Result<KvResize> KvPool::Impl::TakeBack(int64_t bytes) try {
  VARLANE_REQUIRE_ARG(bytes >= 0, "bytes = ", bytes, ", must not be negative");
  const std::lock_guard resize(resize_mutex_);
  VARLANE_RETURN_IF_ERROR(CheckGrowthIsAllowed());
  const int64_t slab_bytes = memory_->stats().slab_bytes;
  int64_t lent = lent_blocks();
  std::vector<int64_t> targets(static_cast<size_t>(num_nodes()));
  for (int node = 0; node < num_nodes(); ++node) {
    targets[static_cast<size_t>(node)] = allocator_.capacity(node);
  }
  // A slab at a time, to the smallest node that has room for one.
  for (int64_t left = bytes; left >= slab_bytes && lent > 0;) {
    int64_t* const least = &*std::min_element(targets.begin(), targets.end());
    const int64_t after = memory_->SlabBytesOf(*least) + slab_bytes;
    const int64_t more = std::min({lent, allocator_.blocks_per_node() - *least,
                                   after / block_bytes_ - *least});
    if (more <= 0) break;
    *least += more;
    lent -= more;
    left -= slab_bytes;
  }
  KvResize report;
  const int64_t before = allocator_.capacity();
  VARLANE_RETURN_IF_ERROR(GrowTo(targets, &report));
  lent_blocks_.fetch_sub(allocator_.capacity() - before,
                         std::memory_order_relaxed);
  Finish(&report);
  return report;
} catch (const std::bad_alloc&) {
  return NoHeapFor("taking memory back");
}

Status KvPool::Impl::CheckGrowthIsAllowed() const {
  VARLANE_REQUIRE(growth_.load(std::memory_order_relaxed),
                  StatusCode::kUnavailable,
                  "the pool must not grow now: memory is short (AllowGrowth)");
  return {};
}

}  // namespace varlane
