// BlockMemory: the bytes of a pool's blocks.
//
// Address space for all of them is reserved once; blocks are packed into it
// without gaps, so a block's address never changes. A slab is a range of bytes
// (a power-of-two multiple of 2 MiB), not of blocks: a block may reach over a
// slab's end. Slabs are committed in order, each by a worker of its NUMA node:
//
//   | slab 0 | slab 1 | slab 2 | slab 3 |  reserved, not committed  |
//   | b0 | b1 | b2 | b3 | b4 | b5 |.....|
//   |     node 0      |     node 1      |
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
#include <vector>

#include "varlane/memory_budget.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

struct BlockMemoryOptions {
  int64_t block_bytes = 0;
  int64_t max_blocks = 0;
  HugePages huge_pages = HugePages::kTransparent;
  bool check_limits = true;
};

struct BlockMemoryStats {
  int64_t committed_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t slab_bytes = 0;
  int64_t num_slabs = 0;                   // committed
  int64_t huge_page_bytes = 0;             // as of the last commit
  HugePages huge_pages = HugePages::kOff;  // the weakest that any slab got
};

// The slab of a pool of `pool_bytes`: about a 64th of it, in [2 MiB, 64 MiB].
// So rounding up to slabs wastes at most 1/64 (or 2 MiB), and a large pool is
// not checked and committed in thousands of steps.
int64_t SlabBytesFor(int64_t pool_bytes);

// What a pool leaves untouched of a limit: half of the limit's reserve. A plan
// left all of it, so what was planned at the edge can be had.
int64_t UntouchedBytes(const MemoryLimit& limit);

// Threads: Commit from one thread at a time (the owner locks); the rest reads
//          what a returned Commit wrote, and may run beside a Commit for the
//          blocks of earlier ones.
class BlockMemory {
 public:
  // Reserves address space for max_blocks; commits nothing.
  //
  // Requires: block_bytes > 0, 0 < max_blocks <= INT32_MAX.
  // Errors:   kInvalidArgument (overflow); kResourceExhausted (RLIMIT_AS).
  // Lifetime: `runtime` must outlive it.
  static Result<std::unique_ptr<BlockMemory>> Create(
      const BlockMemoryOptions& options, Runtime* runtime);
  ~BlockMemory();
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  // Commits and populates what the first `num_blocks` blocks need beyond what
  // is committed already, spread evenly over the nodes.
  //
  // Requires: num_blocks <= max_blocks.
  // Errors:   kResourceExhausted naming the limit, what is available and how
  //           many blocks would fit. What this call had taken is given back.
  Status Commit(int64_t num_blocks);

  std::byte* base() const noexcept { return base_; }
  // Node of the block's first byte. Requires: the block is committed.
  int NodeOfBlock(int64_t block) const noexcept;
  const BlockMemoryStats& stats() const noexcept { return stats_; }

 private:
  BlockMemory(const BlockMemoryOptions& options, Runtime* runtime);

  // Bytes that are about to be taken, by what counts them.
  struct Need {
    int64_t address = 0;  // RLIMIT_AS: mapped, be it inaccessible
    int64_t data = 0;     // RLIMIT_DATA: made writable
    int64_t touched = 0;  // RAM and cgroups
  };
  // Refuses where `need` more would pass a limit or enter its reserve.
  Status CheckRoom(const Need& need, int64_t num_blocks) const;

  Status CommitSlab(int64_t slab, int node, int64_t num_blocks);
  Status CommitSlabs(int64_t end, int64_t num_blocks);
  void DecommitFrom(int64_t slab) noexcept;
  void UpdateStats();

  BlockMemoryOptions options_;
  Runtime* runtime_;
  std::byte* base_ = nullptr;
  BlockMemoryStats stats_;
  // [all slabs that can ever be], so that a growth moves nothing readers use.
  std::vector<int> node_of_slab_;
  std::vector<HugePages> pages_of_slab_;
  int64_t num_committed_ = 0;  // slabs
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_MEMORY_H_
