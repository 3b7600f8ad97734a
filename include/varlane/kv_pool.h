// KvPool: paged KV memory, its blocks, and the sequences that hold them.
//
// Address space for the largest pool is reserved once; memory is committed in
// slabs (multiples of 2 MiB) on their NUMA node; growth never moves a block.
// Blocks are reference-counted: a fork shares them, the first write to a shared
// block copies it, truncation gives blocks back. At every moment
// `free + referenced == capacity`, and reference counts equal the table entries
// that name them. Layer 2.
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

struct KvPoolOptions {
  KvLayout layout;
  int64_t num_blocks = 0;  // capacity committed at Create
  int64_t max_blocks = 0;  // address space; 0 = num_blocks
  HugePages huge_pages = HugePages::kTransparent;
  bool check_limits = true;  // re-read MemoryLimits slab by slab while
                             // committing, and refuse before the kernel kills
  bool shuffle = false;      // hand out blocks in a random order (tests,
  uint64_t seed = 0;         //   benches); else lowest id first
};

// The answer to "may this sequence grow?": a value, never an exception.
struct Admission {
  enum class Kind : uint8_t {
    kAdmitted,   // done; the blocks are the sequence's
    kWait,       // would fit an emptier pool: needed > free
    kNeverFits,  // what the sequence holds + new blocks > capacity: waiting
                 //   for others cannot help
  };
  Kind kind = Kind::kAdmitted;
  int64_t needed_blocks = 0;
  int64_t free_blocks = 0;  // at the moment of asking
  int64_t capacity_blocks = 0;

  bool admitted() const { return kind == Kind::kAdmitted; }
};

struct KvPoolStats {
  int64_t capacity_blocks = 0;
  int64_t free_blocks = 0;
  int64_t referenced_blocks = 0;  // distinct blocks in at least one table
  int64_t references = 0;         // table entries
  int64_t peak_referenced_blocks = 0;
  int64_t sequences = 0;
  int64_t cow_copies = 0;
  int64_t committed_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t slab_bytes = 0;
  int64_t num_slabs = 0;
  int64_t huge_page_bytes = 0;  // what the kernel really gave, from smaps, as
                                //   of the last growth
  HugePages huge_pages = HugePages::kOff;  // the kind it gave
};

// Threads: every member is safe from any thread. Spans and views it returns
//          stay valid until the named sequence changes. Reading a sequence's
//          K/V while another thread frees it is the caller's race.
class VARLANE_EXPORT KvPool {
 public:
  // Reserves, commits and first-touches the pool on `runtime`'s nodes, blocks
  // spread evenly over them.
  //
  // Errors: kInvalidArgument (layout, num_blocks); kResourceExhausted when a
  //         limit would be passed, naming it, what is available and how many
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
  int64_t free_blocks() const;
  KvPoolStats stats() const;
  // NUMA node (index into Topology::nodes) whose memory holds the block's first
  // byte; 0 for an id that is no block.
  int NodeOfBlock(BlockId block) const noexcept;

  // Commits `num_blocks` more. Errors: kOutOfRange past max_blocks;
  // kResourceExhausted as Create. Strong guarantee: nothing changes then.
  Status Grow(int64_t num_blocks);

  // --- sequences -----------------------------------------------------------
  // A new, empty sequence; takes no block. -1, which is no sequence, when the
  // heap is exhausted.
  SeqId CreateSequence();
  // Makes room for `num_tokens` more tokens and advances the length. The blocks
  // that the new tokens fall into become exclusively the sequence's: a shared
  // tail is copied first (CoW). All or nothing.
  // Errors: kNotFound (no such sequence), kInvalidArgument (num_tokens < 0).
  Result<Admission> Append(SeqId seq, int64_t num_tokens);
  // What Append would answer, changing nothing.
  Result<Admission> CanAppend(SeqId seq, int64_t num_tokens) const;
  // A new sequence with the same tokens, sharing every block. O(blocks).
  Result<SeqId> Fork(SeqId seq);
  // Cuts the sequence to `length` tokens and gives whole blocks back.
  // Errors: kNotFound; kInvalidArgument when length is not in [0, length].
  Status Truncate(SeqId seq, int64_t length);
  // Drops the sequence and its references. Errors: kNotFound.
  Status Free(SeqId seq);

  Result<int64_t> Length(SeqId seq) const;  // tokens
  // Copies the sequence's block table to `out` (its first ceil(length /
  // block_size) entries) and returns that count.
  // Errors: kNotFound; kOutOfRange when `out` is too short.
  Result<int64_t> CopyBlockTable(SeqId seq, std::span<int32_t> out) const;
  // slot = block * block_size + offset of tokens [begin, begin + out.size()).
  // Errors: kNotFound; kOutOfRange when they are not all in the sequence.
  Status CopySlotMapping(SeqId seq, int64_t begin,
                         std::span<int64_t> out) const;

  // Walks everything and compares: free + referenced == capacity, reference
  // counts == table entries, no block both free and referenced. O(capacity).
  // Errors: kInternal naming the first contradiction.
  Status CheckInvariants() const;

 private:
  class Impl;
  explicit KvPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_KV_POOL_H_
