// Scratch memory of workers: leased for a drain, kept between launches.
//
// A block belongs to whoever holds its lease, not to a thread or a worker
// number: launches from inside bodies and from several callers at once thereby
// never share one. Each worker has a favourite block that it normally gets
// back, so that its pages, first touched by that worker, stay on its node.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_SCRATCH_H_
#define VARLANE_RUNTIME_SCRATCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "varlane/status.h"

namespace varlane {

// Threads: every member is safe from any thread.
// Cost:    a lease is one atomic exchange once its block is large enough.
class ScratchPool {
 public:
  // `node_of_worker` has an entry a worker; nodes are [0, num_nodes).
  ScratchPool(std::vector<int> node_of_worker, int num_nodes);
  ~ScratchPool();  // requires: no lease is out
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  class Lease;

  // Scratch of at least `bytes`, page-aligned, for worker `worker`; mapped by
  // the calling thread and touched first by its user. Zero bytes: an empty
  // lease that costs nothing. Errors: kResourceExhausted.
  Status Acquire(int worker, size_t bytes, Lease* lease) noexcept;

 private:
  struct Block {
    std::byte* data = nullptr;
    int64_t bytes = 0;
    Block* next = nullptr;
  };
  // Padded: neighbours exchange their favourites at the same time.
  struct alignas(64) Favourite {
    std::atomic<Block*> block = nullptr;
  };
  struct alignas(64) Spares {
    std::mutex mutex;
    Block* first = nullptr;
  };

  Block* Take(int worker) noexcept;
  void Put(int worker, Block* block) noexcept;
  static Status Grow(Block* block, size_t bytes) noexcept;
  static void Free(Block* block) noexcept;

  std::vector<int> node_of_worker_;
  std::unique_ptr<Favourite[]> favourites_;  // [workers]
  std::unique_ptr<Spares[]> spares_;         // [nodes]
  int num_nodes_;
};

// Holds one block; gives it back when it ends.
class ScratchPool::Lease {
 public:
  Lease() noexcept = default;
  ~Lease() {
    if (block_ != nullptr) pool_->Put(worker_, block_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  friend class ScratchPool;
  ScratchPool* pool_ = nullptr;
  Block* block_ = nullptr;
  int worker_ = 0;
  std::span<std::byte> bytes_;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_SCRATCH_H_
