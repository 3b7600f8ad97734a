// SPDX-License-Identifier: Apache-2.0

#include "memory/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"

namespace varlane {

PrefixCache::PrefixCache(const PrefixCacheOptions& options)
    : block_size_(options.block_size),
      max_blocks_(options.max_blocks),
      hasher_(options.key, options.hash_mask) {
  VARLANE_DCHECK(block_size_ >= 1 && max_blocks_ >= 0);
  const auto size = static_cast<size_t>(max_blocks_);
  // What is reserved but never used is never touched.
  nodes_.reserve(size);
  node_of_block_.reserve(size);
  tokens_ = std::make_unique_for_overwrite<int32_t[]>(
      size * static_cast<size_t>(block_size_));
  buckets_.resize(std::bit_ceil(std::max<size_t>(1, size)), kNone);
}

// --- lookup ------------------------------------------------------------------

uint64_t PrefixCache::HashBehind(const Cursor& cursor) const noexcept {
  return cursor.node == kStart ? hasher_.Tenant(cursor.tenant)
                               : At(cursor.node).hash;
}

PrefixCache::NodeId PrefixCache::FindChild(
    const Cursor& cursor, uint64_t hash,
    std::span<const int32_t> tokens) noexcept {
  for (NodeId node = Bucket(hash); node != kNone;
       node = At(node).next_in_bucket) {
    const Node& found = At(node);
    if (found.hash != hash) continue;
    // The parent was found in the same way, so this compares all tokens from
    // the first one on, though it looks at one block's only.
    if (found.parent == cursor.node && found.tenant == cursor.tenant &&
        std::equal(tokens.begin(), tokens.end(), TokensAt(node))) {
      return node;
    }
    ++stats_.collisions;
  }
  return kNone;
}

template <typename Visit>
PrefixCache::Cursor PrefixCache::Walk(uint64_t tenant,
                                      std::span<const int32_t> tokens,
                                      Visit visit) {
  const auto block_size = static_cast<size_t>(block_size_);
  Cursor cursor = {.tenant = tenant};
  uint64_t hash = hasher_.Tenant(tenant);
  for (; tokens.size() >= block_size; tokens = tokens.subspan(block_size)) {
    const auto block = tokens.first(block_size);
    hash = hasher_.Block(hash, block);
    const NodeId node = FindChild(cursor, hash, block);
    if (node == kNone) break;
    cursor.node = node;
    visit(node);
  }
  return cursor;
}

PrefixCache::Match PrefixCache::Find(uint64_t tenant,
                                     std::span<const int32_t> tokens,
                                     std::vector<BlockId>* blocks) {
  const size_t before = blocks->size();
  Match match;
  match.cursor = Walk(tenant, tokens,
                      [&](NodeId node) { blocks->push_back(At(node).block); });
  const size_t found = blocks->size() - before;
  const auto block_size = static_cast<size_t>(block_size_);
  ++stats_.lookups;
  stats_.lookup_blocks += static_cast<int64_t>(tokens.size() / block_size);
  stats_.hit_blocks += static_cast<int64_t>(found);
  FindPartial(tokens.subspan(found * block_size), &match);
  return match;
}

PrefixCache::Peeked PrefixCache::Peek(
    uint64_t tenant, std::span<const int32_t> tokens) noexcept {
  Peeked peeked;
  (void)Walk(tenant, tokens, [&](NodeId node) {
    ++peeked.blocks;
    peeked.cached_blocks += At(node).is_referenced ? 0 : 1;
  });
  return peeked;
}

void PrefixCache::FindPartial(std::span<const int32_t> tokens,
                              Match* match) noexcept {
  if (tokens.empty()) return;
  const auto wanted = static_cast<std::ptrdiff_t>(
      std::min(tokens.size(), static_cast<size_t>(block_size_)));
  NodeId node = FirstChild(match->cursor);
  for (int i = 0; i < kSiblings && node != kNone; ++i) {
    const auto end = tokens.begin() + wanted;
    const auto common = static_cast<int>(
        std::mismatch(tokens.begin(), end, TokensAt(node)).first -
        tokens.begin());
    if (common > match->partial_tokens) {
      match->partial_tokens = common;
      match->partial_block = At(node).block;
    }
    node = At(node).next_sibling;
  }
  if (match->partial_tokens == 0) return;
  ++stats_.partial_hits;
  stats_.partial_hit_tokens += match->partial_tokens;
}

PrefixCache::NodeId PrefixCache::FirstChild(
    const Cursor& cursor) const noexcept {
  if (cursor.node != kStart) return At(cursor.node).first_child;
  const auto found = tenants_.find(cursor.tenant);
  return found == tenants_.end() ? kNone : found->second.first_child;
}

bool PrefixCache::IsLooseLeaf(BlockId block) const noexcept {
  const Node& node = At(NodeOf(block));
  return node.first_child == kNone && node.pins == 0;
}

std::span<const int32_t> PrefixCache::Tokens(BlockId block) const noexcept {
  VARLANE_DCHECK(Contains(block));
  return {TokensAt(NodeOf(block)), static_cast<size_t>(block_size_)};
}

PrefixCache::Cursor PrefixCache::Parent(const Cursor& cursor) const noexcept {
  VARLANE_DCHECK(cursor.node != kStart);
  return {cursor.tenant, At(cursor.node).parent};
}

BlockId PrefixCache::BlockAt(const Cursor& cursor) const noexcept {
  return cursor.node == kStart ? kNoBlock : At(cursor.node).block;
}

// --- insertion and removal ---------------------------------------------------

BlockId PrefixCache::Insert(Cursor* cursor, std::span<const int32_t> tokens,
                            BlockId block) {
  VARLANE_DCHECK(static_cast<int>(tokens.size()) == block_size_);
  VARLANE_DCHECK(block >= 0 && block < max_blocks_);
  const uint64_t hash = hasher_.Block(HashBehind(*cursor), tokens);
  const NodeId known = FindChild(*cursor, hash, tokens);
  const NodeId indexed = NodeOf(block);
  if (indexed != kNone && indexed != known) return kNoBlock;
  if (known != kNone) {
    ++stats_.duplicate_blocks;
    cursor->node = known;
    return At(known).block;
  }
  if (cursor->node == kStart) tenants_.try_emplace(cursor->tenant);
  // Nothing below can fail: the rest has its room since construction.
  const NodeId node = NewNode();
  At(node) = {.hash = hash,
              .tenant = cursor->tenant,
              .block = block,
              .parent = cursor->node,
              .next_in_bucket = std::exchange(Bucket(hash), node),
              .is_referenced = true};
  std::copy(tokens.begin(), tokens.end(), TokensAt(node));
  if (static_cast<size_t>(block) >= node_of_block_.size()) {
    node_of_block_.resize(static_cast<size_t>(block) + 1, kNone);
  }
  node_of_block_[static_cast<size_t>(block)] = node;
  LinkToParent(node);
  ++stats_.inserted_blocks;
  ++stats_.indexed_blocks;
  cursor->node = node;
  return block;
}

PrefixCache::NodeId PrefixCache::NewNode() noexcept {
  if (unused_ != kNone) {
    return std::exchange(unused_, At(unused_).next_in_bucket);
  }
  nodes_.emplace_back();
  return static_cast<NodeId>(nodes_.size() - 1);
}

void PrefixCache::LinkToParent(NodeId node) noexcept {
  Node& child = At(node);
  NodeId& first = child.parent == kNone
                      ? tenants_.find(child.tenant)->second.first_child
                      : At(child.parent).first_child;
  child.next_sibling = first;
  if (first != kNone) At(first).prev_sibling = node;
  first = node;
}

void PrefixCache::UnlinkFromParent(NodeId node) noexcept {
  const Node& child = At(node);
  if (child.next_sibling != kNone) {
    At(child.next_sibling).prev_sibling = child.prev_sibling;
  }
  if (child.prev_sibling != kNone) {
    At(child.prev_sibling).next_sibling = child.next_sibling;
  } else if (child.parent != kNone) {
    At(child.parent).first_child = child.next_sibling;
  } else if (child.next_sibling != kNone) {
    tenants_.find(child.tenant)->second.first_child = child.next_sibling;
  } else {
    tenants_.erase(child.tenant);
  }
}

void PrefixCache::UnlinkFromBucket(NodeId node) noexcept {
  NodeId* link = &Bucket(At(node).hash);
  while (*link != node) link = &At(*link).next_in_bucket;
  *link = At(node).next_in_bucket;
}

void PrefixCache::Drop(NodeId node) noexcept {
  Node& dropped = At(node);
  VARLANE_DCHECK(dropped.first_child == kNone && !dropped.is_listed);
  UnlinkFromBucket(node);
  UnlinkFromParent(node);
  node_of_block_[static_cast<size_t>(dropped.block)] = kNone;
  dropped = {.next_in_bucket = std::exchange(unused_, node)};
  --stats_.indexed_blocks;
}

void PrefixCache::Forget(BlockId block) noexcept {
  VARLANE_DCHECK(Contains(block) && IsLooseLeaf(block));
  const NodeId node = NodeOf(block);
  Acquire(block);
  Drop(node);
}

void PrefixCache::Move(BlockId from, BlockId to) noexcept {
  const NodeId node = NodeOf(from);
  if (node == kNone) return;
  VARLANE_DCHECK(to >= 0 && to < max_blocks_ && !Contains(to));
  if (static_cast<size_t>(to) >= node_of_block_.size()) {
    node_of_block_.resize(static_cast<size_t>(to) + 1, kNone);
  }
  node_of_block_[static_cast<size_t>(from)] = kNone;
  node_of_block_[static_cast<size_t>(to)] = node;
  At(node).block = to;
}

// --- the order of eviction ---------------------------------------------------

void PrefixCache::Acquire(BlockId block) noexcept {
  const NodeId node = NodeOf(block);
  if (node == kNone || At(node).is_referenced) return;
  At(node).is_referenced = true;
  --stats_.cached_blocks;
  UpdateListing(node);
}

bool PrefixCache::Release(BlockId block) noexcept {
  const NodeId node = NodeOf(block);
  if (node == kNone) return false;
  if (!At(node).is_referenced) return true;
  At(node).is_referenced = false;
  ++stats_.cached_blocks;
  UpdateListing(node);
  return true;
}

void PrefixCache::Pin(const Cursor& cursor) noexcept {
  for (NodeId node = cursor.node; node != kNone; node = At(node).parent) {
    if (At(node).pins++ == 0) ++stats_.pinned_blocks;
    UpdateListing(node);
  }
}

void PrefixCache::Unpin(const Cursor& cursor) noexcept {
  for (NodeId node = cursor.node; node != kNone; node = At(node).parent) {
    VARLANE_DCHECK(At(node).pins > 0);
    if (--At(node).pins == 0) --stats_.pinned_blocks;
    UpdateListing(node);
  }
}

void PrefixCache::UpdateListing(NodeId node) noexcept {
  Node& changed = At(node);
  const bool is_evictable = !changed.is_referenced && changed.pins == 0;
  if (is_evictable == changed.is_listed) return;
  changed.is_listed = is_evictable;
  if (is_evictable) {
    changed.older = newest_;
    changed.newer = kNone;
    (newest_ == kNone ? oldest_ : At(newest_).newer) = node;
    newest_ = node;
    ++stats_.evictable_blocks;
    return;
  }
  (changed.older == kNone ? oldest_ : At(changed.older).newer) = changed.newer;
  (changed.newer == kNone ? newest_ : At(changed.newer).older) = changed.older;
  changed.older = kNone;
  changed.newer = kNone;
  --stats_.evictable_blocks;
}

BlockId PrefixCache::Evict() noexcept {
  if (oldest_ == kNone) return kNoBlock;
  const NodeId node = oldest_;
  const BlockId block = At(node).block;
  Acquire(block);
  Drop(node);
  ++stats_.evicted_blocks;
  return block;
}

// --- invariants --------------------------------------------------------------

Status PrefixCache::CheckInvariants() const {
  constexpr auto kInternal = StatusCode::kInternal;
  PrefixCacheStats now;
  for (size_t block = 0; block < node_of_block_.size(); ++block) {
    const NodeId node = node_of_block_[block];
    if (node == kNone) continue;
    VARLANE_REQUIRE(node >= 0 && node < static_cast<NodeId>(nodes_.size()) &&
                        At(node).block == static_cast<BlockId>(block),
                    kInternal, "block ", block, " has node ", node,
                    ", which is not its own");
    VARLANE_RETURN_IF_ERROR(CheckNode(node));
    ++now.indexed_blocks;
    now.cached_blocks += At(node).is_referenced ? 0 : 1;
    now.pinned_blocks += At(node).pins > 0 ? 1 : 0;
    now.evictable_blocks += At(node).is_listed ? 1 : 0;
  }
  size_t unused = 0;
  for (NodeId node = unused_; node != kNone && unused <= nodes_.size();
       node = At(node).next_in_bucket) {
    ++unused;
  }
  VARLANE_REQUIRE(
      unused + static_cast<size_t>(now.indexed_blocks) == nodes_.size(),
      kInternal, now.indexed_blocks, " nodes in use + ", unused,
      " unused ones are not ", nodes_.size());
  VARLANE_REQUIRE(now.indexed_blocks == stats_.indexed_blocks &&
                      now.cached_blocks == stats_.cached_blocks &&
                      now.pinned_blocks == stats_.pinned_blocks &&
                      now.evictable_blocks == stats_.evictable_blocks,
                  kInternal, "there are ", now.indexed_blocks, " indexed, ",
                  now.cached_blocks, " cached, ", now.pinned_blocks,
                  " pinned and ", now.evictable_blocks,
                  " evictable blocks, but the totals say ",
                  stats_.indexed_blocks, ", ", stats_.cached_blocks, ", ",
                  stats_.pinned_blocks, " and ", stats_.evictable_blocks);
  return CheckOrder();
}

Status PrefixCache::CheckNode(NodeId node) const {
  constexpr auto kInternal = StatusCode::kInternal;
  const Node& checked = At(node);
  const Cursor parent = {checked.tenant, checked.parent};
  VARLANE_REQUIRE(
      parent.node == kNone || At(parent.node).tenant == parent.tenant,
      kInternal, "block ", checked.block,
      " has another tenant than its parent");
  VARLANE_REQUIRE(
      checked.hash == hasher_.Block(HashBehind(parent), Tokens(checked.block)),
      kInternal, "block ", checked.block, " has a hash that is not its own");
  NodeId found =
      buckets_[static_cast<size_t>(checked.hash) & (buckets_.size() - 1)];
  while (found != kNone && found != node) found = At(found).next_in_bucket;
  VARLANE_REQUIRE(found == node, kInternal, "block ", checked.block,
                  " is not found by its hash");
  VARLANE_REQUIRE(checked.prev_sibling == kNone
                      ? FirstChild(parent) == node
                      : At(checked.prev_sibling).next_sibling == node,
                  kInternal, "block ", checked.block,
                  " is not in its parent's list");
  VARLANE_REQUIRE(
      checked.is_listed == (!checked.is_referenced && checked.pins == 0),
      kInternal, "block ", checked.block,
      checked.is_listed ? " can be evicted though in use"
                        : " cannot be evicted though unused");
  if (parent.node == kNone) return {};
  const Node& above = At(parent.node);
  VARLANE_REQUIRE(!checked.is_referenced || above.is_referenced, kInternal,
                  "block ", checked.block, " is referenced, but block ",
                  above.block, " before it is not");
  VARLANE_REQUIRE(checked.pins <= above.pins, kInternal, "block ",
                  checked.block, " has more pins than block ", above.block,
                  " before it");
  return {};
}

Status PrefixCache::CheckOrder() const {
  constexpr auto kInternal = StatusCode::kInternal;
  std::vector<bool> is_older(nodes_.size(), false);
  int64_t listed = 0;
  for (NodeId node = oldest_; node != kNone; node = At(node).newer) {
    const Node& checked = At(node);
    VARLANE_REQUIRE(checked.is_listed && ++listed <= stats_.evictable_blocks,
                    kInternal, "the order of eviction does not end, or has ",
                    "block ", checked.block, ", which is in use");
    const NodeId parent = checked.parent;
    VARLANE_REQUIRE(parent == kNone || !is_older[static_cast<size_t>(parent)],
                    kInternal, "block ", checked.block,
                    " would be evicted after the block before it");
    is_older[static_cast<size_t>(node)] = true;
  }
  VARLANE_REQUIRE(listed == stats_.evictable_blocks, kInternal,
                  "the order of eviction has ", listed, " blocks, but ",
                  stats_.evictable_blocks, " are evictable");
  return {};
}

}  // namespace varlane
