// KvPool::Impl: bytes (BlockMemory), counts (BlockAllocator), tables
// (SequenceTable) and quotas (TenantTable) together.
//
// Its members stand by subject: kv_pool.cc (creation, the public face),
// kv_sequences.cc (what sequences do), kv_prefixes.cc (what they find of each
// other), kv_resize.cc (capacity, moves), kv_give_back.cc (memory lent to the
// system), kv_pool_check.cc (statistics, invariants).
//
// Locks, in the order in which they are taken:
//   resize_mutex_      one change of capacity at a time; held while memory is
//                      committed or given back, which may take seconds
//   a group's mutex    the tables in it, and so the blocks they name. All of
//                      them: the pool for oneself
//   those inside PoolPrefixes and TenantTable
// The allocator needs none. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_KV_POOL_IMPL_H_
#define VARLANE_MEMORY_KV_POOL_IMPL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "memory/block_allocator.h"
#include "memory/block_memory.h"
#include "memory/block_moves.h"
#include "memory/block_poison.h"
#include "memory/pool_prefixes.h"
#include "memory/sequence_table.h"
#include "memory/tenant_table.h"
#include "memory/thread_slot.h"
#include "varlane/kv_pool.h"

namespace varlane {

class KvPool::Impl {
 public:
  // `memory` has options.num_blocks committed; `key` is the prefix cache's. May
  // throw std::bad_alloc.
  Impl(const KvPoolOptions& options, const PrefixHashKey& key,
       std::unique_ptr<BlockMemory> memory);
  ~Impl();

  const KvLayout& layout() const { return options_.layout; }
  KvView view() const noexcept;
  int64_t capacity() const noexcept { return allocator_.capacity(); }
  int64_t available_blocks() const noexcept;
  // Nodes that ids tell apart, and nodes whose memory the pool has: where heads
  // are sharded 1 and num_shards(), else the same number.
  int num_nodes() const noexcept { return allocator_.num_nodes(); }
  int memory_nodes() const noexcept { return memory_->memory_nodes(); }
  int num_shards() const noexcept { return memory_->num_shards(); }
  int NodeOfBlock(BlockId block) const noexcept;
  int memory_fd() const noexcept { return memory_->memory_fd(); }

  // kv_resize.cc
  Status Grow(int64_t num_blocks);
  Result<KvResize> Shrink(int64_t num_blocks);
  Result<KvResize> SetLimit(int64_t bytes);
  int64_t MinLimitBytes() const;
  Result<KvResize> Compact(int64_t max_moves);
  int64_t EvictCached(int64_t num_blocks);
  void BeginStep();
  void EndStep();

  // kv_give_back.cc
  Result<KvResize> GiveBack(const GiveBackOptions& options);
  Result<KvResize> TakeBack(int64_t bytes);
  int64_t lent_blocks() const noexcept {
    return lent_blocks_.load(std::memory_order_relaxed);
  }
  void AllowGrowth(bool allowed) noexcept {
    growth_.store(allowed, std::memory_order_relaxed);
  }

  // kv_sequences.cc
  SeqId CreateSequence(const SequenceOptions& options);
  Result<Admission> Append(SeqId seq, int64_t num_tokens);
  Result<Admission> CanAppend(SeqId seq, int64_t num_tokens) const;
  Result<SeqId> Fork(SeqId seq);
  Status Truncate(SeqId seq, int64_t length);
  Status Free(SeqId seq);
  Result<int64_t> Length(SeqId seq) const;
  Result<int64_t> CopyBlockTable(SeqId seq, std::span<int32_t> out) const;
  Status CopySlotMapping(SeqId seq, int64_t begin,
                         std::span<int64_t> out) const;
  Status SetTenantQuota(TenantId tenant, int64_t max_blocks);
  KvTenantStats tenant_stats(TenantId tenant) const {
    return tenants_.stats(tenant);
  }
  std::vector<KvTenant> tenants() const { return tenants_.all(); }

  // kv_prefixes.cc
  Result<PrefixMatch> FindPrefix(TenantId tenant,
                                 std::span<const int32_t> prompt) const;
  Result<PrefixMatch> MatchPrefix(const SequenceOptions& options,
                                  std::span<const int32_t> prompt);
  Status CommitTokens(SeqId seq, int64_t begin,
                      std::span<const int32_t> tokens);
  Result<PrefixPin> PinPrefix(TenantId tenant, std::span<const int32_t> prompt);
  Status UnpinPrefix(int64_t pin);
  PrefixCacheStats prefix_stats() const;

  // kv_pool_check.cc
  KvPoolStats stats() const;
  int mempolicy_error() const;  // that of stats(), which costs more
  KvNodeStats node_stats(int node) const;
  KvPlacement MeasurePlacement(int node) const;
  Status CheckInvariants() const;

 private:
  class OwnStep;

  // What an append would take: the table's plan and the blocks for it.
  struct AppendPlan {
    BlockTable::Growth growth;
    bool copies_tail = false;
    Admission admission;
  };

  // All parts of `count` blocks whose ids follow each other.
  void AllowBlocks(BlockId first, int64_t count) const noexcept;
  void ForbidBlock(BlockId block) const noexcept;
  void CopyBlock(BlockId from, BlockId to) const noexcept;

  // The sequence's group is locked in these.
  AppendPlan PlanAppend(const KvSequence& seq, int64_t num_tokens) const;
  bool TakeBlocks(const AppendPlan& plan, KvSequence* seq);
  bool MakeTailWritable(const AppendPlan& plan, KvSequence* seq);
  void CountRefusal(const AppendPlan& plan, KvSequence* seq);
  void TakePrefix(std::span<const int32_t> prompt, KvSequence* seq,
                  PrefixMatch* match);
  void CopyPrefix(std::span<const int32_t> prompt,
                  const PoolPrefixes::Taken& taken, KvSequence* seq,
                  PrefixMatch* match);
  void CopyTail(KvSequence* seq, int64_t entry, BlockId copy);
  // Drops one reference of each, the last one first.
  Status ReleaseBlocks(std::span<const BlockId> blocks);
  void FreeOwnerless(std::span<const BlockId> blocks);
  int EmptiestNode() const;
  int HomeOf(const KvSequence& seq) const;
  void NotePeak();

  // resize_mutex_ is held in these.
  Status GrowTo(std::span<const int64_t> targets, KvResize* report);
  Status ShrinkTo(std::span<const int64_t> targets, KvResize* report);
  Status ResizeTo(std::span<const int64_t> targets, KvResize* report);
  Status CheckGrowthIsAllowed() const;
  // And all groups in these.
  std::vector<int64_t> PlanGiveBack(const GiveBackOptions& options) const;
  Status CheckRoomFor(std::span<const int64_t> targets) const;
  Status PlanShrink(std::span<const int64_t> targets, KvResize* report,
                    std::vector<BlockMove>* moves);
  void MoveBlocks(std::span<const BlockMove> moves,
                  const BlockRenames& renames);
  void PublishMemory();
  void Finish(KvResize* report) const;

  int64_t evictable_blocks() const noexcept {
    return prefixes_ == nullptr ? 0 : prefixes_->evictable_blocks();
  }
  int64_t NeededBlocks() const;  // that cannot be evicted
  int64_t LimitFor(int64_t num_blocks) const;

  const KvPoolOptions options_;
  const int64_t block_bytes_;
  const int64_t max_blocks_;
  const BlockPoison poison_;
  const std::unique_ptr<BlockMemory> memory_;

  std::mutex resize_mutex_;
  int64_t limit_bytes_ = 0;  // guarded by it

  SequenceTable sequences_;
  TenantTable tenants_;
  BlockAllocator allocator_;
  std::unique_ptr<PoolPrefixes> prefixes_;  // null: no block is ever cached
  // [ids]: whose quota the block counts against while it is referenced. Of the
  // thread that takes or frees the block; its last reference hands it on.
  std::vector<Tenant*> charged_to_;

  // Written with all groups locked, read with any one.
  BlockMemoryStats memory_stats_;
  std::vector<int64_t> published_node_bytes_;  // [num_nodes] committed
  int64_t published_limit_ = 0;
  // Written with the first group locked.
  int64_t outstanding_steps_ = 0;

  // Written under resize_mutex_ resp. by anyone.
  std::atomic<int64_t> lent_blocks_{0};
  std::atomic<bool> growth_{true};

  // Read by anyone.
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> peak_referenced_{0};
  // How many looks for a new peak the threads of a slot may still leave out.
  struct alignas(64) PeakSkips {
    std::atomic<int> left{0};
  };
  std::array<PeakSkips, kThreadSlots> peak_skips_;
  std::atomic<int64_t> compactions_{0};
  std::atomic<int64_t> moved_blocks_{0};
  SpreadCounter num_sequences_;
  SpreadCounter cow_copies_;
  SpreadCounter evicted_blocks_;
  SpreadCounter prefix_copies_;
  SpreadCounter spilled_blocks_;
  SpreadCounter quota_refusals_;
  SpreadCounter watermark_refusals_;
};

// Errors that several of its files tell.
Status NoSuchSequence(SeqId seq);
Status NoHeapFor(const char* what);

}  // namespace varlane

#endif  // VARLANE_MEMORY_KV_POOL_IMPL_H_
