// SPDX-License-Identifier: Apache-2.0

#include "memory/pool_prefixes.h"

#include <algorithm>
#include <new>

#include "base/check.h"

namespace varlane {

PoolPrefixes::PoolPrefixes(const PrefixCacheOptions& options,
                           BlockAllocator* allocator)
    : block_size_(options.block_size), allocator_(allocator), cache_(options) {}

// --- sequences ---------------------------------------------------------------

PoolPrefixes::Taken PoolPrefixes::Take(std::span<const int32_t> prompt,
                                       int64_t max_revived,
                                       OnRevived on_revived,
                                       CommittedTokens* tokens,
                                       BlockTable* table) {
  Taken taken;
  if (prompt.size() <= 1) return taken;
  prompt = prompt.first(prompt.size() - 1);
  const auto block_size = static_cast<size_t>(block_size_);
  const size_t num_blocks = prompt.size() / block_size;
  // Whatever may throw comes before a reference is taken.
  std::vector<BlockId> blocks;
  blocks.reserve(num_blocks);
  table->ReserveBlocks(static_cast<int64_t>(num_blocks) + 1);
  tokens->tail.reserve(block_size);

  const std::lock_guard lock(mutex_);
  const PrefixCache::Match match =
      cache_.Find(tokens->cursor.tenant, prompt, &blocks);
  for (const BlockId block : blocks) {
    if (taken.revived_blocks == max_revived &&
        allocator_->state(block) == BlockState::kCached) {
      break;
    }
    const Revived revived = allocator_->Revive(block);
    // 2^31 - 1 sequences have it: this one computes it anew.
    if (revived == Revived::kGone) break;
    cache_.Acquire(block);
    table->AddBlock(block);
    if (revived != Revived::kFromCached) continue;
    on_revived(block);
    ++taken.revived_blocks;
  }
  tokens->length = table->num_blocks() * block_size_;
  tokens->cursor = match.cursor;
  for (size_t n = blocks.size(); static_cast<int64_t>(n) > table->num_blocks();
       --n) {
    tokens->cursor = cache_.Parent(tokens->cursor);
  }
  if (match.partial_tokens > 0 &&
      static_cast<size_t>(table->num_blocks()) == blocks.size()) {
    const Revived revived = allocator_->Revive(match.partial_block);
    if (revived != Revived::kGone) {
      // Not evicted while it is copied; used, so it goes later.
      cache_.Acquire(match.partial_block);
      taken.partial_block = match.partial_block;
      taken.partial_tokens = match.partial_tokens;
      taken.partial_revived = revived == Revived::kFromCached;
      if (taken.partial_revived) on_revived(match.partial_block);
    }
  }
  table->SetLength(tokens->length);
  NoteEvictable();
  return taken;
}

PrefixCache::Peeked PoolPrefixes::Peek(uint64_t tenant,
                                       std::span<const int32_t> prompt) {
  if (prompt.empty()) return {};
  const std::lock_guard lock(mutex_);
  return cache_.Peek(tenant, prompt.first(prompt.size() - 1));
}

Status PoolPrefixes::Commit(std::span<const int32_t> more, OnRevived on_revived,
                            CommittedTokens* tokens, BlockTable* table,
                            std::vector<BlockId>* freed) try {
  const auto block_size = static_cast<size_t>(block_size_);
  tokens->tail.reserve(block_size);
  freed->reserve(freed->size() +
                 (tokens->tail.size() + more.size()) / block_size);
  while (!more.empty()) {
    const size_t count =
        std::min(more.size(), block_size - tokens->tail.size());
    const std::span<const int32_t> next = more.first(count);
    tokens->tail.insert(tokens->tail.end(), next.begin(), next.end());
    if (tokens->tail.size() == block_size) {
      const Status status =
          CommitBlock(tokens->tail, on_revived, tokens, table, freed);
      if (!status.ok()) {
        tokens->tail.resize(block_size - count);
        return status;
      }
      tokens->tail.clear();
    }
    tokens->length += static_cast<int64_t>(count);
    more = more.subspan(count);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kResourceExhausted, "no memory for a sequence's tokens"};
}

Status PoolPrefixes::CommitBlock(std::span<const int32_t> block_tokens,
                                 OnRevived on_revived, CommittedTokens* tokens,
                                 BlockTable* table,
                                 std::vector<BlockId>* freed) try {
  const int64_t entry = tokens->length / block_size_;
  const BlockId own = table->blocks()[static_cast<size_t>(entry)];
  PrefixCache::Cursor cursor = tokens->cursor;
  const std::lock_guard lock(mutex_);
  const BlockId known = cache_.Insert(&cursor, block_tokens, own);
  VARLANE_REQUIRE_ARG(known != kNoBlock, "tokens [", entry * block_size_, ", ",
                      (entry + 1) * block_size_, ") stand in block ", own,
                      ", which is known to hold others");
  if (known == own) {
    (void)allocator_->Keep(own);  // a fork may have committed it before
  } else {
    const Revived found = allocator_->Revive(known);
    VARLANE_REQUIRE(found != Revived::kGone, StatusCode::kResourceExhausted,
                    "block ", known, " cannot be shared once more");
    cache_.Acquire(known);
    if (found == Revived::kFromCached) on_revived(known);
    table->ReplaceBlock(entry, known);
    // Not kept, or Insert would have refused.
    if (allocator_->Unreference(own) == Released::kFreed) freed->push_back(own);
    NoteEvictable();
  }
  tokens->cursor = cursor;
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kResourceExhausted, "no memory to index a block"};
}

void PoolPrefixes::Truncate(int64_t length, CommittedTokens* tokens) {
  if (length >= tokens->length) return;
  tokens->tail.reserve(static_cast<size_t>(block_size_));
  const int64_t full_blocks = tokens->length / block_size_;
  const int64_t kept_blocks = length / block_size_;
  const auto rest = static_cast<size_t>(length % block_size_);
  if (full_blocks > kept_blocks) {
    const std::lock_guard lock(mutex_);
    for (int64_t i = full_blocks; i > kept_blocks + 1; --i) {
      tokens->cursor = cache_.Parent(tokens->cursor);
    }
    const std::span<const int32_t> cut =
        cache_.Tokens(cache_.BlockAt(tokens->cursor)).first(rest);
    tokens->tail.assign(cut.begin(), cut.end());
    tokens->cursor = cache_.Parent(tokens->cursor);
  } else {
    tokens->tail.resize(rest);
  }
  tokens->length = length;
}

// --- blocks ------------------------------------------------------------------

Released PoolPrefixes::Unreference(BlockId block) noexcept {
  const Released released = allocator_->Unreference(block);
  if (released != Released::kCached) return released;
  const std::lock_guard lock(mutex_);
  // Found, and maybe given back once more, by others since.
  if (allocator_->state(block) == BlockState::kCached) {
    (void)cache_.Release(block);
    NoteEvictable();
  }
  return released;
}

bool PoolPrefixes::CanWrite(BlockId block) const noexcept {
  if (!allocator_->is_kept(block)) return true;
  const std::lock_guard lock(mutex_);
  return cache_.IsLooseLeaf(block);
}

bool PoolPrefixes::MakeWritable(BlockId block) noexcept {
  if (allocator_->is_shared(block)) return false;
  if (!allocator_->is_kept(block)) return true;
  const std::lock_guard lock(mutex_);
  if (allocator_->is_shared(block) || !cache_.IsLooseLeaf(block)) return false;
  cache_.Forget(block);
  (void)allocator_->Unkeep(block);
  return true;
}

int64_t PoolPrefixes::Evict(std::span<BlockId> blocks) noexcept {
  const std::lock_guard lock(mutex_);
  int64_t count = 0;
  for (BlockId& block : blocks) {
    block = cache_.Evict();
    if (block == kNoBlock) break;
    const bool is_ownerless = allocator_->Unkeep(block);
    VARLANE_DCHECK(is_ownerless);
    (void)is_ownerless;
    ++count;
  }
  NoteEvictable();
  return count;
}

void PoolPrefixes::Move(BlockId from, BlockId to) noexcept {
  const std::lock_guard lock(mutex_);
  cache_.Move(from, to);
}

// --- pins --------------------------------------------------------------------

Result<int64_t> PoolPrefixes::Pin(uint64_t tenant,
                                  std::span<const int32_t> prompt,
                                  int64_t* pin) try {
  const std::lock_guard lock(mutex_);
  std::vector<BlockId> blocks;
  const PrefixCache::Match match = cache_.Find(tenant, prompt, &blocks);
  *pin = next_pin_;
  pins_.emplace(*pin, match.cursor);
  ++next_pin_;
  cache_.Pin(match.cursor);
  NoteEvictable();
  return static_cast<int64_t>(blocks.size()) * block_size_;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory for a pin");
}

Status PoolPrefixes::Unpin(int64_t pin) {
  const std::lock_guard lock(mutex_);
  const auto found = pins_.find(pin);
  VARLANE_REQUIRE(found != pins_.end(), StatusCode::kNotFound, "pin = ", pin,
                  ", but there is no such pin");
  cache_.Unpin(found->second);
  pins_.erase(found);
  NoteEvictable();
  return {};
}

// --- looking -----------------------------------------------------------------

PrefixCacheStats PoolPrefixes::stats() const {
  const std::lock_guard lock(mutex_);
  return cache_.stats();
}

Status PoolPrefixes::CheckSequence(const CommittedTokens& tokens,
                                   const BlockTable& table) const {
  constexpr auto kInternal = StatusCode::kInternal;
  const std::lock_guard lock(mutex_);
  VARLANE_REQUIRE(tokens.length <= table.length() &&
                      std::ssize(tokens.tail) == tokens.length % block_size_,
                  kInternal, tokens.length, " of ", table.length(),
                  " tokens are committed, ", tokens.tail.size(),
                  " of them in the tail");
  PrefixCache::Cursor cursor = tokens.cursor;
  for (int64_t i = tokens.length / block_size_; i > 0; --i) {
    const BlockId block = table.blocks()[static_cast<size_t>(i - 1)];
    VARLANE_REQUIRE(cache_.BlockAt(cursor) == block, kInternal, "block ", block,
                    " is indexed as block ", cache_.BlockAt(cursor));
    cursor = cache_.Parent(cursor);
  }
  VARLANE_REQUIRE(cursor.node == PrefixCache::kStart, kInternal,
                  "more blocks are indexed than committed");
  return {};
}

Status PoolPrefixes::CheckInvariants() const {
  constexpr auto kInternal = StatusCode::kInternal;
  const std::lock_guard lock(mutex_);
  VARLANE_RETURN_IF_ERROR(cache_.CheckInvariants());
  int64_t kept = 0;
  for (int64_t i = 0; i < allocator_->max_blocks(); ++i) {
    const auto block = static_cast<BlockId>(i);
    const bool is_kept = allocator_->is_kept(block);
    VARLANE_REQUIRE(is_kept == cache_.Contains(block), kInternal, "block ", i,
                    " is ",
                    is_kept ? "kept but not indexed" : "indexed but not kept");
    kept += is_kept ? 1 : 0;
  }
  const PrefixCacheStats& stats = cache_.stats();
  VARLANE_REQUIRE(kept == stats.indexed_blocks &&
                      allocator_->cached_blocks() == stats.cached_blocks,
                  kInternal, "the index has ", stats.indexed_blocks,
                  " blocks, ", stats.cached_blocks,
                  " of them cached, but the allocator ", kept, " and ",
                  allocator_->cached_blocks());
  return {};
}

}  // namespace varlane
