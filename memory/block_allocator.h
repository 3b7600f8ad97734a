// BlockAllocator: which blocks are free, which are cached, and how often each
// other one is referenced.
//
//            Allocate              Unreference, last one, kept
//     free ------------> referenced ------------------------> cached
//      ^                  |      ^                             |   |
//      |  Free            |      |            Revive           |   |
//      +----- ownerless <-+      +-----------------------------+   |
//                 ^       Unreference, last one, not kept          |
//                 +------------------------------------------------+
//                                     Unkeep
//
// A kept block (Keep) has contents that somebody can find again, so with its
// last reference gone it is cached instead of free. An ownerless block belongs
// to the thread that made it so, which does what it has to (poisoning) and then
// calls Free; it counts as referenced until then. At every moment
// free + cached + referenced == capacity.
//
// Ids and counts only: no pointers, no bytes. Ids say their NUMA node: node n
// has [n * blocks_per_node, n * blocks_per_node + capacity of n). The lowest
// free id of a node goes first (which keeps its used part dense, so that whole
// slabs stay unused at its end), or a seeded random order. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_ALLOCATOR_H_
#define VARLANE_MEMORY_BLOCK_ALLOCATOR_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "memory/free_set.h"
#include "memory/thread_slot.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane {

inline constexpr BlockId kNoBlock = -1;

// What became of a block that lost a reference.
enum class Released : uint8_t {
  kShared,  // others still reference the block
  kCached,  // it was the last reference; the block is kept
  kFreed,   // it was the last reference: Release freed the block, Unreference
            // leaves that to the caller
  kError,   // not a referenced block (double free, foreign id): nothing changed
};

enum class BlockState : uint8_t { kFree, kCached, kReferenced };

// What became of an attempt to revive a block.
enum class Revived : uint8_t {
  kFromCached,  // it has one reference now
  kShared,      // it had references, and has one more
  kGone,        // it is not kept (any more): nothing changed
};

struct BlockCounts {
  int64_t capacity = 0;
  int64_t free = 0;
  int64_t cached = 0;
  int64_t referenced() const { return capacity - free - cached; }
};

// Threads: Grow, Shrink, Move and CheckInvariants need the allocator for
//          themselves (KvPool locks everybody out); all else is safe from any
//          thread. Threads have up to kMostAtHand free blocks of a node at hand
//          (a number, not which ones), so that those who take and free meet
//          nobody; passing some on takes a node's lock, once per many blocks.
// Cost:    O(1) a block: at most six words are looked at, for any capacity, or
//          all of the free set's where other threads took what was found.
//          Blocks that are taken or freed together cost one atomic operation
//          per 64 neighbours. Nothing allocates after construction.
class BlockAllocator {
 public:
  struct Options {
    int num_nodes = 1;
    int64_t blocks_per_node = 0;  // ids a node can ever have
    bool shuffle = false;         // a random order that `seed` determines, on
    uint64_t seed = 0;            //   every machine alike
  };

  // Capacity 0. May throw std::bad_alloc.
  // Requires: num_nodes >= 1, 0 <= num_nodes * blocks_per_node <= INT32_MAX.
  explicit BlockAllocator(const Options& options);
  ~BlockAllocator();
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  // --- alone ---------------------------------------------------------------
  // Adds free blocks at the end of the node's. False, and nothing changed,
  // where that passes blocks_per_node.
  bool Grow(int node, int64_t num_blocks) noexcept;
  // Takes the node's last blocks away. False, and nothing changed, unless all
  // of them are free. O(num_blocks).
  bool Shrink(int node, int64_t num_blocks) noexcept;
  // Makes the free block `to` what `from` is, and frees `from`. False, and
  // nothing changed, where `to` is not free or `from` is.
  bool Move(BlockId from, BlockId to) noexcept;

  // --- any thread ----------------------------------------------------------
  // Fills `out` with blocks of one reference each, of `home` first and of the
  // other nodes in turn; `spilled` (may be null) says how many are not home's.
  // False, and nothing taken, where there are not enough.
  bool Allocate(std::span<BlockId> out, int home = 0,
                int64_t* spilled = nullptr) noexcept;
  // A block with one reference, or kNoBlock when none is free.
  BlockId Allocate() noexcept;

  // One more reference to a referenced block. False, and nothing changed, for
  // any other id (traps in debug) and at the count's limit (2^31 - 1).
  bool Reference(BlockId block) noexcept;
  // One reference less; a block that is kFreed is the caller's to Free. kError
  // traps in debug.
  Released Unreference(BlockId block) noexcept;
  // Makes ownerless blocks free. Ids that follow each other cost least.
  void Free(std::span<const BlockId> blocks) noexcept;
  // Unreference, and Free where that is due.
  Released Release(BlockId block) noexcept;

  // From now on the block is cached, not freed, when its last reference goes.
  // False, and nothing changed, unless it is referenced and not kept yet.
  bool Keep(BlockId block) noexcept;
  // Undoes Keep. True where the block was cached: it is ownerless now, and the
  // caller's to Free. A referenced block stays what it is otherwise.
  bool Unkeep(BlockId block) noexcept;
  // One more reference to a kept block, cached or not. At the count's limit:
  // kGone.
  Revived Revive(BlockId block) noexcept;

  // --- looking, any thread -------------------------------------------------
  // 0 for free and cached blocks and for ids that are none.
  int32_t reference_count(BlockId block) const noexcept {
    return static_cast<int32_t>(WordOf(block) & kCountMask);
  }
  bool is_shared(BlockId block) const noexcept {
    return reference_count(block) > 1;
  }
  bool is_kept(BlockId block) const noexcept {
    return (WordOf(block) & kKept) != 0;
  }
  // kFree for ids that are none. An ownerless block looks free too.
  BlockState state(BlockId block) const noexcept;
  bool IsBlock(BlockId block) const noexcept {
    return block >= 0 && block < max_blocks() &&
           IndexOf(block) < capacity(NodeOf(block));
  }
  // Requires: block >= 0.
  int NodeOf(BlockId block) const noexcept {
    return options_.num_nodes == 1
               ? 0
               : static_cast<int>(static_cast<uint32_t>(block) / per_node_);
  }
  BlockId FirstBlockOf(int node) const noexcept {
    return static_cast<BlockId>(node * options_.blocks_per_node);
  }

  int num_nodes() const noexcept { return options_.num_nodes; }
  int64_t blocks_per_node() const noexcept { return options_.blocks_per_node; }
  int64_t max_blocks() const noexcept {
    return options_.num_nodes * options_.blocks_per_node;
  }
  // [num_nodes], for views that outlive a change of capacity.
  const std::atomic<int64_t>* capacities() const noexcept {
    return capacities_.data();
  }
  // Beside other threads some free blocks may be missing for a moment.
  BlockCounts counts(int node) const noexcept;
  BlockCounts counts() const noexcept;
  int64_t capacity(int node) const noexcept {
    return capacities_[static_cast<size_t>(node)].load(
        std::memory_order_acquire);
  }
  int64_t capacity() const noexcept {
    int64_t sum = 0;
    for (int node = 0; node < num_nodes(); ++node) sum += capacity(node);
    return sum;
  }
  int64_t free_blocks() const noexcept { return counts().free; }
  // Free blocks but those that other threads have at hand: cheaper to ask for.
  int64_t FreeBlocksAtLeast() const noexcept;
  // Referenced blocks and those that other threads have at hand; likewise.
  int64_t ReferencedBlocksAtMost() const noexcept;
  int64_t cached_blocks() const noexcept { return counts().cached; }
  int64_t referenced_blocks() const noexcept { return counts().referenced(); }
  int64_t references() const noexcept { return references_.Sum(); }

  // The node's free block that comes first in its order, or kNoBlock.
  BlockId FirstFree(int node) const noexcept;

  // Walks everything: each block is in exactly one state, and the totals are
  // what the blocks add up to. Errors: kInternal naming the first
  // contradiction. Cost: O(max_blocks).
  Status CheckInvariants() const;

 private:
  struct Node;
  struct Spread;

  static constexpr uint32_t kKept = uint32_t{1} << 31;
  static constexpr uint32_t kCountMask = kKept - 1;

  uint32_t WordOf(BlockId block) const noexcept {
    return IsBlock(block) ? Word(block).load(std::memory_order_acquire) : 0;
  }
  std::atomic<uint32_t>& Word(BlockId block) const noexcept {
    return words_[static_cast<size_t>(block)];
  }
  // Of its node's blocks. 32 bits: the division is on every path.
  int64_t IndexOf(BlockId block) const noexcept {
    const auto id = static_cast<uint32_t>(block);
    return options_.num_nodes == 1 ? id : id % per_node_;
  }
  int64_t PositionOf(BlockId block) const noexcept;
  BlockId BlockAt(int node, int64_t position) const noexcept;
  static int64_t Owe(Node* node, int64_t wanted, int64_t least) noexcept;
  static int64_t OweShared(Node* node, int64_t wanted, int64_t least) noexcept;
  int64_t PlaceOf(int node, Spread* spread) const noexcept;
  void KeepApart(int node, Spread* spread) const noexcept;
  int64_t TakeFromNode(int node, std::span<BlockId> out) noexcept;
  int64_t HandOut(int node, const FreeSet::Members& members,
                  BlockId* out) const noexcept;
  void ShuffleNewBlocks(Node* node, int64_t begin, int64_t end) noexcept;
  uint64_t NextRandom(uint64_t bound) noexcept;  // [0, bound)
  Status CheckNode(int node, int64_t* references) const;

  const Options options_;
  const uint32_t per_node_;  // blocks_per_node, at least 1
  uint64_t random_state_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::atomic<int64_t>> capacities_;  // [num_nodes]
  // [max_blocks]: references, and whether the block is kept.
  mutable std::vector<std::atomic<uint32_t>> words_;
  SpreadCounter references_;  // sum of the counts

  // What the threads of a slot do about others beside them. Counts of calls
  // are read by those others too, now and then.
  struct alignas(64) Spread {
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> others{0};  // calls of all other slots, when last seen
    std::atomic<int64_t> place{0};   // where it looks for blocks first
  };
  std::array<Spread, kThreadSlots> spread_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_ALLOCATOR_H_
