// BlockTable: one sequence's blocks in order, and its length in tokens.
//
//   token    0 .. S-1 | S .. 2S-1 | 2S .. length-1        S = block_size
//   block    blocks[0]| blocks[1] | blocks[2] (the tail, maybe part full)
//
// It always holds ceil(length / S) blocks. Pure arithmetic over ids: who else
// references a block, and what it contains, is not known here. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_TABLE_H_
#define VARLANE_MEMORY_BLOCK_TABLE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "varlane/kv_pool.h"

namespace varlane {

// Threads: a value; as safe as a std::vector. Copying one is what a fork is.
class BlockTable {
 public:
  // What appending tokens takes.
  struct Growth {
    int64_t length = 0;      // afterwards; saturates at INT64_MAX
    int64_t num_blocks = 0;  // in the table afterwards
    int64_t new_blocks = 0;  // of these, to be added
    // The entry that is written into although the table holds it already, so
    // it must be copied first where others reference it; -1 = none. It can only
    // be the part-full tail: blocks before it are not written, and blocks after
    // it are new.
    int64_t written_entry = -1;
  };

  // Requires: block_size > 0.
  explicit BlockTable(int block_size) : block_size_(block_size) {}

  int64_t length() const noexcept { return length_; }
  int64_t num_blocks() const noexcept {
    return static_cast<int64_t>(blocks_.size());
  }
  std::span<const BlockId> blocks() const noexcept { return blocks_; }

  // Changes nothing. Requires: num_tokens >= 0.
  Growth PlanAppend(int64_t num_tokens) const noexcept;
  // Makes room for `new_blocks` more entries, so that Append cannot fail. May
  // throw std::bad_alloc; the table's contents are unchanged then.
  void ReserveBlocks(int64_t new_blocks);
  // Adds one entry. Requires: room from ReserveBlocks.
  void AddBlock(BlockId block) noexcept;
  // Adds entries and returns them, for the caller to fill. Requires: room from
  // ReserveBlocks.
  std::span<BlockId> AddBlocks(int64_t new_blocks) noexcept;
  // Drops the last entries, while an append is under way.
  void DropBlocks(int64_t num_blocks) noexcept;
  // Puts another block in an entry's place (after a copy).
  void ReplaceBlock(int64_t entry, BlockId block) noexcept;
  // The entries, to be replaced one by one (blocks that moved).
  std::span<BlockId> mutable_blocks() noexcept { return blocks_; }
  // Ends an append: requires that the entries are those of `length` tokens.
  void SetLength(int64_t length) noexcept;

  // How many entries at the end a cut to `length` tokens gives back.
  // Requires: 0 <= length <= length().
  int64_t BlocksCutBy(int64_t length) const noexcept;
  // Cuts to `length` and drops those entries; the caller has released them.
  void Truncate(int64_t length) noexcept;

  // slot = block * block_size + offset of tokens [begin, begin + out.size()).
  // Requires: all of them are in the sequence.
  void MapSlots(int64_t begin, std::span<int64_t> out) const noexcept;

  // The table holds exactly the blocks of its length.
  bool IsConsistent() const noexcept;

 private:
  int block_size_;
  int64_t length_ = 0;
  std::vector<BlockId> blocks_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_TABLE_H_
