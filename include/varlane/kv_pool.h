// KvPool: paged KV memory, its blocks, and the sequences that hold them.
//
// Address space for the largest pool is reserved once; memory is committed in
// slabs (multiples of 2 MiB) on their NUMA node, and given back in slabs. Ids
// say their node, and growth never moves a block. A block is free, cached (no
// sequence has it, but its contents can be found again) or referenced; a fork
// shares blocks, the first write to a shared one copies it, truncation gives
// blocks back. At every moment `free + cached + referenced == capacity`, and
// reference counts equal the table entries that name them. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KV_POOL_H_
#define VARLANE_KV_POOL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "varlane/export.h"
#include "varlane/kv_layout.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

using BlockId = int32_t;
using SeqId = int64_t;

using TenantId = uint64_t;

// What the blocks' memory is.
enum class MemoryBacking : uint8_t {
  kAnonymous,
  kMemfd,  // a file in memory (KvPool::memory_fd) that can be mapped elsewhere
};

// Whether the kernel may swap or migrate the pool's pages (mlock).
enum class MemoryLock : uint8_t {
  kOff,
  kTry,       // locked where RLIMIT_MEMLOCK lets us; KvPoolStats tells
  kRequired,  // else Create and growth fail
};

struct KvPoolOptions {
  KvLayout layout;
  int64_t num_blocks = 0;  // capacity committed at Create
  int64_t max_blocks = 0;  // address space; 0 = num_blocks
  HugePages huge_pages = HugePages::kTransparent;
  MemoryBacking backing = MemoryBacking::kAnonymous;
  MemoryLock lock = MemoryLock::kOff;
  // Tensor parallelism inside the process: the KV heads are cut into as many
  // equal shards as the runtime has NUMA nodes, and each node's memory holds
  // its shard of every block (KvView::num_shards). Ids then say no node, and
  // sequences have no home. With one node nothing changes. docs/numa.md
  bool shard_heads = false;
  bool check_limits = true;      // re-read MemoryLimits slab by slab while
                                 // committing, and refuse before the kernel
                                 // kills
  int64_t watermark_blocks = 0;  // what a sequence's first blocks must leave
                                 // available to those that have some already
  bool poison_freed = false;     // fill freed blocks with NaN (0xff); ASan
                                 // builds poison them in any case
  bool prefix_cache = false;     // keep computed blocks to be found again
                                 // (MatchPrefix); docs/prefix_cache.md
  uint64_t prefix_key = 0;       // tests: the key of its hash; 0 = random
  bool shuffle = false;          // hand out blocks in a random order (tests,
  uint64_t seed = 0;             //   benches); else lowest id first
};

struct SequenceOptions {
  TenantId tenant = 0;  // whose quota its blocks count against
  int home_node = -1;   // whose memory it gets first, in [0,
                        // KvPool::num_nodes()); -1 = that of its first blocks:
                        // of those it shares, or else the emptiest node's then.
                        // Means nothing where heads are sharded
};

// The answer to "may this sequence grow?": a value, never an exception.
struct Admission {
  enum class Kind : uint8_t {
    kAdmitted,   // done; the blocks are the sequence's
    kWait,       // would fit an emptier pool: needed > free
    kNeverFits,  // what the sequence holds + new blocks > capacity: waiting
                 //   for others cannot help
  };
  // What binds: the numbers below are those of this limit.
  enum class Limit : uint8_t {
    kBlocks,     // the pool's blocks
    kWatermark,  // the pool's blocks, but those kept for running sequences
    kQuota,      // the tenant's blocks
  };
  Kind kind = Kind::kAdmitted;
  Limit limit = Limit::kBlocks;
  int64_t needed_blocks = 0;
  int64_t free_blocks = 0;  // to be had at the moment of asking, cached blocks
                            // included; where admitted, so many at least
  int64_t capacity_blocks = 0;

  bool admitted() const { return kind == Kind::kAdmitted; }
};

// Since Create, but where it says "now".
struct KvPoolStats {
  int64_t capacity_blocks = 0;    // now
  int64_t free_blocks = 0;        // now
  int64_t cached_blocks = 0;      // now: found again, or evicted
  int64_t referenced_blocks = 0;  // now: distinct blocks in at least one table
  int64_t references = 0;         // now: table entries
  // The most at once. Threads that take blocks at once look for it every 64
  // times only, so one that they had for microseconds may be missing.
  int64_t peak_referenced_blocks = 0;
  int64_t sequences = 0;          // now
  int64_t outstanding_steps = 0;  // now
  int64_t cow_copies = 0;
  int64_t evicted_blocks = 0;      // cached ones that became free
  int64_t spilled_blocks = 0;      // not on the sequence's home node
  int64_t quota_refusals = 0;      // appends that a quota made wait
  int64_t watermark_refusals = 0;  // appends that the watermark made wait
  int64_t compactions = 0;         // changes that moved blocks
  int64_t moved_blocks = 0;        // by these
  int64_t committed_bytes = 0;     // now
  int64_t reserved_bytes = 0;      // address space
  int64_t limit_bytes = 0;         // now: SetLimit's; reserved_bytes before
  int64_t slab_bytes = 0;          // of all nodes' shards together
  int64_t num_slabs = 0;           // now
  int64_t slabs_released = 0;      // given back to the system
  int64_t slabs_regained = 0;      // of these, committed again
  int64_t huge_page_bytes = 0;  // what the kernel really gave, from smaps, as
                                //   of the last growth
  HugePages huge_pages = HugePages::kOff;  // the kind it gave
  int64_t locked_bytes = 0;                // now: held by mlock
  int lock_error = 0;  // errno of the last mlock that failed; 0 = none
  // errno of the last mbind that failed; 0 = none, or one node. First touch by
  // the node's workers places pages in any case: MeasurePlacement tells.
  int mempolicy_error = 0;
};

// Where the pages of the pool are, as the kernel tells.
struct KvPlacement {
  int64_t local_bytes = 0;    // on the node that their blocks' ids, or where
                              // heads are sharded their shards, say
  int64_t remote_bytes = 0;   // on another one
  int64_t absent_bytes = 0;   // committed, but without a page
  int64_t unknown_bytes = 0;  // the kernel does not tell, or the topology is
                              // not this machine's
  int error = 0;              // errno of its refusal; 0 = none
};

// What the pool's prefix cache knows of a prompt.
struct PrefixMatch {
  SeqId seq = -1;             // the new sequence (MatchPrefix)
  int64_t tokens = 0;         // computed already: the new sequence's length
  int64_t shared_blocks = 0;  // the blocks of the first of them
  int64_t cached_blocks = 0;  // of these, referenced by nobody else: what
                              // free_blocks() falls by
  int64_t copied_tokens = 0;  // the last of them, in a block of its own
};

// Blocks that are not evicted.
struct PrefixPin {
  int64_t id = -1;
  int64_t tokens = 0;  // in whole blocks
};

// Since Create, but where it says "now".
struct PrefixCacheStats {
  int64_t lookups = 0;
  int64_t lookup_blocks = 0;  // full blocks asked for
  int64_t hit_blocks = 0;     // of these, found
  int64_t partial_hits = 0;   // lookups whose next block began like a known one
  int64_t partial_hit_tokens = 0;
  int64_t copied_blocks = 0;  // copied for their first tokens
  int64_t inserted_blocks = 0;
  int64_t duplicate_blocks = 0;  // computed by two, kept once
  int64_t evicted_blocks = 0;
  int64_t collisions = 0;        // equal hashes of different prefixes, met
  int64_t indexed_blocks = 0;    // now
  int64_t cached_blocks = 0;     // now: indexed, and nobody references them
  int64_t pinned_blocks = 0;     // now: indexed and pinned
  int64_t evictable_blocks = 0;  // now: cached and not pinned
};

// One NUMA node's part, now. Where heads are sharded every node has a part of
// every block: each is counted at all of them.
struct KvNodeStats {
  int64_t capacity_blocks = 0;
  int64_t free_blocks = 0;
  int64_t cached_blocks = 0;
  int64_t referenced_blocks = 0;
  int64_t committed_bytes = 0;
};

// One tenant's blocks, now, and what it was refused.
struct KvTenantStats {
  int64_t used_blocks = 0;    // referenced
  int64_t quota_blocks = -1;  // -1 = none
  int64_t sequences = 0;
  int64_t refusals = 0;
};

struct KvTenant {
  TenantId id = 0;
  KvTenantStats stats;
};

// What the pool gives back for a while (KvPool::GiveBack).
struct GiveBackOptions {
  int64_t bytes = 0;         // wanted; in whole slabs, so up to one more
  int64_t keep_blocks = 0;   // capacity that must stay
  bool move_blocks = false;  // also out of the way, what sequences hold
};

// What a change of the pool's size came to.
struct KvResize {
  int64_t capacity_blocks = 0;  // afterwards
  int64_t committed_bytes = 0;  // afterwards
  int64_t evicted_blocks = 0;
  int64_t moved_blocks = 0;
  int64_t released_bytes = 0;  // given back to the system
  int64_t regained_bytes = 0;  // taken from it
};

// Threads: every member is safe from any thread. Sequences are locked one by
//          one (in 32 groups), blocks not at all; only a change of capacity
//          shuts everybody out, for as long as its moves take, never while
//          memory is committed or given back. Spans and views it returns stay
//          valid until the named sequence changes. Reading a sequence's K/V
//          while another thread frees it is the caller's race.
class VARLANE_EXPORT KvPool {
 public:
  // Reserves, commits and first-touches the pool on `runtime`'s nodes, blocks
  // or the shards of each spread evenly over them.
  //
  // Errors: kInvalidArgument (layout, num_blocks, heads that cannot be cut into
  //         equal shards ...); kResourceExhausted when
  //         a limit would be passed, naming it, what is available and how many
  //         blocks would fit. Nothing stays allocated then.
  // Lifetime: `runtime` must outlive the pool.
  static Result<std::unique_ptr<KvPool>> Create(const KvPoolOptions& options,
                                                Runtime* runtime);
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  const KvLayout& layout() const noexcept;
  // The memory, for launches. Valid while the pool lives.
  KvView view() const noexcept;
  int64_t capacity_blocks() const noexcept;
  // Free blocks, and cached ones that would be evicted for an append.
  int64_t free_blocks() const;
  KvPoolStats stats() const;
  // Nodes whose memory the pool has: the arenas of its Runtime, by their
  // numbers there. Runtime::MemoryOfNode tells which NUMA node an arena's
  // memory is.
  int num_nodes() const noexcept;
  int num_shards() const noexcept;  // num_nodes() where heads are sharded, or 1
  KvNodeStats node_stats(int node) const;  // all 0 for a node there is not
  // Asks the kernel about every page of a node's blocks, or of all nodes'.
  // Nothing moves. Cost: 0.1 us a base page.
  KvPlacement MeasurePlacement(int node = -1) const;
  // The node whose memory holds the block, in [0, num_nodes()); 0 for an id
  // that is no block, and where heads are sharded. Arithmetic: node n's ids are
  // [n * stride, n * stride + its capacity), see KvView.
  int NodeOfBlock(BlockId block) const noexcept;
  // The file that backs the pool (MemoryBacking::kMemfd); -1 = none. Block b
  // stands at b * block_bytes, or its parts where KvView::part has them from
  // base on. Owned by the pool.
  int memory_fd() const noexcept;

  // --- size ------------------------------------------------------------------
  // Commits `num_blocks` more. Errors: kOutOfRange past max_blocks;
  // kResourceExhausted as Create, or past SetLimit's limit. Strong guarantee:
  // nothing changes then.
  Status Grow(int64_t num_blocks);
  // Takes `num_blocks` away: evicts cached blocks, moves referenced ones out of
  // the way, and gives slabs back that no block needs.
  // Errors: kResourceExhausted where referenced blocks need more than is left,
  //         naming what is possible; kFailedPrecondition where blocks would
  //         have to move while a step is outstanding (BeginStep);
  //         kInvalidArgument. Nothing changes then.
  Result<KvResize> Shrink(int64_t num_blocks);
  // From now on the pool has at most `bytes` committed, in whole slabs, and as
  // many blocks as they hold up to max_blocks: shrinks or grows to that.
  // Errors: as Shrink and Grow. Nothing changes then, the limit included.
  Result<KvResize> SetLimit(int64_t bytes);
  // The smallest limit that SetLimit would accept now: what referenced blocks
  // need, in whole slabs.
  int64_t MinLimitBytes() const;
  // Moves blocks from a node's last slabs into free ones before, until as many
  // slabs as possible hold none, and moves at most `max_moves`. Gives nothing
  // back by itself: Shrink and SetLimit do. Contents are kept bit by bit.
  // Errors: kFailedPrecondition while a step is outstanding.
  Result<KvResize> Compact(int64_t max_moves = INT64_MAX);
  // Frees up to `num_blocks` cached blocks, least recently used first; returns
  // how many.
  int64_t EvictCached(int64_t num_blocks);

  // --- lending memory to the system, under pressure
  // --------------------------- Gives back whole slabs, free blocks first, then
  // cached ones, least recently used first; never what sequences hold. Unlike
  // Shrink it gives what can be had, nothing if need be, and remembers the
  // blocks as lent: what was fitting before is made to wait (kWait), not
  // refused (kNeverFits). Without move_blocks it may be called while steps are
  // outstanding. Errors: kInvalidArgument; kFailedPrecondition (move_blocks
  // while a step is
  //         outstanding); kResourceExhausted (heap, the system's).
  Result<KvResize> GiveBack(const GiveBackOptions& options);
  // Takes lent blocks back, as many as whole slabs of `bytes` hold.
  // Errors: kInvalidArgument; kUnavailable (AllowGrowth); as Grow. Nothing
  //         changes then.
  Result<KvResize> TakeBack(int64_t bytes);
  // Blocks that GiveBack took and TakeBack could still bring; 0 after Grow,
  // Shrink or SetLimit, which say anew how large the pool is.
  int64_t lent_blocks() const noexcept;
  // While not allowed Grow, TakeBack and a SetLimit that would grow are refused
  // (kUnavailable).
  void AllowGrowth(bool allowed) noexcept;

  // Between these two blocks stay where they are: block tables, slots and plans
  // that name them stay true. A scheduler calls them around each step; without
  // them whoever shrinks or compacts must do so between steps. They count, so
  // several steps may be outstanding. BeginStep waits for a change under way.
  void BeginStep();
  void EndStep();

  // --- tenants ---------------------------------------------------------------
  // At most `max_blocks` blocks for the tenant's sequences, each shared block
  // once; -1 = no quota. What it holds above a lowered quota stays its own.
  // Errors: kInvalidArgument; kResourceExhausted (heap).
  Status SetTenantQuota(TenantId tenant, int64_t max_blocks);
  KvTenantStats tenant_stats(TenantId tenant) const;
  // Those with a sequence, a block or a quota, by id. Throws std::bad_alloc.
  std::vector<KvTenant> tenants() const;

  // --- sequences -----------------------------------------------------------
  // A new, empty sequence; takes no block. -1, which is no sequence, when the
  // heap is exhausted or `home_node` is no node.
  SeqId CreateSequence(const SequenceOptions& options = {});
  // Makes room for `num_tokens` more tokens and advances the length. The blocks
  // that the new tokens fall into become exclusively the sequence's: a shared
  // tail is copied first (CoW). All or nothing.
  // Errors: kNotFound (no such sequence), kInvalidArgument (num_tokens < 0).
  Result<Admission> Append(SeqId seq, int64_t num_tokens);
  // What Append would answer, changing nothing.
  Result<Admission> CanAppend(SeqId seq, int64_t num_tokens) const;
  // A new sequence with the same tokens, tenant and home, sharing every block.
  // O(blocks).
  Result<SeqId> Fork(SeqId seq);
  // Cuts the sequence to `length` tokens and gives whole blocks back.
  // Errors: kNotFound; kInvalidArgument when length is not in [0, length].
  Status Truncate(SeqId seq, int64_t length);
  // Drops the sequence and its references. Errors: kNotFound.
  Status Free(SeqId seq);

  // --- prefixes ------------------------------------------------------------
  // Full blocks whose tokens are known can be found by a later sequence of the
  // same tenant that begins with the same tokens, while they are referenced and
  // until they are evicted. Without KvPoolOptions::prefix_cache nothing is ever
  // found, and what is committed is forgotten.

  // A new sequence with the longest known prefix of `prompt` that leaves at
  // least one token, so that there is a row to sample from: its whole blocks
  // are shared, and a block that begins like the next one is copied. O(tokens).
  // What a quota does not allow is not taken.
  // Errors: kInvalidArgument (home_node); kResourceExhausted (heap).
  Result<PrefixMatch> MatchPrefix(const SequenceOptions& options,
                                  std::span<const int32_t> prompt);
  // What MatchPrefix would share, in whole blocks, changing nothing.
  Result<PrefixMatch> FindPrefix(TenantId tenant,
                                 std::span<const int32_t> prompt) const;
  // Says that positions [begin, begin + tokens.size()) of the sequence are
  // these tokens and that their K/V is written, in every layer: from now on
  // others may find them. What is committed already is skipped, so a call may
  // be repeated; Truncate takes back what it cuts. Where another sequence has
  // computed the same block this one gets that one in its table and gives its
  // own back: read the table again.
  // Errors: kNotFound; kOutOfRange where positions are not in the sequence or
  //         begin behind what is committed; kInvalidArgument where a block that
  //         is shared is known to hold other tokens; kResourceExhausted (heap).
  Status CommitTokens(SeqId seq, int64_t begin,
                      std::span<const int32_t> tokens);
  // Keeps the longest known prefix of `prompt`, in whole blocks, from eviction.
  // Errors: kFailedPrecondition (no prefix cache); kResourceExhausted (heap).
  Result<PrefixPin> PinPrefix(TenantId tenant, std::span<const int32_t> prompt);
  // Errors: kNotFound.
  Status UnpinPrefix(int64_t pin);
  PrefixCacheStats prefix_stats() const;

  Result<int64_t> Length(SeqId seq) const;  // tokens
  // Copies the sequence's block table to `out` (its first ceil(length /
  // block_size) entries) and returns that count.
  // Errors: kNotFound; kOutOfRange when `out` is too short.
  Result<int64_t> CopyBlockTable(SeqId seq, std::span<int32_t> out) const;
  // slot = block * block_size + offset of tokens [begin, begin + out.size()).
  // Errors: kNotFound; kOutOfRange when they are not all in the sequence.
  Status CopySlotMapping(SeqId seq, int64_t begin,
                         std::span<int64_t> out) const;

  // Walks everything and compares: free + cached + referenced == capacity,
  // reference counts == table entries, no block in two states. O(capacity);
  // shuts everybody out meanwhile.
  // Errors: kInternal naming the first contradiction.
  Status CheckInvariants() const;

 private:
  class Impl;
  explicit KvPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_KV_POOL_H_
