// BlockTable: how many blocks an append takes, which one it writes into, what a
// cut gives back, and where tokens stand.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/block_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace varlane {
namespace {

// Appends tokens; new blocks get the ids first, first + 1 ...
void Append(BlockTable* table, int64_t num_tokens, BlockId first) {
  const BlockTable::Growth growth = table->PlanAppend(num_tokens);
  table->ReserveBlocks(growth.new_blocks);
  for (int64_t i = 0; i < growth.new_blocks; ++i) {
    table->AddBlock(first + static_cast<BlockId>(i));
  }
  table->SetLength(growth.length);
}

std::vector<BlockId> Blocks(const BlockTable& table) {
  return {table.blocks().begin(), table.blocks().end()};
}

TEST(BlockTableTest, NewTableIsEmpty) {
  const BlockTable table(16);
  EXPECT_EQ(table.length(), 0);
  EXPECT_EQ(table.num_blocks(), 0);
  EXPECT_TRUE(table.IsConsistent());
}

TEST(BlockTableTest, AppendTakesABlockForEveryBlockSizeTokensBegun) {
  for (const int block_size : {16, 32, 256}) {
    for (int64_t held = 0; held <= 3 * block_size; ++held) {
      BlockTable table(block_size);
      Append(&table, held, 0);
      for (const int64_t more :
           {0, 1, block_size - 1, block_size, block_size + 1}) {
        // Counted token by token, not by the formula under test.
        int64_t blocks = table.num_blocks();
        for (int64_t token = held; token < held + more; ++token) {
          if (token % block_size == 0) ++blocks;
        }
        const BlockTable::Growth growth = table.PlanAppend(more);
        ASSERT_EQ(growth.length, held + more);
        ASSERT_EQ(growth.num_blocks, blocks) << held << " + " << more;
        ASSERT_EQ(growth.new_blocks, blocks - table.num_blocks());
      }
    }
  }
}

TEST(BlockTableTest, OnlyAPartFullTailIsWrittenInto) {
  BlockTable table(16);
  EXPECT_EQ(table.PlanAppend(1).written_entry, -1);
  Append(&table, 40, 5);
  EXPECT_EQ(table.PlanAppend(1).written_entry, 2);
  EXPECT_EQ(table.PlanAppend(100).written_entry, 2);
  EXPECT_EQ(table.PlanAppend(0).written_entry, -1) << "nothing is written";
  Append(&table, 8, 9);
  ASSERT_EQ(table.length(), 48);
  EXPECT_EQ(table.PlanAppend(1).written_entry, -1) << "the tail is full";
}

TEST(BlockTableTest, HugeAppendSaturatesInsteadOfOverflowing) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  BlockTable table(16);
  Append(&table, 20, 0);
  const BlockTable::Growth growth = table.PlanAppend(kMost);
  EXPECT_EQ(growth.length, kMost);
  EXPECT_EQ(growth.num_blocks, kMost / 16 + 1);
}

TEST(BlockTableTest, TruncateGivesBackWholeBlocksAtTheEnd) {
  BlockTable table(16);
  Append(&table, 50, 0);
  EXPECT_EQ(table.BlocksCutBy(50), 0);
  EXPECT_EQ(table.BlocksCutBy(49), 0);
  EXPECT_EQ(table.BlocksCutBy(48), 1);
  EXPECT_EQ(table.BlocksCutBy(33), 1);
  EXPECT_EQ(table.BlocksCutBy(32), 2);
  EXPECT_EQ(table.BlocksCutBy(1), 3);
  EXPECT_EQ(table.BlocksCutBy(0), 4);
  table.Truncate(33);
  EXPECT_EQ(Blocks(table), (std::vector<BlockId>{0, 1, 2}));
  EXPECT_EQ(table.PlanAppend(1).written_entry, 2);
  table.Truncate(0);
  EXPECT_EQ(table.num_blocks(), 0);
  EXPECT_TRUE(table.IsConsistent());
}

TEST(BlockTableTest, SlotIsBlockTimesBlockSizePlusOffset) {
  BlockTable table(16);
  Append(&table, 16, 7);
  Append(&table, 16, 0);
  Append(&table, 3, INT32_MAX);  // past 2^31 slots
  std::vector<int64_t> slots(35);
  table.MapSlots(0, slots);
  for (int64_t token = 0; token < 35; ++token) {
    const int64_t block =
        token < 16 ? 7 : (token < 32 ? 0 : int64_t{INT32_MAX});
    EXPECT_EQ(slots[static_cast<size_t>(token)], block * 16 + token % 16);
  }
  std::vector<int64_t> middle(2);
  table.MapSlots(15, middle);
  EXPECT_EQ(middle, (std::vector<int64_t>{7 * 16 + 15, 0}));
  table.MapSlots(35, {});
}

TEST(BlockTableTest, ForkIsACopyThatChangesAlone) {
  BlockTable table(16);
  Append(&table, 20, 0);
  BlockTable fork = table;
  fork.ReplaceBlock(1, 9);
  Append(&fork, 30, 20);
  EXPECT_EQ(Blocks(table), (std::vector<BlockId>{0, 1}));
  EXPECT_EQ(Blocks(fork), (std::vector<BlockId>{0, 9, 20, 21}));
  EXPECT_EQ(table.length(), 20);
  EXPECT_EQ(fork.length(), 50);
}

}  // namespace
}  // namespace varlane
