// PrefixCache: which blocks hold which prefix, and which of them to drop first.
//
// A tree a tenant: a node is a full block, its parent the block before it in
// the sequences that begin so.
//
//   tenant 7 -- [the quick brown fox] -- [jumps over the lazy]
//                                     \- [sat on the mat and]
//
// A node is found by a chained keyed hash (prefix_hash.h), but a hit is decided
// by parent and tokens: two prefixes whose hashes collide cost a comparison
// more, and are never taken for each other.
//
// Blocks that no sequence references stay, and are dropped when their memory is
// wanted: the longest unused first, and of those released at one time the last
// of the sequence first. So a node goes before its parent: whoever holds a
// block holds all before it, and gives them back in reverse.
//
// Ids and tokens only: no bytes, no reference counts. The owner tells when a
// block's last reference goes and when the first one comes back. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_PREFIX_CACHE_H_
#define VARLANE_MEMORY_PREFIX_CACHE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "memory/block_allocator.h"
#include "memory/prefix_hash.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane {

struct PrefixCacheOptions {
  int block_size = 16;     // tokens a block, at least 1
  int64_t max_blocks = 0;  // ids are below it
  PrefixHashKey key;
  uint64_t hash_mask = ~uint64_t{0};  // tests: fewer bits, more collisions
};

// Threads: not synchronised; the owner locks (KvPool does).
// Cost:    O(1) a block for everything but CheckInvariants. Only the first
//          block of a tenant allocates after construction.
class PrefixCache {
 public:
  using NodeId = int32_t;

  // Where a sequence stands in its tenant's tree: at the node of its last full
  // block. Valid while that block is referenced or pinned.
  struct Cursor {
    uint64_t tenant = 0;
    NodeId node = kStart;  // kStart: no full block yet
  };
  static constexpr NodeId kStart = -1;

  struct Match {
    Cursor cursor;                     // behind the last full block found
    BlockId partial_block = kNoBlock;  // begins with the tokens that follow
    int partial_tokens = 0;            //   so many; < block_size
  };

  // May throw std::bad_alloc. Requires: options in their ranges.
  explicit PrefixCache(const PrefixCacheOptions& options);

  // Finds the longest known prefix of `tokens`: appends its blocks, in order,
  // to `blocks`. Where it ends, one of the blocks known to follow may share
  // some tokens more; that one could be copied. The first kSiblings of them,
  // latest first, are looked at. Throws std::bad_alloc (`blocks` only).
  // The order of eviction does not change: Acquire what is taken.
  Match Find(uint64_t tenant, std::span<const int32_t> tokens,
             std::vector<BlockId>* blocks);
  static constexpr int kSiblings = 8;

  // What Find would find in whole blocks, without counting it as a lookup.
  struct Peeked {
    int64_t blocks = 0;
    int64_t cached_blocks = 0;  // of these, referenced by nobody
  };
  Peeked Peek(uint64_t tenant, std::span<const int32_t> tokens) noexcept;

  // Indexes `block`, which holds `tokens` behind `cursor`, and moves the cursor
  // behind it. Returns `block`; or the block that holds the same prefix
  // already, in which case `block` is not indexed and the sequence should take
  // that one instead; or kNoBlock, and nothing changed, where `block` is
  // indexed as something else. Throws std::bad_alloc; nothing changes then.
  // Requires: tokens.size() == block_size; `block` is referenced; the cursor is
  //           valid.
  BlockId Insert(Cursor* cursor, std::span<const int32_t> tokens,
                 BlockId block);

  bool Contains(BlockId block) const noexcept { return NodeOf(block) != kNone; }
  // No known block follows it, and nothing pins it. Requires: Contains.
  bool IsLooseLeaf(BlockId block) const noexcept;
  // The tokens of an indexed block. Valid until it is evicted or forgotten.
  std::span<const int32_t> Tokens(BlockId block) const noexcept;
  // The cursor behind `cursor`'s block's predecessor. Requires: not at kStart.
  Cursor Parent(const Cursor& cursor) const noexcept;
  // kNoBlock at kStart.
  BlockId BlockAt(const Cursor& cursor) const noexcept;

  // A sequence references `block` again, which none did. No-op where it is not
  // indexed.
  void Acquire(BlockId block) noexcept;
  // The last reference to `block` went. True: it stays, cached. False: it is
  // not indexed, so it is free. No-op where that was told already.
  // Requires: of the blocks that a sequence gives back, the last in the
  //           sequence first.
  bool Release(BlockId block) noexcept;

  // Drops the block that is due and returns it: it is free now. kNoBlock when
  // all that are cached are pinned.
  BlockId Evict() noexcept;
  // Drops `block` from the index, because it is to be written to.
  // Requires: IsLooseLeaf.
  void Forget(BlockId block) noexcept;
  // The contents of `from` stand in `to` now. No-op where `from` is not
  // indexed. Requires: `to` is not indexed.
  void Move(BlockId from, BlockId to) noexcept;

  // Keeps all blocks up to the cursor from eviction, until as many Unpins.
  // O(blocks). Requires: the cursor is valid.
  void Pin(const Cursor& cursor) noexcept;
  void Unpin(const Cursor& cursor) noexcept;

  int64_t evictable_blocks() const noexcept { return stats_.evictable_blocks; }
  const PrefixCacheStats& stats() const noexcept { return stats_; }

  // Walks everything: each node is found where its hash says, hangs in its
  // parent's list, is in the order of eviction exactly when nobody references
  // or pins it, and behind all its children there; the totals add up.
  // Errors: kInternal naming the first contradiction. O(max_blocks); throws
  // std::bad_alloc.
  Status CheckInvariants() const;

 private:
  // Links between nodes are ids, so that Move is O(1). Lists of siblings begin
  // in the parent, which for a first block is a Tenant.
  static constexpr NodeId kNone = -1;
  struct Node {
    uint64_t hash = 0;
    uint64_t tenant = 0;
    BlockId block = kNoBlock;
    NodeId parent = kNone;          // kNone: the first block of its tenant
    NodeId next_in_bucket = kNone;  // also links the unused nodes
    NodeId first_child = kNone;
    NodeId next_sibling = kNone;
    NodeId prev_sibling = kNone;
    NodeId older = kNone;  // in the order of eviction
    NodeId newer = kNone;
    int32_t pins = 0;
    bool is_referenced = false;
    bool is_listed = false;  // in the order of eviction
  };
  struct Tenant {
    uint64_t hash = 0;
    NodeId first_child = kNone;
  };

  Node& At(NodeId node) noexcept { return nodes_[static_cast<size_t>(node)]; }
  const Node& At(NodeId node) const noexcept {
    return nodes_[static_cast<size_t>(node)];
  }
  NodeId NodeOf(BlockId block) const noexcept {
    return block >= 0 && static_cast<size_t>(block) < node_of_block_.size()
               ? node_of_block_[static_cast<size_t>(block)]
               : kNone;
  }
  int32_t* TokensAt(NodeId node) const noexcept {
    return tokens_.get() +
           static_cast<size_t>(node) * static_cast<size_t>(block_size_);
  }
  NodeId& Bucket(uint64_t hash) noexcept {
    return buckets_[static_cast<size_t>(hash) & (buckets_.size() - 1)];
  }

  uint64_t HashBehind(const Cursor& cursor) const noexcept;
  // Calls `visit` with the node of each block of the longest known prefix, and
  // returns the cursor behind it.
  template <typename Visit>
  Cursor Walk(uint64_t tenant, std::span<const int32_t> tokens, Visit visit);
  NodeId FindChild(const Cursor& cursor, uint64_t hash,
                   std::span<const int32_t> tokens) noexcept;
  void FindPartial(std::span<const int32_t> tokens, Match* match) noexcept;
  NodeId FirstChild(const Cursor& cursor) const noexcept;
  NodeId NewNode() noexcept;
  void LinkToParent(NodeId node) noexcept;
  void UnlinkFromParent(NodeId node) noexcept;
  void UnlinkFromBucket(NodeId node) noexcept;
  void Drop(NodeId node) noexcept;
  // Puts the node into the order of eviction, as the newest, or takes it out,
  // as its state demands.
  void UpdateListing(NodeId node) noexcept;
  Status CheckNode(NodeId node) const;
  Status CheckOrder() const;

  const int block_size_;
  const int64_t max_blocks_;
  const PrefixHasher hasher_;
  std::vector<Node> nodes_;  // grows up to max_blocks, within its capacity
  std::vector<NodeId> node_of_block_;  // likewise; kNone = not indexed
  std::vector<NodeId> buckets_;        // a power of two
  std::unique_ptr<int32_t[]> tokens_;  // [max_blocks, block_size]
  std::unordered_map<uint64_t, Tenant> tenants_;  // those with a block
  NodeId unused_ = kNone;  // of nodes_, linked by next_in_bucket
  NodeId oldest_ = kNone;
  NodeId newest_ = kNone;
  PrefixCacheStats stats_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_PREFIX_CACHE_H_
