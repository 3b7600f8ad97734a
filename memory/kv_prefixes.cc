// KvPool::Impl: what sequences find of each other - prefixes known, learned and
// pinned.
//
// SPDX-License-Identifier: Apache-2.0

#include <limits>
#include <new>
#include <vector>

#include "base/check.h"
#include "memory/kv_pool_impl.h"

namespace varlane {

Result<PrefixMatch> KvPool::Impl::FindPrefix(
    TenantId tenant, std::span<const int32_t> prompt) const {
  PrefixMatch match;
  if (prefixes_ == nullptr) return match;
  const PrefixCache::Peeked peeked = prefixes_->Peek(tenant, prompt);
  match.shared_blocks = peeked.blocks;
  match.cached_blocks = peeked.cached_blocks;
  match.tokens = peeked.blocks * options_.layout.block_size;
  return match;
}

Result<PrefixMatch> KvPool::Impl::MatchPrefix(const SequenceOptions& options,
                                              std::span<const int32_t> prompt) {
  VARLANE_REQUIRE_ARG(
      options.home_node >= -1 && options.home_node < memory_nodes(),
      "home_node = ", options.home_node, ", must be in [-1, ", memory_nodes(),
      ")");
  PrefixMatch match;
  match.seq = CreateSequence(options);
  if (match.seq < 0) return NoHeapFor("a sequence");
  if (prefixes_ == nullptr) return match;
  try {
    SequenceTable::Group& group = sequences_.GroupOf(match.seq);
    const std::lock_guard lock(group.mutex);
    TakePrefix(prompt, group.Find(match.seq), &match);
  } catch (const std::bad_alloc&) {
    (void)Free(match.seq);
    return NoHeapFor("a block table");
  }
  return match;
}

// Throws std::bad_alloc; nothing changes then.
void KvPool::Impl::TakePrefix(std::span<const int32_t> prompt, KvSequence* seq,
                              PrefixMatch* match) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  const int64_t quota = seq->tenant->quota();
  const int64_t room =
      quota < 0 ? kAny : std::max<int64_t>(0, quota - seq->tenant->used());
  const auto charge = [&](BlockId block) {
    charged_to_[static_cast<size_t>(block)] = seq->tenant;
  };
  const PoolPrefixes::Taken taken =
      prefixes_->Take(prompt, room, charge, &seq->tokens, &seq->table);
  const std::span<const BlockId> blocks = seq->table.blocks();
  const bool is_charged = seq->tenant->Charge(taken.revived_blocks);
  if (!is_charged) seq->tenant->ForceCharge(taken.revived_blocks);
  if (is_charged) {
    match->shared_blocks = std::ssize(blocks);
    match->cached_blocks = taken.revived_blocks;
  } else {
    // The tenant's other sequences took what was left of its quota meanwhile.
    (void)ReleaseBlocks(blocks);
    seq->table.Truncate(0);
    seq->tokens = {.cursor = {.tenant = seq->tenant_id}};
  }
  if (taken.partial_block != kNoBlock) {
    if (taken.partial_revived) seq->tenant->ForceCharge(1);
    if (is_charged) CopyPrefix(prompt, taken, seq, match);
    (void)ReleaseBlocks({&taken.partial_block, 1});
  }
  match->tokens = seq->table.length();
  NotePeak();
}

// The next block begins like one that is known: its first tokens are copied,
// where there is a block to copy them to.
void KvPool::Impl::CopyPrefix(std::span<const int32_t> prompt,
                              const PoolPrefixes::Taken& taken, KvSequence* seq,
                              PrefixMatch* match) {
  AppendPlan plan = PlanAppend(*seq, taken.partial_tokens);
  if (!plan.admission.admitted() || !TakeBlocks(plan, seq)) return;
  CopyBlock(taken.partial_block, seq->table.blocks().back());
  const std::span<const int32_t> copied =
      prompt.subspan(static_cast<size_t>(seq->table.length()),
                     static_cast<size_t>(taken.partial_tokens));
  seq->table.SetLength(plan.growth.length);
  // Within the room that Take made.
  seq->tokens.tail.assign(copied.begin(), copied.end());
  seq->tokens.length = plan.growth.length;
  match->copied_tokens = taken.partial_tokens;
  prefix_copies_.Add(1);
}

Status KvPool::Impl::CommitTokens(SeqId seq, int64_t begin,
                                  std::span<const int32_t> tokens) try {
  SequenceTable::Group& group = sequences_.GroupOf(seq);
  const std::lock_guard lock(group.mutex);
  KvSequence* const sequence = group.Find(seq);
  if (sequence == nullptr) return NoSuchSequence(seq);
  const int64_t length = sequence->table.length();
  VARLANE_REQUIRE(
      begin >= 0 && begin <= length && std::ssize(tokens) <= length - begin,
      StatusCode::kOutOfRange, "begin = ", begin, " and ", tokens.size(),
      " tokens, but seq = ", seq, " has ", length, " tokens");
  if (prefixes_ == nullptr) return {};
  const int64_t known = sequence->tokens.length;
  VARLANE_REQUIRE(begin <= known, StatusCode::kOutOfRange, "begin = ", begin,
                  ", but of seq = ", seq, " only ", known,
                  " tokens are committed so far");
  if (begin + std::ssize(tokens) <= known) return {};
  std::vector<BlockId> freed;
  const auto charge = [&](BlockId block) {
    sequence->tenant->ForceCharge(1);
    charged_to_[static_cast<size_t>(block)] = sequence->tenant;
  };
  const Status status =
      prefixes_->Commit(tokens.subspan(static_cast<size_t>(known - begin)),
                        charge, &sequence->tokens, &sequence->table, &freed);
  for (const BlockId block : freed) {
    charged_to_[static_cast<size_t>(block)]->Refund(1);
  }
  FreeOwnerless(freed);
  return status;
} catch (const std::bad_alloc&) {
  return NoHeapFor("a sequence's tokens");
}

Result<PrefixPin> KvPool::Impl::PinPrefix(TenantId tenant,
                                          std::span<const int32_t> prompt) {
  VARLANE_REQUIRE(prefixes_ != nullptr, StatusCode::kFailedPrecondition,
                  "the pool has no prefix cache (KvPoolOptions::prefix_cache)");
  PrefixPin pin;
  const Result<int64_t> tokens = prefixes_->Pin(tenant, prompt, &pin.id);
  VARLANE_RETURN_IF_ERROR(tokens.status());
  pin.tokens = *tokens;
  return pin;
}

Status KvPool::Impl::UnpinPrefix(int64_t pin) {
  VARLANE_REQUIRE(prefixes_ != nullptr, StatusCode::kNotFound, "pin = ", pin,
                  ", but the pool has no prefix cache");
  return prefixes_->Unpin(pin);
}

PrefixCacheStats KvPool::Impl::prefix_stats() const {
  if (prefixes_ == nullptr) return {};
  PrefixCacheStats stats = prefixes_->stats();
  stats.copied_blocks = prefix_copies_.Sum();
  return stats;
}

}  // namespace varlane
