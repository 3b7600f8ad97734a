// BlockAllocator: which blocks are free, and how often each other one is
// referenced.
//
// Ids and counts only: no pointers, no bytes. It hands out the lowest free id
// (which keeps the pool's used part dense, so that whole slabs stay unused at
// its end), or follows a seeded random order. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_ALLOCATOR_H_
#define VARLANE_MEMORY_BLOCK_ALLOCATOR_H_

#include <cstdint>
#include <vector>

#include "memory/free_set.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane {

inline constexpr BlockId kNoBlock = -1;

// What a Release did.
enum class Released : uint8_t {
  kShared,  // others still reference the block
  kFreed,   // it was the last reference
  kError,   // not a referenced block (double free, foreign id): nothing changed
};

// Threads: not synchronised; the owner locks (KvPool does).
// Cost:    allocate, reference and release are O(1): at most six words are
//          looked at, for any capacity. Nothing allocates after construction.
class BlockAllocator {
 public:
  // Capacity 0; can grow to `max_blocks`. May throw std::bad_alloc.
  // Requires: 0 <= max_blocks <= INT32_MAX.
  explicit BlockAllocator(int64_t max_blocks);
  // Same, but hands blocks out in a random order that `seed` determines, on
  // every machine alike.
  BlockAllocator(int64_t max_blocks, uint64_t seed);

  // Adds free blocks [capacity, capacity + num_blocks). False, and nothing
  // changed, where that passes max_blocks.
  bool Grow(int64_t num_blocks) noexcept;

  // A block with one reference, or kNoBlock when none is free.
  BlockId Allocate() noexcept;
  // One more reference to a referenced block. False, and nothing changed, for
  // any other id (traps in debug) and at the count's limit.
  bool Reference(BlockId block) noexcept;
  // One reference less. kError traps in debug.
  Released Release(BlockId block) noexcept;

  // 0 for a free block and for an id that is none.
  int32_t reference_count(BlockId block) const noexcept {
    return IsBlock(block) ? counts_[static_cast<size_t>(block)] : 0;
  }
  bool is_shared(BlockId block) const noexcept {
    return reference_count(block) > 1;
  }

  int64_t max_blocks() const noexcept { return max_blocks_; }
  int64_t capacity() const noexcept {
    return static_cast<int64_t>(counts_.size());
  }
  int64_t free_blocks() const noexcept { return capacity() - referenced_; }
  int64_t referenced_blocks() const noexcept { return referenced_; }
  int64_t references() const noexcept { return references_; }

  // Walks everything: each block is either free or referenced, and the totals
  // are what the blocks add up to. Errors: kInternal naming the first
  // contradiction. Cost: O(max_blocks).
  Status CheckInvariants() const;

 private:
  BlockAllocator(int64_t max_blocks, bool shuffle, uint64_t seed);

  bool IsBlock(BlockId block) const noexcept {
    return block >= 0 && block < capacity();
  }
  // Where the block stands in the order of handing out, and back.
  int64_t PositionOf(BlockId block) const noexcept {
    return shuffle_ ? position_of_[static_cast<size_t>(block)] : block;
  }
  BlockId BlockAt(int64_t position) const noexcept {
    return shuffle_ ? block_at_[static_cast<size_t>(position)]
                    : static_cast<BlockId>(position);
  }
  uint64_t NextRandom(uint64_t bound) noexcept;  // [0, bound)

  int64_t max_blocks_;
  bool shuffle_;
  uint64_t random_state_;
  int64_t referenced_ = 0;       // blocks with a count above 0
  int64_t references_ = 0;       // sum of the counts
  FreeSet free_;                 // of positions
  std::vector<int32_t> counts_;  // [capacity]
  // Permutation of [0, capacity) and its inverse; empty unless shuffled.
  std::vector<BlockId> block_at_;
  std::vector<BlockId> position_of_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_ALLOCATOR_H_
