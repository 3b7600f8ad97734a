// KvPool::Impl: its size - growing, shrinking, limits - and moving blocks.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <numeric>

#include "base/check.h"
#include "base/math.h"
#include "base/strings.h"
#include "memory/kv_pool_impl.h"

namespace varlane {
namespace {

int64_t Sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// Adds `amount` (or takes -amount away) so that the parts end as even as can
// be, none above `most`. Requires: there is that much.
void AddEvenly(int64_t amount, int64_t most, std::span<int64_t> parts) {
  const auto count = static_cast<int64_t>(parts.size());
  while (amount != 0) {
    // The emptiest (fullest) part goes up (down) to the next one's level.
    const bool grows = amount > 0;
    auto chosen = grows ? std::min_element(parts.begin(), parts.end())
                        : std::max_element(parts.begin(), parts.end());
    int64_t gap = grows ? most - *chosen : *chosen;
    for (const int64_t part : parts) {
      const int64_t distance = grows ? part - *chosen : *chosen - part;
      if (distance > 0) gap = std::min(gap, distance);
    }
    const int64_t wanted = grows ? amount : -amount;
    const int64_t share = std::max<int64_t>(1, wanted / count);
    const int64_t step = std::min({wanted, gap, share});
    if (step <= 0) return;
    *chosen += grows ? step : -step;
    amount += grows ? -step : step;
  }
}

}  // namespace

// --- the public operations ---------------------------------------------------

Status KvPool::Impl::Grow(int64_t num_blocks) try {
  VARLANE_REQUIRE_ARG(num_blocks >= 0, "num_blocks = ", num_blocks,
                      ", must not be negative");
  const std::lock_guard resize(resize_mutex_);
  const int64_t capacity = allocator_.capacity();
  VARLANE_REQUIRE(num_blocks <= max_blocks_ - capacity, StatusCode::kOutOfRange,
                  "num_blocks = ", num_blocks, ", but the pool has ", capacity,
                  " of max_blocks = ", max_blocks_);
  std::vector<int64_t> targets(static_cast<size_t>(num_nodes()));
  int64_t bytes = 0;
  for (int node = 0; node < num_nodes(); ++node) {
    targets[static_cast<size_t>(node)] = allocator_.capacity(node);
  }
  AddEvenly(num_blocks, allocator_.blocks_per_node(), targets);
  for (const int64_t target : targets) bytes += memory_->SlabBytesOf(target);
  VARLANE_REQUIRE(num_blocks == 0 || bytes <= limit_bytes_,
                  StatusCode::kResourceExhausted, "num_blocks = ", num_blocks,
                  " more need ", FormatBytes(bytes),
                  " in all, but the pool's limit is ",
                  FormatBytes(limit_bytes_), ": raise it with SetLimit");
  if (num_blocks > 0) VARLANE_RETURN_IF_ERROR(CheckGrowthIsAllowed());
  KvResize report;
  VARLANE_RETURN_IF_ERROR(GrowTo(targets, &report));
  lent_blocks_.store(0, std::memory_order_relaxed);
  return {};
} catch (const std::bad_alloc&) {
  return NoHeapFor("growing the pool");
}

Result<KvResize> KvPool::Impl::Shrink(int64_t num_blocks) try {
  const std::lock_guard resize(resize_mutex_);
  const int64_t capacity = allocator_.capacity();
  VARLANE_REQUIRE_ARG(num_blocks >= 0 && num_blocks <= capacity,
                      "num_blocks = ", num_blocks, ", must be in [0, ",
                      capacity, "]");
  std::vector<int64_t> targets(static_cast<size_t>(num_nodes()));
  for (int node = 0; node < num_nodes(); ++node) {
    targets[static_cast<size_t>(node)] = allocator_.capacity(node);
  }
  AddEvenly(-num_blocks, allocator_.blocks_per_node(), targets);
  KvResize report;
  VARLANE_RETURN_IF_ERROR(ShrinkTo(targets, &report));
  lent_blocks_.store(0, std::memory_order_relaxed);
  Finish(&report);
  return report;
} catch (const std::bad_alloc&) {
  return NoHeapFor("shrinking the pool");
}

Result<KvResize> KvPool::Impl::SetLimit(int64_t bytes) try {
  VARLANE_REQUIRE_ARG(bytes >= 0, "bytes = ", bytes, ", must not be negative");
  const std::lock_guard resize(resize_mutex_);
  std::vector<int64_t> targets(static_cast<size_t>(num_nodes()));
  memory_->BlocksIn(bytes, targets);
  for (int node = 0; node < num_nodes(); ++node) {
    if (targets[static_cast<size_t>(node)] <= allocator_.capacity(node)) {
      continue;
    }
    VARLANE_RETURN_IF_ERROR(CheckGrowthIsAllowed());
  }
  KvResize report;
  VARLANE_RETURN_IF_ERROR(ResizeTo(targets, &report));
  lent_blocks_.store(0, std::memory_order_relaxed);
  limit_bytes_ = bytes;
  {
    const SequenceTable::AllLocked all(sequences_);
    published_limit_ = bytes;
  }
  Finish(&report);
  return report;
} catch (const std::bad_alloc&) {
  return NoHeapFor("resizing the pool");
}

Result<KvResize> KvPool::Impl::Compact(int64_t max_moves) try {
  VARLANE_REQUIRE_ARG(max_moves >= 0, "max_moves = ", max_moves,
                      ", must not be negative");
  const std::lock_guard resize(resize_mutex_);
  KvResize report;
  {
    const SequenceTable::AllLocked all(sequences_);
    VARLANE_REQUIRE(outstanding_steps_ == 0, StatusCode::kFailedPrecondition,
                    "blocks cannot move: ", outstanding_steps_,
                    " steps are outstanding (BeginStep)");
    // Down to the slab in which the node's last block would stand if all stood
    // in front: moving more empties none.
    std::vector<int64_t> targets(static_cast<size_t>(num_nodes()));
    for (int node = 0; node < num_nodes(); ++node) {
      const BlockCounts counts = allocator_.counts(node);
      const int64_t bytes = memory_->SlabBytesOf(counts.capacity - counts.free);
      targets[static_cast<size_t>(node)] =
          std::min(counts.capacity, bytes / block_bytes_);
    }
    std::vector<BlockMove> moves;
    const bool fits = PlanMoves(allocator_, targets, max_moves, &moves);
    VARLANE_ENSURE(fits, "a pool has no room for its own blocks");
    const BlockRenames renames(moves);
    MoveBlocks(moves, renames);
    report.moved_blocks = std::ssize(moves);
  }
  Finish(&report);
  return report;
} catch (const std::bad_alloc&) {
  return NoHeapFor("compacting the pool");
}

int64_t KvPool::Impl::MinLimitBytes() const {
  const SequenceTable::AllLocked all(sequences_);
  return LimitFor(NeededBlocks());
}

int64_t KvPool::Impl::EvictCached(int64_t num_blocks) {
  if (prefixes_ == nullptr) return 0;
  std::array<BlockId, 64> evicted;
  int64_t total = 0;
  while (total < num_blocks) {
    const int64_t wanted =
        std::min(num_blocks - total, static_cast<int64_t>(evicted.size()));
    const std::span<BlockId> room(evicted.data(), static_cast<size_t>(wanted));
    const int64_t count = prefixes_->Evict(room);
    FreeOwnerless(room.first(static_cast<size_t>(count)));
    total += count;
    if (count < wanted) break;
  }
  evicted_blocks_.Add(total);
  return total;
}

void KvPool::Impl::BeginStep() {
  const std::lock_guard lock(sequences_.groups()[0].mutex);
  ++outstanding_steps_;
}

void KvPool::Impl::EndStep() {
  const std::lock_guard lock(sequences_.groups()[0].mutex);
  VARLANE_DCHECK(outstanding_steps_ > 0);
  if (outstanding_steps_ > 0) --outstanding_steps_;
}

// --- arithmetic --------------------------------------------------------------

int64_t KvPool::Impl::NeededBlocks() const {
  const BlockCounts counts = allocator_.counts();
  return counts.capacity - counts.free - evictable_blocks();
}

// The smallest limit whose slabs hold so many blocks.
int64_t KvPool::Impl::LimitFor(int64_t num_blocks) const {
  const int64_t slab_bytes = memory_->stats().slab_bytes;
  int64_t bytes = RoundUp(num_blocks * block_bytes_, slab_bytes);
  for (;; bytes += slab_bytes) {
    if (memory_->BlocksIn(bytes) >= num_blocks ||
        bytes >= memory_->stats().reserved_bytes) {
      return bytes;
    }
  }
}

void KvPool::Impl::Finish(KvResize* report) const {
  report->capacity_blocks = allocator_.capacity();
  report->committed_bytes = memory_->stats().committed_bytes;
}

// --- growing -----------------------------------------------------------------

void KvPool::Impl::PublishMemory() {
  memory_stats_ = memory_->stats();
  for (int node = 0; node < num_nodes(); ++node) {
    published_node_bytes_[static_cast<size_t>(node)] =
        memory_->committed_bytes(node);
  }
}

// Nodes at or above their target stay what they are.
Status KvPool::Impl::GrowTo(std::span<const int64_t> targets,
                            KvResize* report) {
  const int64_t before = memory_->stats().committed_bytes;
  std::vector<int64_t> wanted(targets.begin(), targets.end());
  for (int node = 0; node < num_nodes(); ++node) {
    int64_t& blocks = wanted[static_cast<size_t>(node)];
    blocks = std::max(blocks, allocator_.capacity(node));
  }
  VARLANE_RETURN_IF_ERROR(memory_->Commit(wanted));
  const SequenceTable::AllLocked all(sequences_);
  for (int node = 0; node < num_nodes(); ++node) {
    const int64_t more =
        wanted[static_cast<size_t>(node)] - allocator_.capacity(node);
    VARLANE_ENSURE(allocator_.Grow(node, more), "the allocator cannot grow by ",
                   more, " blocks");
  }
  PublishMemory();
  report->regained_bytes += memory_->stats().committed_bytes - before;
  return {};
}

// Shrinks first, so that the limit is not passed on the way.
Status KvPool::Impl::ResizeTo(std::span<const int64_t> targets,
                              KvResize* report) {
  std::vector<int64_t> before(targets.size());
  std::vector<int64_t> lower(targets.begin(), targets.end());
  for (int node = 0; node < num_nodes(); ++node) {
    const auto at = static_cast<size_t>(node);
    before[at] = allocator_.capacity(node);
    lower[at] = std::min(lower[at], before[at]);
  }
  const bool shrinks = lower != before;
  const bool grows = !std::equal(targets.begin(), targets.end(), lower.begin());
  if (shrinks) VARLANE_RETURN_IF_ERROR(ShrinkTo(lower, report));
  // A shrink is complete by itself: nothing may fail any more.
  if (!grows) return {};
  const auto grow_to = [&](std::span<const int64_t> blocks) -> Status {
    try {
      return GrowTo(blocks, report);
    } catch (const std::bad_alloc&) {
      return NoHeapFor("growing the pool");
    }
  };
  const Status grown = grow_to(targets);
  // Where some nodes shrink and others grow: what was given back moments ago is
  // there, if nobody else took it.
  if (!grown.ok() && shrinks) (void)grow_to(before);
  return grown;
}

// --- shrinking ---------------------------------------------------------------

Status KvPool::Impl::CheckRoomFor(std::span<const int64_t> targets) const {
  const int64_t room = Sum(targets);
  const int64_t needed = NeededBlocks();
  if (needed > room) {
    const int64_t bytes = LimitFor(needed);
    return {StatusCode::kResourceExhausted,
            MessageCat("the pool cannot shrink to ", room,
                       " blocks: sequences hold ", needed, ", so ",
                       FormatBytes(bytes), " (", bytes,
                       " bytes) is the least that is possible now")};
  }
  if (outstanding_steps_ == 0) return {};
  for (int node = 0; node < num_nodes(); ++node) {
    const BlockId first = allocator_.FirstBlockOf(node);
    for (int64_t i = targets[static_cast<size_t>(node)];
         i < allocator_.capacity(node); ++i) {
      const auto block = static_cast<BlockId>(first + i);
      VARLANE_REQUIRE(allocator_.reference_count(block) == 0,
                      StatusCode::kFailedPrecondition, "block ", block,
                      " would have to move, but ", outstanding_steps_,
                      " steps are outstanding (BeginStep)");
    }
  }
  return {};
}

// Makes sure that the blocks fit, evicts cached ones until they do, and says
// what has to move. Fails before anything has changed, or for want of heap,
// when only cached blocks are gone.
Status KvPool::Impl::PlanShrink(std::span<const int64_t> targets,
                                KvResize* report,
                                std::vector<BlockMove>* moves) {
  VARLANE_RETURN_IF_ERROR(CheckRoomFor(targets));
  const BlockCounts counts = allocator_.counts();
  const int64_t excess = counts.capacity - counts.free - Sum(targets);
  if (excess > 0) report->evicted_blocks += EvictCached(excess);
  const bool fits = PlanMoves(allocator_, targets,
                              std::numeric_limits<int64_t>::max(), moves);
  VARLANE_REQUIRE(fits, StatusCode::kResourceExhausted,
                  "the pool cannot shrink to ", Sum(targets),
                  " blocks: too few cached ones could be evicted");
  return {};
}

// Nodes at or below their target stay what they are. Sequences are shut out
// while blocks move and the new capacity is published, not while the memory is
// given back.
Status KvPool::Impl::ShrinkTo(std::span<const int64_t> targets,
                              KvResize* report) {
  std::vector<int64_t> before(targets.size());
  {
    const SequenceTable::AllLocked all(sequences_);
    std::vector<BlockMove> moves;
    VARLANE_RETURN_IF_ERROR(PlanShrink(targets, report, &moves));
    const BlockRenames renames(moves);
    // From here on nothing fails.
    MoveBlocks(moves, renames);
    report->moved_blocks += std::ssize(moves);
    for (int node = 0; node < num_nodes(); ++node) {
      const auto at = static_cast<size_t>(node);
      before[at] = allocator_.capacity(node);
      const int64_t fewer = before[at] - targets[at];
      const bool shrunk = allocator_.Shrink(node, fewer);
      VARLANE_DCHECK(shrunk);
      (void)shrunk;
      const int64_t first = allocator_.FirstBlockOf(node) + targets[at];
      AllowBlocks(static_cast<BlockId>(first), fewer);
    }
    generation_.fetch_add(1, std::memory_order_release);
  }
  const int64_t committed = memory_->stats().committed_bytes;
  const Status released = memory_->Release(targets);
  const SequenceTable::AllLocked all(sequences_);
  PublishMemory();
  report->released_bytes += committed - memory_->stats().committed_bytes;
  if (released.ok()) return {};
  // The blocks come back, as far as their memory did.
  for (int node = 0; node < num_nodes(); ++node) {
    const int64_t there = std::min(memory_->committed_blocks(node),
                                   before[static_cast<size_t>(node)]);
    (void)allocator_.Grow(
        node, std::max<int64_t>(0, there - allocator_.capacity(node)));
  }
  return released;
}

// --- moving ------------------------------------------------------------------

void KvPool::Impl::MoveBlocks(std::span<const BlockMove> moves,
                              const BlockRenames& renames) {
  if (moves.empty()) return;
  for (const auto& [from, to] : moves) {
    AllowBlocks(to, 1);
    CopyBlock(from, to);
    charged_to_[static_cast<size_t>(to)] =
        charged_to_[static_cast<size_t>(from)];
    const bool moved = allocator_.Move(from, to);
    VARLANE_DCHECK(moved);
    (void)moved;
    ForbidBlock(from);
    if (prefixes_ != nullptr) prefixes_->Move(from, to);
  }
  for (SequenceTable::Group& group : sequences_.groups()) {
    for (auto& [seq, sequence] : group.sequences) {
      for (BlockId& block : sequence.table.mutable_blocks()) {
        block = renames(block);
      }
    }
  }
  generation_.fetch_add(1, std::memory_order_release);
  compactions_.fetch_add(1, std::memory_order_relaxed);
  moved_blocks_.fetch_add(std::ssize(moves), std::memory_order_relaxed);
}

}  // namespace varlane
