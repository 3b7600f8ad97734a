// KvPool::Impl: what sequences do - append, fork, truncate, free.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "base/check.h"
#include "memory/kv_pool_impl.h"

namespace varlane {
namespace {

// How often an append is planned anew because others took its blocks in
// between. After that they are simply too many.
constexpr int kAppendAttempts = 64;

constexpr int kPeakSkips = 63;

}  // namespace

SeqId KvPool::Impl::CreateSequence(const SequenceOptions& options) try {
  if (options.home_node < -1 || options.home_node >= memory_nodes()) return -1;
  Tenant* const tenant = tenants_.Join(options.tenant);
  const SeqId seq = sequences_.NewId();
  SequenceTable::Group& group = sequences_.GroupOf(seq);
  try {
    const std::lock_guard lock(group.mutex);
    group.sequences.emplace(
        seq, KvSequence{.table = BlockTable(options_.layout.block_size),
                        .tokens = {.cursor = {.tenant = options.tenant}},
                        .tenant_id = options.tenant,
                        .tenant = tenant,
                        .home_node = num_shards() > 1 ? 0 : options.home_node});
    num_sequences_.Add(1);
  } catch (const std::bad_alloc&) {
    tenants_.Leave(options.tenant);
    return -1;
  }
  return seq;
} catch (const std::bad_alloc&) {
  return -1;
}

// --- append ------------------------------------------------------------------

KvPool::Impl::AppendPlan KvPool::Impl::PlanAppend(const KvSequence& seq,
                                                  int64_t num_tokens) const {
  AppendPlan plan;
  plan.growth = seq.table.PlanAppend(num_tokens);
  if (const int64_t entry = plan.growth.written_entry; entry >= 0) {
    // A kept block's contents are promised to others, even if none has it now.
    const BlockId tail = seq.table.blocks()[static_cast<size_t>(entry)];
    plan.copies_tail = allocator_.is_shared(tail) ||
                       (allocator_.is_kept(tail) && !prefixes_->CanWrite(tail));
  }
  using Kind = Admission::Kind;
  using Limit = Admission::Limit;
  Admission& admission = plan.admission;
  const int64_t needed = plan.growth.new_blocks + (plan.copies_tail ? 1 : 0);
  // Where there is plenty, nobody has to be asked what they have at hand.
  int64_t available = allocator_.FreeBlocksAtLeast() + evictable_blocks();
  if (needed > available - options_.watermark_blocks) {
    available = available_blocks();
  }
  const int64_t quota = seq.tenant->quota();
  admission = {.needed_blocks = needed,
               .free_blocks = available,
               .capacity_blocks = allocator_.capacity()};
  const auto quota_binds = [&](Kind kind) {
    admission.kind = kind;
    admission.limit = Limit::kQuota;
    admission.free_blocks = std::max<int64_t>(0, quota - seq.tenant->used());
    admission.capacity_blocks = quota;
  };
  // What the sequence holds counts too: waiting for others does not help one
  // that would not fit the pool, or the quota, alone. What is lent comes back.
  if (plan.growth.num_blocks > admission.capacity_blocks + lent_blocks()) {
    admission.kind = Kind::kNeverFits;
  } else if (quota >= 0 && needed > 0 && plan.growth.num_blocks > quota) {
    quota_binds(Kind::kNeverFits);
  } else if (quota >= 0 && needed > 0 && needed > quota - seq.tenant->used()) {
    quota_binds(Kind::kWait);
  } else if (needed > available) {
    admission.kind = Kind::kWait;
  } else if (needed > available - options_.watermark_blocks && needed > 0 &&
             seq.table.num_blocks() == 0 &&
             allocator_.referenced_blocks() > 0) {
    // With nobody running there is nobody to keep blocks for.
    admission.kind = Kind::kWait;
    admission.limit = Limit::kWatermark;
    admission.free_blocks =
        std::max<int64_t>(0, available - options_.watermark_blocks);
    admission.capacity_blocks -= options_.watermark_blocks;
  }
  return plan;
}

Result<Admission> KvPool::Impl::CanAppend(SeqId seq, int64_t num_tokens) const {
  VARLANE_REQUIRE_ARG(num_tokens >= 0, "num_tokens = ", num_tokens,
                      ", must not be negative");
  const SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  const KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  return PlanAppend(*sequence, num_tokens).admission;
}

Result<Admission> KvPool::Impl::Append(SeqId seq, int64_t num_tokens) try {
  VARLANE_REQUIRE_ARG(num_tokens >= 0, "num_tokens = ", num_tokens,
                      ", must not be negative");
  SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  for (int attempt = 0;; ++attempt) {
    AppendPlan plan = PlanAppend(*sequence, num_tokens);
    if (!plan.admission.admitted()) {
      CountRefusal(plan, sequence);
      return plan.admission;
    }
    sequence->table.ReserveBlocks(plan.admission.needed_blocks);
    if (MakeTailWritable(plan, sequence) && TakeBlocks(plan, sequence)) {
      sequence->table.SetLength(plan.growth.length);
      NotePeak();
      return plan.admission;
    }
    if (attempt == kAppendAttempts) {
      plan.admission.kind = Admission::Kind::kWait;
      plan.admission.free_blocks = 0;
      return plan.admission;
    }
  }
} catch (const std::bad_alloc&) {
  return NoHeapFor("a block table");
}

// False where somebody has found the tail since it was planned to be written to
// as it is.
bool KvPool::Impl::MakeTailWritable(const AppendPlan& plan, KvSequence* seq) {
  const int64_t entry = plan.growth.written_entry;
  if (entry < 0 || plan.copies_tail || prefixes_ == nullptr) return true;
  return prefixes_->MakeWritable(
      seq->table.blocks()[static_cast<size_t>(entry)]);
}

void KvPool::Impl::CountRefusal(const AppendPlan& plan, KvSequence* seq) {
  if (plan.admission.limit == Admission::Limit::kQuota) {
    quota_refusals_.Add(1);
    seq->tenant->CountRefusal();
  } else if (plan.admission.limit == Admission::Limit::kWatermark) {
    watermark_refusals_.Add(1);
  }
}

// Puts the planned blocks into the table. False, and nothing changed, where
// others were faster.
bool KvPool::Impl::TakeBlocks(const AppendPlan& plan, KvSequence* seq) {
  const int64_t needed = plan.admission.needed_blocks;
  if (needed == 0) return true;
  if (!seq->tenant->Charge(needed)) return false;
  const int home = HomeOf(*seq);
  const std::span<BlockId> blocks = seq->table.AddBlocks(needed);
  int64_t spilled = 0;
  bool taken = allocator_.Allocate(blocks, home, &spilled);
  while (!taken && EvictCached(std::max<int64_t>(
                       1, needed - allocator_.free_blocks())) > 0) {
    taken = allocator_.Allocate(blocks, home, &spilled);
  }
  if (!taken) {
    seq->table.DropBlocks(needed);
    seq->tenant->Refund(needed);
    return false;
  }
  seq->home_node = home;
  if (spilled > 0) spilled_blocks_.Add(spilled);
  for (const BlockId block : blocks) {
    AllowBlocks(block, 1);
    charged_to_[static_cast<size_t>(block)] = seq->tenant;
  }
  if (plan.copies_tail) {
    const BlockId copy = blocks.back();
    seq->table.DropBlocks(1);
    CopyTail(seq, plan.growth.written_entry, copy);
  }
  return true;
}

void KvPool::Impl::CopyTail(KvSequence* seq, int64_t entry, BlockId copy) {
  const BlockId shared = seq->table.blocks()[static_cast<size_t>(entry)];
  CopyBlock(shared, copy);
  seq->table.ReplaceBlock(entry, copy);
  // Another holder may have copied it at the same time, so that this reference
  // was the last one.
  (void)ReleaseBlocks({&shared, 1});
  cow_copies_.Add(1);
}

int KvPool::Impl::EmptiestNode() const {
  int emptiest = 0;
  int64_t most = -1;
  for (int node = 0; num_nodes() > 1 && node < num_nodes(); ++node) {
    // Cached blocks are as good as free ones to whoever is in need.
    const BlockCounts counts = allocator_.counts(node);
    const int64_t available = counts.free + counts.cached;
    if (available > most) {
      most = available;
      emptiest = node;
    }
  }
  return emptiest;
}

int KvPool::Impl::HomeOf(const KvSequence& seq) const {
  if (seq.home_node >= 0) return seq.home_node;
  const std::span<const BlockId> blocks = seq.table.blocks();
  return blocks.empty() ? EmptiestNode() : allocator_.NodeOf(blocks.back());
}

// Beside others the bound is no proof, and to ask them what they have at hand
// is to wait for them: who finds nothing new asks less often for a while.
void KvPool::Impl::NotePeak() {
  int64_t peak = peak_referenced_.load(std::memory_order_relaxed);
  if (allocator_.ReferencedBlocksAtMost() <= peak) return;
  std::atomic<int>& skips = peak_skips_[ThreadSlot() % kThreadSlots].left;
  const int left = skips.load(std::memory_order_relaxed);
  if (left > 0) {
    skips.store(left - 1, std::memory_order_relaxed);
    return;
  }
  const int64_t referenced = allocator_.referenced_blocks();
  if (referenced <= peak) skips.store(kPeakSkips, std::memory_order_relaxed);
  while (referenced > peak &&
         !peak_referenced_.compare_exchange_weak(peak, referenced)) {
  }
}

// --- fork, truncate, free ----------------------------------------------------

Result<SeqId> KvPool::Impl::Fork(SeqId seq) try {
  const SeqId fork = sequences_.NewId();
  SequenceTable::Group& from = sequences_.GroupOf(seq);
  SequenceTable::Group& to = sequences_.GroupOf(fork);
  const SequenceTable::TwoLocked lock(from, to);
  const KvSequence* const sequence = from.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  // A copy first: to insert may move the original.
  KvSequence copy = *sequence;
  const auto [place, inserted] = to.sequences.emplace(fork, std::move(copy));
  VARLANE_ENSURE(inserted, "seq = ", fork, " exists already");
  const std::span<const BlockId> blocks = place->second.table.blocks();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (allocator_.Reference(blocks[i])) continue;
    // The count is full: 2^31 - 1 tables name this block.
    const BlockId full = blocks[i];
    const Status released = ReleaseBlocks(blocks.first(i));
    to.sequences.erase(place);
    VARLANE_RETURN_IF_ERROR(released);
    return Status(StatusCode::kResourceExhausted,
                  MessageCat("seq = ", seq, ": its block ", full,
                             " cannot be shared once more"));
  }
  tenants_.JoinAgain(place->second.tenant);
  num_sequences_.Add(1);
  return fork;
} catch (const std::bad_alloc&) {
  return NoHeapFor("a block table");
}

Status KvPool::Impl::ReleaseBlocks(std::span<const BlockId> blocks) {
  std::array<BlockId, 64> ownerless;
  size_t count = 0;
  Status status;
  for (size_t i = blocks.size(); i-- > 0;) {
    const BlockId block = blocks[i];
    // Read while the reference is ours: a cached block may be revived, and
    // charged to somebody else, at once.
    Tenant* const tenant = charged_to_[static_cast<size_t>(block)];
    const Released released = prefixes_ == nullptr
                                  ? allocator_.Unreference(block)
                                  : prefixes_->Unreference(block);
    if (released == Released::kShared) continue;
    if (released == Released::kError) {
      status = Status(StatusCode::kInternal,
                      MessageCat("block ", block,
                                 " stands in a table but is not referenced"));
      continue;
    }
    tenant->Refund(1);
    if (released == Released::kCached) continue;
    ownerless[count++] = block;
    if (count < ownerless.size()) continue;
    FreeOwnerless({ownerless.data(), count});
    count = 0;
  }
  FreeOwnerless({ownerless.data(), count});
  return status;
}

void KvPool::Impl::FreeOwnerless(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) {
    ForbidBlock(block);
  }
  allocator_.Free(blocks);
}

Status KvPool::Impl::Truncate(SeqId seq, int64_t length) try {
  SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  BlockTable& table = sequence->table;
  VARLANE_REQUIRE_ARG(length >= 0 && length <= table.length(),
                      "length = ", length, ", but seq = ", seq, " has ",
                      table.length(), " tokens");
  if (prefixes_ != nullptr) prefixes_->Truncate(length, &sequence->tokens);
  const auto cut = static_cast<size_t>(table.BlocksCutBy(length));
  const Status released = ReleaseBlocks(table.blocks().last(cut));
  table.Truncate(length);
  return released;
} catch (const std::bad_alloc&) {
  return NoHeapFor("a sequence's tokens");
}

Status KvPool::Impl::Free(SeqId seq) {
  SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  const auto found = group.sequences.find(seq);
  if (found == group.sequences.end()) return NoSuchSequence(seq);
  const Status released = ReleaseBlocks(found->second.table.blocks());
  const TenantId tenant = found->second.tenant_id;
  group.sequences.erase(found);
  tenants_.Leave(tenant);
  num_sequences_.Add(-1);
  return released;
}

// --- looking -----------------------------------------------------------------

Result<int64_t> KvPool::Impl::Length(SeqId seq) const {
  const SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  const KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  return sequence->table.length();
}

Result<int64_t> KvPool::Impl::CopyBlockTable(SeqId seq,
                                             std::span<int32_t> out) const {
  const SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  const KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  const std::span<const BlockId> blocks = sequence->table.blocks();
  VARLANE_REQUIRE(out.size() >= blocks.size(), StatusCode::kOutOfRange,
                  "out has ", out.size(), " entries, but seq = ", seq,
                  " holds ", blocks.size(), " blocks");
  std::copy(blocks.begin(), blocks.end(), out.begin());
  return sequence->table.num_blocks();
}

Status KvPool::Impl::CopySlotMapping(SeqId seq, int64_t begin,
                                     std::span<int64_t> out) const {
  const SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  const KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  const BlockTable& table = sequence->table;
  const auto count = static_cast<int64_t>(out.size());
  VARLANE_REQUIRE(
      begin >= 0 && begin <= table.length() && count <= table.length() - begin,
      StatusCode::kOutOfRange, "begin = ", begin, " and ", count,
      " tokens, but seq = ", seq, " has ", table.length(), " tokens");
  table.MapSlots(begin, out);
  return {};
}

Status KvPool::Impl::SetTenantQuota(TenantId tenant, int64_t max_blocks) try {
  VARLANE_REQUIRE_ARG(max_blocks >= -1, "max_blocks = ", max_blocks,
                      ", must be at least -1 (no quota)");
  tenants_.SetQuota(tenant, max_blocks);
  return {};
} catch (const std::bad_alloc&) {
  return NoHeapFor("a tenant's quota");
}

}  // namespace varlane
