// SPDX-License-Identifier: Apache-2.0

#include "runtime/scratch.h"

#include <limits>
#include <new>
#include <utility>

#include "base/check.h"
#include "runtime/numa_memory.h"
#include "varlane/runtime.h"

namespace varlane {

ScratchPool::ScratchPool(std::vector<int> node_of_worker, int num_nodes)
    : node_of_worker_(std::move(node_of_worker)),
      favourites_(std::make_unique<Favourite[]>(node_of_worker_.size())),
      spares_(std::make_unique<Spares[]>(static_cast<size_t>(num_nodes))),
      num_nodes_(num_nodes) {}

ScratchPool::~ScratchPool() {
  for (size_t i = 0; i < node_of_worker_.size(); ++i) {
    Free(favourites_[i].block.load(std::memory_order_acquire));
  }
  for (int node = 0; node < num_nodes_; ++node) {
    Block* block = spares_[static_cast<size_t>(node)].first;
    while (block != nullptr) Free(std::exchange(block, block->next));
  }
}

Status ScratchPool::Acquire(int worker, size_t bytes, Lease* lease) noexcept {
  if (bytes == 0) return {};
  Block* const block = Take(worker);
  if (block == nullptr) {
    return {StatusCode::kResourceExhausted, "no memory for a scratch block"};
  }
  if (static_cast<uint64_t>(block->bytes) < bytes) {
    if (Status status = Grow(block, bytes); !status.ok()) {
      Put(worker, block);
      return status;
    }
  }
  lease->pool_ = this;
  lease->block_ = block;
  lease->worker_ = worker;
  lease->bytes_ = {block->data, bytes};
  return {};
}

ScratchPool::Block* ScratchPool::Take(int worker) noexcept {
  const auto index = static_cast<size_t>(worker);
  // acquire: what the last holder wrote to the block's fields.
  Block* block =
      favourites_[index].block.exchange(nullptr, std::memory_order_acquire);
  if (block != nullptr) return block;
  Spares& spares = spares_[static_cast<size_t>(node_of_worker_[index])];
  {
    const std::lock_guard lock(spares.mutex);
    block = spares.first;
    if (block != nullptr) spares.first = block->next;
  }
  return block != nullptr ? block : new (std::nothrow) Block;
}

void ScratchPool::Put(int worker, Block* block) noexcept {
  const auto index = static_cast<size_t>(worker);
  Block* empty = nullptr;
  if (favourites_[index].block.compare_exchange_strong(
          empty, block, std::memory_order_release, std::memory_order_relaxed)) {
    return;
  }
  Spares& spares = spares_[static_cast<size_t>(node_of_worker_[index])];
  const std::lock_guard lock(spares.mutex);
  block->next = spares.first;
  spares.first = block;
}

Status ScratchPool::Grow(Block* block, size_t bytes) noexcept {
  ReleaseAddressSpace(block->data, block->bytes);
  block->data = nullptr;
  block->bytes = 0;
  if (bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max() / 2)) {
    return {StatusCode::kResourceExhausted,
            "scratch_bytes is more than any machine has"};
  }
  const int64_t page = BasePageBytes();
  const int64_t size = (static_cast<int64_t>(bytes) + page - 1) / page * page;
  const bool is_large = size >= kHugePageBytes;
  try {
    Result<std::byte*> data =
        ReserveAddressSpace(size, is_large ? kHugePageBytes : page);
    VARLANE_RETURN_IF_ERROR(data.status());
    Result<HugePages> got = CommitMemory(
        *data, size, is_large ? HugePages::kTransparent : HugePages::kOff);
    if (!got.ok()) {
      ReleaseAddressSpace(*data, size);
      return got.status();
    }
    block->data = *data;
    block->bytes = size;
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted, "no memory for scratch"};
  }
  return {};
}

void ScratchPool::Free(Block* block) noexcept {
  if (block == nullptr) return;
  ReleaseAddressSpace(block->data, block->bytes);
  delete block;
}

}  // namespace varlane
