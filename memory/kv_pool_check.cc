// KvPool::Impl: its statistics, and whether its books are right.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <new>
#include <unordered_map>

#include "base/check.h"
#include "memory/kv_pool_impl.h"

namespace varlane {

KvPoolStats KvPool::Impl::stats() const {
  // Any group's lock keeps changes of capacity away.
  const std::lock_guard lock(sequences_.groups()[0].mutex);
  const BlockCounts counts = allocator_.counts();
  KvPoolStats stats;
  stats.capacity_blocks = counts.capacity;
  stats.free_blocks = counts.free;
  stats.cached_blocks = counts.cached;
  stats.referenced_blocks = counts.referenced();
  stats.references = allocator_.references();
  stats.peak_referenced_blocks =
      std::max(peak_referenced_.load(), counts.referenced());
  stats.sequences = num_sequences_.Sum();
  stats.outstanding_steps = outstanding_steps_;
  stats.cow_copies = cow_copies_.Sum();
  stats.evicted_blocks = evicted_blocks_.Sum();
  stats.spilled_blocks = spilled_blocks_.Sum();
  stats.quota_refusals = quota_refusals_.Sum();
  stats.watermark_refusals = watermark_refusals_.Sum();
  stats.compactions = compactions_.load();
  stats.moved_blocks = moved_blocks_.load();
  stats.committed_bytes = memory_stats_.committed_bytes;
  stats.reserved_bytes = memory_stats_.reserved_bytes;
  stats.limit_bytes = published_limit_;
  stats.slab_bytes = memory_stats_.slab_bytes;
  stats.num_slabs = memory_stats_.num_slabs;
  stats.slabs_released = memory_stats_.slabs_released;
  stats.slabs_regained = memory_stats_.slabs_regained;
  stats.huge_page_bytes = memory_stats_.huge_page_bytes;
  stats.huge_pages = memory_stats_.huge_pages;
  stats.locked_bytes = memory_stats_.locked_bytes;
  stats.lock_error = memory_stats_.lock_error;
  stats.mempolicy_error = memory_stats_.mempolicy_error;
  return stats;
}

int KvPool::Impl::mempolicy_error() const {
  const std::lock_guard lock(sequences_.groups()[0].mutex);
  return memory_stats_.mempolicy_error;
}

KvNodeStats KvPool::Impl::node_stats(int node) const {
  if (node < 0 || node >= memory_nodes()) return {};
  const std::lock_guard lock(sequences_.groups()[0].mutex);
  const int of_ids = num_shards() > 1 ? 0 : node;
  const BlockCounts counts = allocator_.counts(of_ids);
  return {
      .capacity_blocks = counts.capacity,
      .free_blocks = counts.free,
      .cached_blocks = counts.cached,
      .referenced_blocks = counts.referenced(),
      .committed_bytes =
          published_node_bytes_[static_cast<size_t>(of_ids)] / num_shards()};
}

KvPlacement KvPool::Impl::MeasurePlacement(int node) const {
  KvPlacement all;
  for (int n = std::max(node, 0); n < (node < 0 ? memory_nodes() : node + 1);
       ++n) {
    if (n >= memory_nodes()) break;
    // What is given back meanwhile is absent.
    const PagePlacement pages =
        memory_->QueryPages(n, node_stats(n).committed_bytes);
    all.local_bytes += pages.on_node;
    all.remote_bytes += pages.elsewhere;
    all.absent_bytes += pages.absent;
    all.unknown_bytes += pages.unknown;
    if (all.error == 0) all.error = pages.error;
  }
  return all;
}

// Everybody is shut out, so the books must balance exactly.
Status KvPool::Impl::CheckInvariants() const try {
  constexpr auto kInternal = StatusCode::kInternal;
  const SequenceTable::AllLocked all(sequences_);
  VARLANE_RETURN_IF_ERROR(allocator_.CheckInvariants());
  if (prefixes_ != nullptr) {
    VARLANE_RETURN_IF_ERROR(prefixes_->CheckInvariants());
  }
  const int64_t capacity = allocator_.capacity();
  VARLANE_REQUIRE(memory_stats_.committed_bytes >= capacity * block_bytes_,
                  kInternal, memory_stats_.committed_bytes,
                  " bytes are committed for ", capacity, " blocks of ",
                  block_bytes_);
  std::vector<int64_t> entries(static_cast<size_t>(allocator_.max_blocks()), 0);
  int64_t num_sequences = 0;
  for (const SequenceTable::Group& group : sequences_.groups()) {
    num_sequences += std::ssize(group.sequences);
    for (const auto& [seq, sequence] : group.sequences) {
      const BlockTable& table = sequence.table;
      VARLANE_REQUIRE(table.IsConsistent(), kInternal, "seq = ", seq, " has ",
                      table.length(), " tokens in ", table.num_blocks(),
                      " blocks of ", options_.layout.block_size);
      if (prefixes_ != nullptr) {
        VARLANE_RETURN_IF_ERROR(
            prefixes_->CheckSequence(sequence.tokens, table));
      }
      for (const BlockId block : table.blocks()) {
        VARLANE_REQUIRE(allocator_.IsBlock(block), kInternal, "seq = ", seq,
                        " names block ", block, " of ", capacity);
        ++entries[static_cast<size_t>(block)];
      }
    }
  }
  VARLANE_REQUIRE(num_sequences == num_sequences_.Sum(), kInternal,
                  num_sequences, " sequences are there, but ",
                  num_sequences_.Sum(), " are counted");
  std::unordered_map<const Tenant*, int64_t> charged;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto block = static_cast<BlockId>(i);
    const int64_t count = allocator_.reference_count(block);
    VARLANE_REQUIRE(entries[i] == count, kInternal, "block ", i, " stands in ",
                    entries[i], " table entries, but has ", count,
                    " references");
    if (count > 0) ++charged[charged_to_[i]];
  }
  for (const auto& [tenant, blocks] : charged) {
    VARLANE_REQUIRE(tenant != nullptr && tenant->used() == blocks, kInternal,
                    "a tenant holds ", blocks, " blocks, but is charged for ",
                    tenant == nullptr ? 0 : tenant->used());
  }
  VARLANE_REQUIRE(tenants_.used() == allocator_.referenced_blocks(), kInternal,
                  "tenants are charged for ", tenants_.used(), " blocks of ",
                  allocator_.referenced_blocks(), " referenced ones");
  return {};
} catch (const std::bad_alloc&) {
  return NoHeapFor("checking the pool");
}

}  // namespace varlane
