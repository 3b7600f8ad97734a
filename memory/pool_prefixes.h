// PoolPrefixes: the prefix cache of a pool whose blocks many threads take and
// give back.
//
// Joins the index (PrefixCache) and the states of blocks (BlockAllocator): an
// indexed block is kept, and cached while nobody references it. Both change
// together under one mutex, but for references that come and go while others
// remain, which need none.
//
//   a block's last reference goes   uncounted, then put into the order of
//                                   eviction; between the two nobody evicts it
//   a block is found again          revived and taken out of the order, under
//                                   the mutex
//
// Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_POOL_PREFIXES_H_
#define VARLANE_MEMORY_POOL_PREFIXES_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "memory/block_allocator.h"
#include "memory/block_table.h"
#include "memory/prefix_cache.h"
#include "varlane/function_ref.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane {

// What is known about a sequence's tokens: the first `length` of them.
struct CommittedTokens {
  PrefixCache::Cursor cursor;  // behind its full blocks
  int64_t length = 0;
  std::vector<int32_t> tail = {};  // the last length % block_size of them
};

// Threads: every member is safe from any thread; a sequence's table and tokens
//          are its owner's, who lets nobody else at them meanwhile.
class PoolPrefixes {
 public:
  // May throw std::bad_alloc. Lifetime: `allocator` must outlive it.
  PoolPrefixes(const PrefixCacheOptions& options, BlockAllocator* allocator);

  struct Taken {
    int64_t revived_blocks = 0;  // of the table's
    // One reference to it is the caller's, to copy its first tokens.
    BlockId partial_block = kNoBlock;
    int partial_tokens = 0;
    bool partial_revived = false;
  };
  // Called with each block that nobody referenced before; nobody else can take
  // it meanwhile.
  using OnRevived = FunctionRef<void(BlockId)>;

  // Begins a sequence with the longest known prefix of `prompt` that leaves at
  // least one token and revives no more than `max_revived` blocks, the partial
  // one not counted: references the blocks and adds them to `table`.
  // Throws std::bad_alloc; nothing changes then.
  // Requires: `table` and `tokens` are empty, but for the tenant.
  Taken Take(std::span<const int32_t> prompt, int64_t max_revived,
             OnRevived on_revived, CommittedTokens* tokens, BlockTable* table);
  // What Take would take in whole blocks.
  PrefixCache::Peeked Peek(uint64_t tenant, std::span<const int32_t> prompt);

  // Learns the sequence's next tokens, and indexes the blocks that become full.
  // Where one is known already the sequence gets the known one in its table and
  // loses its own; `freed` has those that are ownerless now.
  // Errors: kInvalidArgument when a block is known to hold other tokens;
  //         kResourceExhausted (heap; a full count). Blocks before stay
  //         committed, nothing else changes.
  // Requires: the table has room for the tokens.
  Status Commit(std::span<const int32_t> more, OnRevived on_revived,
                CommittedTokens* tokens, BlockTable* table,
                std::vector<BlockId>* freed);
  // Forgets all tokens but the first `length`, while the blocks are still
  // referenced. Throws std::bad_alloc; nothing changes then.
  // Requires: 0 <= length.
  void Truncate(int64_t length, CommittedTokens* tokens);

  // One reference less. kFreed: the caller's to Free. Of a sequence's blocks
  // the last must go first.
  Released Unreference(BlockId block) noexcept;
  // Whether its only sequence may write to the block once MakeWritable has
  // taken it out of the index, if it is there: nothing stands behind it, and no
  // pin holds it.
  bool CanWrite(BlockId block) const noexcept;
  // Makes the block private contents again, which its only sequence may write
  // to. False where it must be copied: others have it, or could find it.
  bool MakeWritable(BlockId block) noexcept;

  // Makes up to `blocks.size()` cached blocks ownerless, those due first, and
  // returns how many: the first of `blocks`, the caller's to Free.
  int64_t Evict(std::span<BlockId> blocks) noexcept;
  // Cached, and not pinned.
  int64_t evictable_blocks() const noexcept {
    return evictable_.load(std::memory_order_relaxed);
  }
  // `from` stands in `to` now; the allocator knows. Requires: alone.
  void Move(BlockId from, BlockId to) noexcept;

  // Keeps the longest known prefix of `prompt`, in whole blocks, from eviction.
  // Returns its length. Errors: kResourceExhausted (heap).
  Result<int64_t> Pin(uint64_t tenant, std::span<const int32_t> prompt,
                      int64_t* pin);
  // Errors: kNotFound.
  Status Unpin(int64_t pin);

  PrefixCacheStats stats() const;
  // The tokens' blocks are those of the table. Requires: alone.
  Status CheckSequence(const CommittedTokens& tokens,
                       const BlockTable& table) const;
  // The index is right in itself, and says of each block what the allocator
  // says. Requires: alone. Throws std::bad_alloc.
  Status CheckInvariants() const;

 private:
  void NoteEvictable() noexcept {
    evictable_.store(cache_.evictable_blocks(), std::memory_order_relaxed);
  }
  Status CommitBlock(std::span<const int32_t> block_tokens,
                     OnRevived on_revived, CommittedTokens* tokens,
                     BlockTable* table, std::vector<BlockId>* freed);

  const int block_size_;
  BlockAllocator* const allocator_;

  mutable std::mutex mutex_;  // all below, and blocks' becoming kept or revived
  PrefixCache cache_;
  std::unordered_map<int64_t, PrefixCache::Cursor> pins_;
  int64_t next_pin_ = 0;

  std::atomic<int64_t> evictable_{0};  // written under mutex_
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_POOL_PREFIXES_H_
