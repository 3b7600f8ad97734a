// BlockMemory: the bytes of a pool's blocks.
//
// Address space for all of them is reserved once; each NUMA node has one range
// of it, and so one range of ids. Blocks are packed into a node's range without
// gaps, so a block's address never changes. A slab is a range of bytes (a
// power-of-two multiple of 2 MiB), not of blocks: a block may reach over a
// slab's end. A node's slabs are committed from its first one on, by a worker
// of the node, and given back from the last one on:
//
//   |           node 0          |           node 1          |
//   | slab | slab |  reserved   | slab | slab |  reserved   |
//   |b0|b1|b2|b3|b4|            |b8|b9|...
//
// Where blocks are sharded over the nodes there is one range of ids, and every
// node has an equal part of each block; a slab is then as many parts, one a
// node, that are committed and given back together:
//
//   |         shard 0, on node 0         |         shard 1, on node 1         |
//   | part of slab 0 | of 1 |  reserved  | part of slab 0 | of 1 |  reserved  |
//   |b0|b1|b2|b3|b4|b5|b6|               |b0|b1|b2|b3|b4|b5|b6|
//
// Under a memory cgroup touching too much is no error, it is the process's end;
// so the limits are read before anything is touched, and again for every slab.
// Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_MEMORY_H_
#define VARLANE_MEMORY_BLOCK_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/numa_memory.h"
#include "varlane/kv_pool.h"
#include "varlane/memory_budget.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

struct BlockMemoryOptions {
  int64_t block_bytes = 0;
  int64_t max_blocks = 0;
  HugePages huge_pages = HugePages::kTransparent;
  MemoryBacking backing = MemoryBacking::kAnonymous;
  MemoryLock lock = MemoryLock::kOff;
  bool shard_blocks = false;  // over the runtime's nodes
  bool check_limits = true;
};

struct BlockMemoryStats {
  int64_t committed_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t slab_bytes = 0;                  // of all its parts
  int64_t num_slabs = 0;                   // committed
  int64_t slabs_released = 0;              // since Create
  int64_t slabs_regained = 0;              // since Create: released before
  int64_t huge_page_bytes = 0;             // as of the last commit
  HugePages huge_pages = HugePages::kOff;  // the weakest that any slab got
  int64_t locked_bytes = 0;
  int lock_error = 0;       // errno of the last mlock that failed
  int mempolicy_error = 0;  // errno of the last mbind that failed
};

// The slab of a pool of `pool_bytes`, or its part of a shard of so many: about
// a 64th of it, in [2 MiB, 64 MiB]. So rounding up to slabs wastes at most 1/64
// (or 2 MiB), and a large pool is not checked and committed in thousands of
// steps.
int64_t SlabBytesFor(int64_t pool_bytes);

// What a pool leaves untouched of a limit: half of the limit's reserve. A plan
// left all of it, so what was planned at the edge can be had.
int64_t UntouchedBytes(const MemoryLimit& limit);

// Threads: Commit and Release from one thread at a time (the owner locks); the
//          rest reads what never changes, but stats(), which the owner locks
//          as well.
class BlockMemory {
 public:
  // Reserves address space for max_blocks; commits nothing.
  //
  // Requires: block_bytes > 0, 0 < max_blocks <= INT32_MAX; sharded blocks can
  //           be cut into as many equal parts as the runtime has nodes.
  // Errors:   kInvalidArgument (overflow); kResourceExhausted (RLIMIT_AS).
  // Lifetime: `runtime` must outlive it.
  static Result<std::unique_ptr<BlockMemory>> Create(
      const BlockMemoryOptions& options, Runtime* runtime);
  ~BlockMemory();
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  // Commits and populates what the first `num_blocks[n]` blocks of each node n
  // need beyond what is committed already.
  //
  // Requires: num_blocks [num_nodes()], none above blocks_per_node().
  // Errors:   kResourceExhausted naming the limit, what is available and how
  //           many blocks would fit. What this call had taken is given back.
  Status Commit(std::span<const int64_t> num_blocks);
  // The same with `num_blocks` blocks in all, spread evenly over the nodes.
  Status Commit(int64_t num_blocks);

  // Gives back the slabs that the first `num_blocks[n]` blocks of each node do
  // not need. They are committed anew, and zero, when Commit wants them again.
  // Errors: kResourceExhausted, kInternal (the system's). What is given back by
  //         then is committed again where that is possible: committed_blocks()
  //         tells.
  Status Release(std::span<const int64_t> num_blocks);

  std::byte* base() const noexcept { return base_; }
  // As many parts of each block, which stand shard_stride() bytes apart; 1 =
  // blocks are whole.
  int num_shards() const noexcept { return num_shards_; }
  int64_t part_bytes() const noexcept {
    return options_.block_bytes / num_shards_;
  }
  int64_t shard_stride() const noexcept {
    return num_shards_ > 1 ? range_bytes_ : 0;
  }
  std::byte* BlockPart(int64_t block, int shard) const noexcept {
    return base_ + shard * range_bytes_ + block * part_bytes();
  }
  // Nodes that ids tell apart: 1 where blocks are sharded.
  int num_nodes() const noexcept { return static_cast<int>(nodes_.size()); }
  // Nodes whose memory it has.
  int memory_nodes() const noexcept { return num_nodes() * num_shards_; }
  // Ids a node can ever have: node n's begin at n * blocks_per_node().
  int64_t blocks_per_node() const noexcept { return blocks_per_node_; }
  int NodeOfBlock(int64_t block) const noexcept {
    return static_cast<int>(block / blocks_per_node_);
  }
  // How many of its first blocks a node's slabs hold in whole.
  int64_t committed_blocks(int node) const noexcept;
  int64_t committed_bytes(int node) const noexcept;  // of all its shards
  // Blocks that `bytes` hold in whole slabs, spread evenly over the nodes; no
  // more than max_blocks in all. Returns their sum.
  int64_t BlocksIn(int64_t bytes,
                   std::span<int64_t> num_blocks = {}) const noexcept;
  // Bytes of the slabs that `num_blocks` blocks of one node need.
  int64_t SlabBytesOf(int64_t num_blocks) const noexcept;
  int memory_fd() const noexcept { return fd_; }
  // Where the first `bytes` of one of memory_nodes() are. Any thread.
  PagePlacement QueryPages(int memory_node, int64_t bytes) const noexcept;
  const BlockMemoryStats& stats() const noexcept { return stats_; }

 private:
  BlockMemory(const BlockMemoryOptions& options, Runtime* runtime);

  // A node's slabs.
  struct Node {
    int64_t committed = 0;         // slabs, from the first on
    int64_t ever = 0;              // most there were before a release
    std::vector<HugePages> pages;  // [all that can be] of those committed,
                                   // the weakest of their parts
    std::vector<int64_t> locked;   // likewise, bytes
  };
  struct Range {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  // Bytes that are about to be taken, by what counts them.
  struct Need {
    int64_t address = 0;  // RLIMIT_AS: mapped, be it inaccessible
    int64_t data = 0;     // RLIMIT_DATA: made writable
    int64_t touched = 0;  // RAM and cgroups
  };

  // A range of address space is a node's, or a shard's: number node + shard, of
  // which one is 0. It is for the memory of the runtime's node of that number.
  //
  // The system's index of that node; -1: of any.
  int SystemNode(int range) const noexcept;
  // What a range has of slabs [begin, end); the last one may be cut short.
  Range SlabRange(int range, int64_t begin, int64_t end) const noexcept;
  // Bytes of a node's slabs [begin, end), all parts of them.
  int64_t BytesOf(int node, int64_t begin, int64_t end) const noexcept;
  int64_t SlabsOf(int64_t num_blocks) const noexcept;
  int64_t total_committed_bytes() const noexcept;
  // Refuses where `need` more would pass a limit or enter its reserve.
  Status CheckRoom(const Need& need, int64_t num_blocks) const;
  bool HasRoomFor(int64_t bytes) const noexcept;
  Status CommitSlab(int node, int64_t num_blocks, bool another);
  Status CommitSlabs(std::span<const int64_t> num_blocks, int64_t total);
  Status CommitPart(int range, int64_t slab, int64_t num_blocks, bool another,
                    Node* owner);
  Status PopulateOnNode(int range, const Range& part);
  Status Populate(const Range& part, int64_t next_bytes);
  Status LockPart(const Range& part, int64_t* locked);
  Status Decommit(int node, int64_t begin, int64_t end);
  void CountSlabs() noexcept;
  void UpdateStats();

  BlockMemoryOptions options_;
  Runtime* runtime_;
  std::byte* base_ = nullptr;
  int fd_ = -1;
  int num_shards_ = 1;
  int64_t blocks_per_node_ = 0;
  int64_t range_bytes_ = 0;      // of address space, a node or shard
  int64_t slab_part_bytes_ = 0;  // of a slab, a shard
  BlockMemoryStats stats_;
  std::vector<Node> nodes_;
  bool has_room_ = false;        // for the next slab: found out already
  std::vector<int64_t> before_;  // [nodes] slabs before the commit under way
  std::vector<int64_t> even_;    // [nodes] scratch of Commit(int64_t)
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_MEMORY_H_
