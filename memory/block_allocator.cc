// SPDX-License-Identifier: Apache-2.0

#include "memory/block_allocator.h"

#include <limits>
#include <utility>

#include "base/check.h"

namespace varlane {

BlockAllocator::BlockAllocator(int64_t max_blocks)
    : BlockAllocator(max_blocks, false, 0) {}

BlockAllocator::BlockAllocator(int64_t max_blocks, uint64_t seed)
    : BlockAllocator(max_blocks, true, seed) {}

// Everything is reserved here so that Grow cannot fail half way.
BlockAllocator::BlockAllocator(int64_t max_blocks, bool shuffle, uint64_t seed)
    : max_blocks_(max_blocks),
      shuffle_(shuffle),
      random_state_(seed),
      free_(max_blocks) {
  VARLANE_DCHECK(max_blocks >= 0 &&
                 max_blocks <= std::numeric_limits<BlockId>::max());
  const auto size = static_cast<size_t>(max_blocks);
  counts_.reserve(size);
  if (shuffle_) {
    block_at_.reserve(size);
    position_of_.reserve(size);
  }
}

// splitmix64 (Steele, Lea, Flood 2014), reduced by multiplication: the standard
// library's shuffle may differ from one implementation to the next.
uint64_t BlockAllocator::NextRandom(uint64_t bound) noexcept {
  random_state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = random_state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return (z >> 32) * bound >> 32;  // bound < 2^32
}

bool BlockAllocator::Grow(int64_t num_blocks) noexcept {
  if (num_blocks < 0 || num_blocks > max_blocks_ - capacity()) return false;
  const int64_t begin = capacity();
  const int64_t end = begin + num_blocks;
  counts_.resize(static_cast<size_t>(end), 0);
  for (int64_t position = begin; position < end; ++position) {
    free_.Insert(position);
  }
  if (!shuffle_) return true;
  // Fisher-Yates over the new blocks alone; the old ones keep their places.
  for (int64_t i = begin; i < end; ++i) {
    block_at_.push_back(static_cast<BlockId>(i));
    const auto chosen =
        begin +
        static_cast<int64_t>(NextRandom(static_cast<uint64_t>(i - begin + 1)));
    std::swap(block_at_[static_cast<size_t>(i)],
              block_at_[static_cast<size_t>(chosen)]);
  }
  position_of_.resize(static_cast<size_t>(end));
  for (int64_t i = begin; i < end; ++i) {
    const BlockId block = block_at_[static_cast<size_t>(i)];
    position_of_[static_cast<size_t>(block)] = static_cast<BlockId>(i);
  }
  return true;
}

BlockId BlockAllocator::Allocate() noexcept {
  const int64_t position = free_.Min();
  if (position < 0) return kNoBlock;
  free_.Erase(position);
  const BlockId block = BlockAt(position);
  int32_t& count = counts_[static_cast<size_t>(block)];
  VARLANE_DCHECK(count == 0);
  count = 1;
  ++referenced_;
  ++references_;
  return block;
}

bool BlockAllocator::Reference(BlockId block) noexcept {
  const int32_t count = reference_count(block);
  VARLANE_DCHECK(count > 0);
  if (count <= 0 || count == std::numeric_limits<int32_t>::max()) [[unlikely]] {
    return false;
  }
  counts_[static_cast<size_t>(block)] = count + 1;
  ++references_;
  return true;
}

Released BlockAllocator::Release(BlockId block) noexcept {
  const int32_t count = reference_count(block);
  VARLANE_DCHECK(count > 0);
  if (count <= 0) [[unlikely]] {
    return Released::kError;
  }
  counts_[static_cast<size_t>(block)] = count - 1;
  --references_;
  if (count > 1) return Released::kShared;
  --referenced_;
  free_.Insert(PositionOf(block));
  return Released::kFreed;
}

Status BlockAllocator::CheckInvariants() const {
  constexpr auto kInternal = StatusCode::kInternal;
  int64_t referenced = 0;
  int64_t references = 0;
  for (int64_t i = 0; i < capacity(); ++i) {
    const auto block = static_cast<BlockId>(i);
    const int32_t count = counts_[static_cast<size_t>(i)];
    const int64_t position = PositionOf(block);
    VARLANE_REQUIRE(
        position >= 0 && position < capacity() && BlockAt(position) == block,
        kInternal, "block ", i, " stands at position ", position, " of ",
        capacity(), ", which is not its own");
    VARLANE_REQUIRE(count >= 0, kInternal, "block ", i, " has ", count,
                    " references");
    VARLANE_REQUIRE((count == 0) == free_.Contains(position), kInternal,
                    "block ", i, " has ", count, " references but is ",
                    free_.Contains(position) ? "free" : "not free");
    referenced += count > 0 ? 1 : 0;
    references += count;
  }
  VARLANE_REQUIRE(referenced == referenced_, kInternal, referenced,
                  " blocks are referenced, but the total says ", referenced_);
  VARLANE_REQUIRE(references == references_, kInternal, "the blocks have ",
                  references, " references, but the total says ", references_);
  const int64_t free = free_.CountSlow();
  VARLANE_REQUIRE(free >= 0, kInternal,
                  "a summary of the free set contradicts its members");
  VARLANE_REQUIRE(free + referenced == capacity(), kInternal, free,
                  " free blocks + ", referenced, " referenced ones are not ",
                  capacity());
  return {};
}

}  // namespace varlane
