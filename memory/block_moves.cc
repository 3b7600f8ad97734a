// SPDX-License-Identifier: Apache-2.0

#include "memory/block_moves.h"

#include <algorithm>

namespace varlane {
namespace {

// Walks the free blocks of a node before its target, the lowest first.
class FreeBlocks {
 public:
  FreeBlocks(const BlockAllocator& allocator, int node, int64_t target)
      : allocator_(&allocator),
        next_(allocator.FirstBlockOf(node)),
        end_(static_cast<BlockId>(next_ + target)) {}

  BlockId Next() {
    while (next_ < end_ && allocator_->state(next_) != BlockState::kFree) {
      ++next_;
    }
    return next_ < end_ ? next_++ : kNoBlock;
  }

 private:
  const BlockAllocator* allocator_;
  BlockId next_;
  BlockId end_;
};

}  // namespace

bool PlanMoves(const BlockAllocator& allocator,
               std::span<const int64_t> targets, int64_t max_moves,
               std::vector<BlockMove>* moves) {
  moves->clear();
  std::vector<FreeBlocks> places;
  for (int node = 0; node < allocator.num_nodes(); ++node) {
    places.emplace_back(allocator, node, targets[static_cast<size_t>(node)]);
  }
  std::vector<BlockId> homeless;  // for which their own node has no place
  for (int node = 0; node < allocator.num_nodes(); ++node) {
    const BlockId first = allocator.FirstBlockOf(node);
    const int64_t target = targets[static_cast<size_t>(node)];
    for (int64_t i = allocator.capacity(node); i-- > target;) {
      const auto from = static_cast<BlockId>(first + i);
      if (allocator.state(from) == BlockState::kFree) continue;
      if (std::ssize(*moves) == max_moves) return true;
      const BlockId to = places[static_cast<size_t>(node)].Next();
      if (to == kNoBlock) {
        homeless.push_back(from);
      } else {
        moves->push_back({from, to});
      }
    }
  }
  size_t node = 0;
  for (const BlockId from : homeless) {
    BlockId to = kNoBlock;
    while (to == kNoBlock && node < places.size()) {
      to = places[node].Next();
      if (to == kNoBlock) ++node;
    }
    if (to == kNoBlock) return false;
    if (std::ssize(*moves) < max_moves) moves->push_back({from, to});
  }
  return true;
}

BlockRenames::BlockRenames(std::span<const BlockMove> moves) {
  if (moves.empty()) return;
  const auto [first, last] = std::minmax_element(
      moves.begin(), moves.end(),
      [](const BlockMove& a, const BlockMove& b) { return a.from < b.from; });
  first_ = first->from;
  to_.assign(static_cast<size_t>(last->from - first_ + 1), kNoBlock);
  for (const BlockMove& move : moves) {
    to_[static_cast<size_t>(move.from - first_)] = move.to;
  }
}

}  // namespace varlane
