// SPDX-License-Identifier: Apache-2.0

#include "memory/block_table.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/math.h"

namespace varlane {

BlockTable::Growth BlockTable::PlanAppend(int64_t num_tokens) const noexcept {
  VARLANE_DCHECK(num_tokens >= 0);
  Growth growth;
  growth.length = CheckedAdd(length_, num_tokens)
                      .value_or(std::numeric_limits<int64_t>::max());
  growth.num_blocks = DivCeil<int64_t>(growth.length, block_size_);
  growth.new_blocks = growth.num_blocks - num_blocks();
  const bool writes_tail = num_tokens > 0 && length_ % block_size_ != 0;
  growth.written_entry = writes_tail ? num_blocks() - 1 : -1;
  return growth;
}

void BlockTable::ReserveBlocks(int64_t new_blocks) {
  const size_t wanted = blocks_.size() + static_cast<size_t>(new_blocks);
  if (wanted <= blocks_.capacity()) return;
  // reserve() alone takes exactly what is asked: decoding would then copy the
  // table at every block.
  blocks_.reserve(std::max(wanted, 2 * blocks_.capacity()));
}

void BlockTable::AddBlock(BlockId block) noexcept {
  VARLANE_DCHECK(blocks_.size() < blocks_.capacity());
  blocks_.push_back(block);
}

std::span<BlockId> BlockTable::AddBlocks(int64_t new_blocks) noexcept {
  const auto count = static_cast<size_t>(new_blocks);
  VARLANE_DCHECK(count <= blocks_.capacity() - blocks_.size());
  blocks_.resize(blocks_.size() + count);
  return std::span<BlockId>(blocks_).last(count);
}

void BlockTable::DropBlocks(int64_t num_blocks) noexcept {
  VARLANE_DCHECK(num_blocks <= this->num_blocks());
  blocks_.resize(blocks_.size() - static_cast<size_t>(num_blocks));
}

void BlockTable::ReplaceBlock(int64_t entry, BlockId block) noexcept {
  VARLANE_DCHECK(entry >= 0 && entry < num_blocks());
  blocks_[static_cast<size_t>(entry)] = block;
}

void BlockTable::SetLength(int64_t length) noexcept {
  length_ = length;
  VARLANE_DCHECK(IsConsistent());
}

int64_t BlockTable::BlocksCutBy(int64_t length) const noexcept {
  VARLANE_DCHECK(length >= 0 && length <= length_);
  return num_blocks() - DivCeil<int64_t>(length, block_size_);
}

void BlockTable::Truncate(int64_t length) noexcept {
  const int64_t kept = num_blocks() - BlocksCutBy(length);
  blocks_.resize(static_cast<size_t>(kept));
  SetLength(length);
}

void BlockTable::MapSlots(int64_t begin,
                          std::span<int64_t> out) const noexcept {
  VARLANE_DCHECK(begin >= 0 &&
                 begin + static_cast<int64_t>(out.size()) <= length_);
  int64_t token = begin;
  for (int64_t& slot : out) {
    const int64_t entry = token / block_size_;
    slot = int64_t{blocks_[static_cast<size_t>(entry)]} * block_size_ +
           token % block_size_;
    ++token;
  }
}

bool BlockTable::IsConsistent() const noexcept {
  return length_ >= 0 && num_blocks() == DivCeil<int64_t>(length_, block_size_);
}

}  // namespace varlane
