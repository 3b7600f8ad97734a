// KvPool: bytes (BlockMemory), counts (BlockAllocator) and tables (BlockTable)
// behind one mutex.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/kv_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "memory/block_allocator.h"
#include "memory/block_memory.h"
#include "memory/block_table.h"

namespace varlane {
namespace {

Status NotFound(SeqId seq) {
  return {StatusCode::kNotFound,
          MessageCat("seq = ", seq, ", but the pool has no such sequence")};
}

Status OutOfMemory(const char* what) {
  return {StatusCode::kResourceExhausted,
          MessageCat("no memory for ", what, " (not KV: the process's heap)")};
}

Status Validate(const KvPoolOptions& options, const Runtime* runtime) {
  constexpr int64_t kMost = std::numeric_limits<BlockId>::max();
  VARLANE_REQUIRE_ARG(runtime != nullptr, "runtime is null");
  VARLANE_RETURN_IF_ERROR(options.layout.Validate());
  VARLANE_REQUIRE_ARG(options.num_blocks >= 1 && options.num_blocks <= kMost,
                      "num_blocks = ", options.num_blocks, ", must be in [1, ",
                      kMost, "]");
  VARLANE_REQUIRE_ARG(
      options.max_blocks == 0 || (options.max_blocks >= options.num_blocks &&
                                  options.max_blocks <= kMost),
      "max_blocks = ", options.max_blocks,
      ", must be 0 or in [num_blocks = ", options.num_blocks, ", ", kMost, "]");
  return {};
}

}  // namespace

class KvPool::Impl {
 public:
  // `memory` holds max_blocks, options.num_blocks of them committed. May throw
  // std::bad_alloc.
  Impl(const KvPoolOptions& options, int64_t max_blocks,
       std::unique_ptr<BlockMemory> memory)
      : layout_(options.layout),
        block_bytes_(options.layout.block_bytes()),
        memory_(std::move(memory)),
        allocator_({.num_nodes = 1,
                    .blocks_per_node = max_blocks,
                    .shuffle = options.shuffle,
                    .seed = options.seed}),
        memory_stats_(memory_->stats()) {
    const bool grown = allocator_.Grow(0, options.num_blocks);
    VARLANE_DCHECK(grown);
    (void)grown;
    capacity_.store(options.num_blocks, std::memory_order_release);
  }

  const KvLayout& layout() const { return layout_; }
  std::byte* base() const { return memory_->base(); }
  int64_t capacity() const { return capacity_.load(std::memory_order_acquire); }
  int NodeOfBlock(BlockId block) const {
    return block >= 0 && block < capacity() ? memory_->NodeOfBlock(block) : 0;
  }

  Status Grow(int64_t num_blocks);
  SeqId CreateSequence();
  Result<Admission> Append(SeqId seq, int64_t num_tokens);
  Result<Admission> CanAppend(SeqId seq, int64_t num_tokens) const;
  Result<SeqId> Fork(SeqId seq);
  Status Truncate(SeqId seq, int64_t length);
  Status Free(SeqId seq);
  Result<int64_t> Length(SeqId seq) const;
  Result<int64_t> CopyBlockTable(SeqId seq, std::span<int32_t> out) const;
  Status CopySlotMapping(SeqId seq, int64_t begin,
                         std::span<int64_t> out) const;
  KvPoolStats stats() const;
  Status CheckInvariants() const;

 private:
  using Sequences = std::unordered_map<SeqId, BlockTable>;

  // What an append would take: the table's plan and the blocks for it.
  struct AppendPlan {
    BlockTable::Growth growth;
    bool copies_tail = false;
    Admission admission;
  };

  // All below require mutex_ to be held.
  const BlockTable* Find(SeqId seq) const {
    const auto found = sequences_.find(seq);
    return found == sequences_.end() ? nullptr : &found->second;
  }
  BlockTable* Find(SeqId seq) {
    return const_cast<BlockTable*>(std::as_const(*this).Find(seq));
  }
  AppendPlan PlanAppend(const BlockTable& table, int64_t num_tokens) const;
  void CopyTail(BlockTable* table, int64_t entry);
  // Allocates a block that PlanAppend has promised.
  BlockId Take();
  Status ReleaseAll(std::span<const BlockId> blocks);
  void NotePeak() {
    peak_referenced_ =
        std::max(peak_referenced_, allocator_.referenced_blocks());
  }
  std::byte* BlockData(BlockId block) const {
    return memory_->base() + block * block_bytes_;
  }

  const KvLayout layout_;
  const int64_t block_bytes_;
  const std::unique_ptr<BlockMemory> memory_;

  // Held while memory is committed, which may take seconds; mutex_ is not, so
  // that sequences go on meanwhile. Taken before mutex_.
  std::mutex grow_mutex_;

  mutable std::mutex mutex_;
  BlockAllocator allocator_;
  Sequences sequences_;
  SeqId next_seq_ = 0;
  int64_t peak_referenced_ = 0;
  int64_t cow_copies_ = 0;
  BlockMemoryStats memory_stats_;  // memory_'s, as of the last growth

  // Written under mutex_ once the blocks below it can be touched; read by
  // anyone without it.
  std::atomic<int64_t> capacity_{0};
};

Status KvPool::Impl::Grow(int64_t num_blocks) try {
  VARLANE_REQUIRE_ARG(num_blocks >= 0, "num_blocks = ", num_blocks,
                      ", must not be negative");
  const std::lock_guard grow_lock(grow_mutex_);
  const int64_t capacity = capacity_.load(std::memory_order_relaxed);
  const int64_t max_blocks = allocator_.max_blocks();
  VARLANE_REQUIRE(num_blocks <= max_blocks - capacity, StatusCode::kOutOfRange,
                  "num_blocks = ", num_blocks, ", but the pool has ", capacity,
                  " of max_blocks = ", max_blocks);
  VARLANE_RETURN_IF_ERROR(memory_->Commit(capacity + num_blocks));
  const std::lock_guard lock(mutex_);
  VARLANE_ENSURE(allocator_.Grow(0, num_blocks),
                 "the allocator cannot grow by ", num_blocks, " blocks");
  memory_stats_ = memory_->stats();
  capacity_.store(capacity + num_blocks, std::memory_order_release);
  return {};
} catch (const std::bad_alloc&) {
  return OutOfMemory("growing the pool");
}

SeqId KvPool::Impl::CreateSequence() try {
  const std::lock_guard lock(mutex_);
  const SeqId seq = next_seq_;
  sequences_.emplace(seq, BlockTable(layout_.block_size));
  ++next_seq_;
  return seq;
} catch (const std::bad_alloc&) {
  return -1;
}

KvPool::Impl::AppendPlan KvPool::Impl::PlanAppend(const BlockTable& table,
                                                  int64_t num_tokens) const {
  AppendPlan plan;
  plan.growth = table.PlanAppend(num_tokens);
  const int64_t entry = plan.growth.written_entry;
  plan.copies_tail =
      entry >= 0 &&
      allocator_.is_shared(table.blocks()[static_cast<size_t>(entry)]);
  Admission& admission = plan.admission;
  admission.needed_blocks = plan.growth.new_blocks + (plan.copies_tail ? 1 : 0);
  admission.free_blocks = allocator_.free_blocks();
  admission.capacity_blocks = allocator_.capacity();
  // What the sequence holds counts too: waiting for others does not help one
  // that would not fit the pool alone.
  if (plan.growth.num_blocks > admission.capacity_blocks) {
    admission.kind = Admission::Kind::kNeverFits;
  } else if (admission.needed_blocks > admission.free_blocks) {
    admission.kind = Admission::Kind::kWait;
  }
  return plan;
}

Result<Admission> KvPool::Impl::CanAppend(SeqId seq, int64_t num_tokens) const {
  VARLANE_REQUIRE_ARG(num_tokens >= 0, "num_tokens = ", num_tokens,
                      ", must not be negative");
  const std::lock_guard lock(mutex_);
  const BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  return PlanAppend(*table, num_tokens).admission;
}

Result<Admission> KvPool::Impl::Append(SeqId seq, int64_t num_tokens) try {
  VARLANE_REQUIRE_ARG(num_tokens >= 0, "num_tokens = ", num_tokens,
                      ", must not be negative");
  const std::lock_guard lock(mutex_);
  BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  const AppendPlan plan = PlanAppend(*table, num_tokens);
  if (!plan.admission.admitted()) return plan.admission;
  table->ReserveBlocks(plan.growth.new_blocks);
  // Nothing below can fail: the blocks are there, and so is their room.
  if (plan.copies_tail) CopyTail(table, plan.growth.written_entry);
  for (int64_t i = 0; i < plan.growth.new_blocks; ++i) {
    table->AddBlock(Take());
  }
  table->SetLength(plan.growth.length);
  NotePeak();
  return plan.admission;
} catch (const std::bad_alloc&) {
  return OutOfMemory("a block table");
}

BlockId KvPool::Impl::Take() {
  const BlockId block = allocator_.Allocate();
  VARLANE_DCHECK(block != kNoBlock);
  return block;
}

void KvPool::Impl::CopyTail(BlockTable* table, int64_t entry) {
  const BlockId shared = table->blocks()[static_cast<size_t>(entry)];
  const BlockId copy = Take();
  std::memcpy(BlockData(copy), BlockData(shared),
              static_cast<size_t>(block_bytes_));
  table->ReplaceBlock(entry, copy);
  const Released released = allocator_.Release(shared);
  VARLANE_DCHECK(released == Released::kShared);
  (void)released;
  ++cow_copies_;
}

Result<SeqId> KvPool::Impl::Fork(SeqId seq) try {
  const std::lock_guard lock(mutex_);
  const BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  const SeqId fork = next_seq_;
  const auto [place, inserted] = sequences_.emplace(fork, *table);
  VARLANE_ENSURE(inserted, "seq = ", fork, " exists already");
  const std::span<const BlockId> blocks = place->second.blocks();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (allocator_.Reference(blocks[i])) continue;
    // The count is full: 2^31 - 1 tables name this block.
    const Status released = ReleaseAll(blocks.first(i));
    sequences_.erase(place);
    VARLANE_RETURN_IF_ERROR(released);
    return Status(StatusCode::kResourceExhausted,
                  StrCat("seq = ", seq, ": its block ", blocks[i],
                         " cannot be shared once more"));
  }
  ++next_seq_;
  return fork;
} catch (const std::bad_alloc&) {
  return OutOfMemory("a block table");
}

Status KvPool::Impl::ReleaseAll(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) {
    VARLANE_ENSURE(allocator_.Release(block) != Released::kError, "block ",
                   block, " stands in a table but is not referenced");
  }
  return {};
}

Status KvPool::Impl::Truncate(SeqId seq, int64_t length) {
  const std::lock_guard lock(mutex_);
  BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  VARLANE_REQUIRE_ARG(length >= 0 && length <= table->length(),
                      "length = ", length, ", but seq = ", seq, " has ",
                      table->length(), " tokens");
  const auto cut = static_cast<size_t>(table->BlocksCutBy(length));
  const Status released = ReleaseAll(table->blocks().last(cut));
  table->Truncate(length);
  return released;
}

Status KvPool::Impl::Free(SeqId seq) {
  const std::lock_guard lock(mutex_);
  const auto found = sequences_.find(seq);
  if (found == sequences_.end()) return NotFound(seq);
  const Status released = ReleaseAll(found->second.blocks());
  sequences_.erase(found);
  return released;
}

Result<int64_t> KvPool::Impl::Length(SeqId seq) const {
  const std::lock_guard lock(mutex_);
  const BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  return table->length();
}

Result<int64_t> KvPool::Impl::CopyBlockTable(SeqId seq,
                                             std::span<int32_t> out) const {
  const std::lock_guard lock(mutex_);
  const BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  const std::span<const BlockId> blocks = table->blocks();
  VARLANE_REQUIRE(out.size() >= blocks.size(), StatusCode::kOutOfRange,
                  "out has ", out.size(), " entries, but seq = ", seq,
                  " holds ", blocks.size(), " blocks");
  std::copy(blocks.begin(), blocks.end(), out.begin());
  return table->num_blocks();
}

Status KvPool::Impl::CopySlotMapping(SeqId seq, int64_t begin,
                                     std::span<int64_t> out) const {
  const std::lock_guard lock(mutex_);
  const BlockTable* const table = Find(seq);
  if (table == nullptr) return NotFound(seq);
  const auto count = static_cast<int64_t>(out.size());
  VARLANE_REQUIRE(begin >= 0 && begin <= table->length() &&
                      count <= table->length() - begin,
                  StatusCode::kOutOfRange, "begin = ", begin, " and ", count,
                  " tokens, but seq = ", seq, " has ", table->length(),
                  " tokens");
  table->MapSlots(begin, out);
  return {};
}

KvPoolStats KvPool::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  KvPoolStats stats;
  stats.capacity_blocks = allocator_.capacity();
  stats.free_blocks = allocator_.free_blocks();
  stats.referenced_blocks = allocator_.referenced_blocks();
  stats.references = allocator_.references();
  stats.peak_referenced_blocks = peak_referenced_;
  stats.sequences = static_cast<int64_t>(sequences_.size());
  stats.cow_copies = cow_copies_;
  stats.committed_bytes = memory_stats_.committed_bytes;
  stats.reserved_bytes = memory_stats_.reserved_bytes;
  stats.slab_bytes = memory_stats_.slab_bytes;
  stats.num_slabs = memory_stats_.num_slabs;
  stats.huge_page_bytes = memory_stats_.huge_page_bytes;
  stats.huge_pages = memory_stats_.huge_pages;
  return stats;
}

Status KvPool::Impl::CheckInvariants() const try {
  constexpr auto kInternal = StatusCode::kInternal;
  const std::lock_guard lock(mutex_);
  VARLANE_RETURN_IF_ERROR(allocator_.CheckInvariants());
  const int64_t capacity = allocator_.capacity();
  VARLANE_REQUIRE(capacity == capacity_.load(std::memory_order_relaxed),
                  kInternal, "the pool has ", capacity_.load(),
                  " blocks, but the allocator has ", capacity);
  VARLANE_REQUIRE(memory_stats_.committed_bytes >= capacity * block_bytes_,
                  kInternal, memory_stats_.committed_bytes,
                  " bytes are committed for ", capacity, " blocks of ",
                  block_bytes_);
  std::vector<int64_t> entries(static_cast<size_t>(capacity), 0);
  for (const auto& [seq, table] : sequences_) {
    VARLANE_REQUIRE(table.IsConsistent(), kInternal, "seq = ", seq, " has ",
                    table.length(), " tokens in ", table.num_blocks(),
                    " blocks of ", layout_.block_size);
    for (const BlockId block : table.blocks()) {
      VARLANE_REQUIRE(block >= 0 && block < capacity, kInternal, "seq = ", seq,
                      " names block ", block, " of ", capacity);
      ++entries[static_cast<size_t>(block)];
    }
  }
  for (int64_t i = 0; i < capacity; ++i) {
    const int64_t named = entries[static_cast<size_t>(i)];
    const int64_t count = allocator_.reference_count(static_cast<BlockId>(i));
    VARLANE_REQUIRE(named == count, kInternal, "block ", i, " stands in ",
                    named, " table entries, but has ", count, " references");
  }
  return {};
} catch (const std::bad_alloc&) {
  return OutOfMemory("checking the pool");
}

// --- the public face -------------------------------------------------------

Result<std::unique_ptr<KvPool>> KvPool::Create(const KvPoolOptions& options,
                                               Runtime* runtime) try {
  VARLANE_RETURN_IF_ERROR(Validate(options, runtime));
  const int64_t max_blocks =
      options.max_blocks == 0 ? options.num_blocks : options.max_blocks;
  Result<std::unique_ptr<BlockMemory>> memory =
      BlockMemory::Create({.block_bytes = options.layout.block_bytes(),
                           .max_blocks = max_blocks,
                           .huge_pages = options.huge_pages,
                           .check_limits = options.check_limits},
                          runtime);
  VARLANE_RETURN_IF_ERROR(memory.status());
  VARLANE_RETURN_IF_ERROR((*memory)->Commit(options.num_blocks));
  return std::unique_ptr<KvPool>(new KvPool(
      std::make_unique<Impl>(options, max_blocks, *std::move(memory))));
} catch (const std::bad_alloc&) {
  return OutOfMemory("the pool's bookkeeping");
}

KvPool::KvPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvPool::~KvPool() = default;

const KvLayout& KvPool::layout() const noexcept { return impl_->layout(); }
KvView KvPool::view() const noexcept {
  return {impl_->base(), impl_->capacity(), impl_->layout()};
}
int64_t KvPool::capacity_blocks() const noexcept { return impl_->capacity(); }
int64_t KvPool::free_blocks() const { return impl_->stats().free_blocks; }
KvPoolStats KvPool::stats() const { return impl_->stats(); }
int KvPool::NodeOfBlock(BlockId block) const noexcept {
  return impl_->NodeOfBlock(block);
}
Status KvPool::Grow(int64_t num_blocks) { return impl_->Grow(num_blocks); }
SeqId KvPool::CreateSequence() { return impl_->CreateSequence(); }
Result<Admission> KvPool::Append(SeqId seq, int64_t num_tokens) {
  return impl_->Append(seq, num_tokens);
}
Result<Admission> KvPool::CanAppend(SeqId seq, int64_t num_tokens) const {
  return impl_->CanAppend(seq, num_tokens);
}
Result<SeqId> KvPool::Fork(SeqId seq) { return impl_->Fork(seq); }
Status KvPool::Truncate(SeqId seq, int64_t length) {
  return impl_->Truncate(seq, length);
}
Status KvPool::Free(SeqId seq) { return impl_->Free(seq); }
Result<int64_t> KvPool::Length(SeqId seq) const { return impl_->Length(seq); }
Result<int64_t> KvPool::CopyBlockTable(SeqId seq,
                                       std::span<int32_t> out) const {
  return impl_->CopyBlockTable(seq, out);
}
Status KvPool::CopySlotMapping(SeqId seq, int64_t begin,
                               std::span<int64_t> out) const {
  return impl_->CopySlotMapping(seq, begin, out);
}
Status KvPool::CheckInvariants() const { return impl_->CheckInvariants(); }

}  // namespace varlane
