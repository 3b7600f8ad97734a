// Which blocks to move where, so that the end of each node's blocks is free.
//
// Pure arithmetic over a BlockAllocator; nothing is moved here. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_MOVES_H_
#define VARLANE_MEMORY_BLOCK_MOVES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "memory/block_allocator.h"

namespace varlane {

struct BlockMove {
  BlockId from = kNoBlock;
  BlockId to = kNoBlock;
};

// A move for each block that is not free and stands at its node's `targets[n]`
// or behind (counted from the node's first block), to a free block before: of
// the same node while there are any, else of another. The last blocks come
// first; at most `max_moves`. False where there are not enough free blocks.
//
// Requires: targets [num_nodes], none above the node's capacity; nobody else
//           uses the allocator. Throws std::bad_alloc. O(capacity).
bool PlanMoves(const BlockAllocator& allocator,
               std::span<const int64_t> targets, int64_t max_moves,
               std::vector<BlockMove>* moves);

// Where blocks went: an array over the ids that moved.
class BlockRenames {
 public:
  // Throws std::bad_alloc.
  explicit BlockRenames(std::span<const BlockMove> moves);
  // The block's new id; itself where it stayed.
  BlockId operator()(BlockId block) const noexcept {
    const int64_t index = int64_t{block} - first_;
    if (index < 0 || index >= static_cast<int64_t>(to_.size())) return block;
    const BlockId to = to_[static_cast<size_t>(index)];
    return to == kNoBlock ? block : to;
  }

 private:
  int64_t first_ = 0;
  std::vector<BlockId> to_;  // [ids from the first to the last that moved]
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_MOVES_H_
