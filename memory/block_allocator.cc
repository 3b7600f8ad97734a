// SPDX-License-Identifier: Apache-2.0

#include "memory/block_allocator.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

constexpr std::memory_order kRelaxed = std::memory_order_relaxed;
constexpr uint64_t kOneCached = uint64_t{1} << 32;  // beside kOneFree = 1

// A thread beside which others take blocks keeps to a place of its own for so
// many calls: eight words away from theirs, another cache line of the free set
// and of all that stands there for a block.
constexpr int64_t kSpreadCalls = 256;
constexpr int64_t kSpreadBlocks = 512;

// What a thread takes to hand beyond its need, and has at most.
constexpr int64_t kToHand = 32;
constexpr int64_t kMostAtHand = 64;

}  // namespace

// One NUMA node's blocks. A position is a block's place in the order of handing
// out, counted from the node's first block; without a shuffle it is the id.
struct alignas(64) BlockAllocator::Node {
  explicit Node(const Options& options) : free(options.blocks_per_node) {
    if (!options.shuffle) return;
    const auto size = static_cast<size_t>(options.blocks_per_node);
    block_at.reserve(size);
    position_of.reserve(size);
  }

  FreeSet free;  // of positions
  // Permutation of all positions that there ever were, and its inverse; empty
  // unless shuffled. Written only by who has the allocator alone.
  std::vector<BlockId> block_at;
  std::vector<BlockId> position_of;

  // Free blocks that no thread has at hand in the low half, fewer than the set
  // has while some are being taken; cached ones in the high half.
  alignas(64) std::atomic<uint64_t> counts{0};

  // Free blocks at hand to threads of a slot. Who takes some first lowers such
  // a number, or that above: so there are always as many members of the set as
  // are owed to somebody.
  struct alignas(64) Hand {
    std::atomic<int64_t> free{0};
  };
  std::array<Hand, kThreadSlots> hands;
  // Held while numbers are on their way between hands and `counts`, when they
  // are in neither: who holds it and finds too few is right.
  mutable std::mutex passing;

  std::atomic<int64_t>& OwnHand() noexcept {
    return hands[ThreadSlot() % kThreadSlots].free;
  }
  // Requires: `passing` is held, or nobody else is there.
  void PassBack(Hand* hand, int64_t keep = 0) noexcept {
    const int64_t all = hand->free.exchange(0);
    const int64_t kept = std::min(all, keep);
    if (kept > 0) hand->free.fetch_add(kept);
    if (all > kept) counts.fetch_add(static_cast<uint64_t>(all - kept));
  }
  void PassAllBack() noexcept {
    for (Hand& hand : hands) PassBack(&hand);
  }
  int64_t at_hand() const noexcept {
    int64_t sum = 0;
    for (const Hand& hand : hands) sum += hand.free.load();
    return sum;
  }
};

BlockAllocator::BlockAllocator(const Options& options)
    : options_(options),
      per_node_(
          static_cast<uint32_t>(std::max<int64_t>(1, options.blocks_per_node))),
      random_state_(options.seed),
      capacities_(static_cast<size_t>(options.num_nodes)),
      words_(static_cast<size_t>(options.num_nodes * options.blocks_per_node)) {
  VARLANE_DCHECK(options.num_nodes >= 1 && max_blocks() >= 0 &&
                 max_blocks() <= std::numeric_limits<BlockId>::max());
  for (int node = 0; node < options.num_nodes; ++node) {
    nodes_.push_back(std::make_unique<Node>(options));
  }
}

BlockAllocator::~BlockAllocator() = default;

int64_t BlockAllocator::PositionOf(BlockId block) const noexcept {
  const int64_t local = IndexOf(block);
  if (!options_.shuffle) return local;
  const Node& node = *nodes_[static_cast<size_t>(NodeOf(block))];
  return node.position_of[static_cast<size_t>(local)];
}

BlockId BlockAllocator::BlockAt(int node, int64_t position) const noexcept {
  const int64_t local = options_.shuffle
                            ? nodes_[static_cast<size_t>(node)]
                                  ->block_at[static_cast<size_t>(position)]
                            : position;
  return static_cast<BlockId>(FirstBlockOf(node) + local);
}

// splitmix64 (Steele, Lea, Flood 2014), reduced by multiplication: the standard
// library's shuffle may differ from one implementation to the next.
uint64_t BlockAllocator::NextRandom(uint64_t bound) noexcept {
  random_state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = random_state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return (z >> 32) * bound >> 32;  // bound < 2^32
}

// Fisher-Yates over the blocks that never were before; the others keep their
// places. The vectors have their memory since construction.
void BlockAllocator::ShuffleNewBlocks(Node* node, int64_t begin,
                                      int64_t end) noexcept {
  begin = std::max(begin, static_cast<int64_t>(node->block_at.size()));
  for (int64_t i = begin; i < end; ++i) {
    node->block_at.push_back(static_cast<BlockId>(i));
    const auto chosen =
        begin +
        static_cast<int64_t>(NextRandom(static_cast<uint64_t>(i - begin + 1)));
    std::swap(node->block_at[static_cast<size_t>(i)],
              node->block_at[static_cast<size_t>(chosen)]);
  }
  if (begin >= end) return;
  node->position_of.resize(static_cast<size_t>(end));
  for (int64_t i = begin; i < end; ++i) {
    const BlockId block = node->block_at[static_cast<size_t>(i)];
    node->position_of[static_cast<size_t>(block)] = static_cast<BlockId>(i);
  }
}

// --- alone -------------------------------------------------------------------

bool BlockAllocator::Grow(int node, int64_t num_blocks) noexcept {
  Node& grown = *nodes_[static_cast<size_t>(node)];
  const int64_t begin = capacity(node);
  if (num_blocks < 0 || num_blocks > blocks_per_node() - begin) return false;
  const int64_t end = begin + num_blocks;
  capacities_[static_cast<size_t>(node)].store(end, std::memory_order_release);
  if (options_.shuffle) {
    ShuffleNewBlocks(&grown, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      grown.free.Insert(grown.position_of[static_cast<size_t>(i)]);
    }
  } else {
    grown.free.InsertRange(begin, end);
  }
  grown.counts.fetch_add(static_cast<uint64_t>(num_blocks));
  return true;
}

bool BlockAllocator::Shrink(int node, int64_t num_blocks) noexcept {
  Node& shrunk = *nodes_[static_cast<size_t>(node)];
  const int64_t end = capacity(node);
  if (num_blocks < 0 || num_blocks > end) return false;
  shrunk.PassAllBack();
  const BlockId first = FirstBlockOf(node);
  for (int64_t i = end - num_blocks; i < end; ++i) {
    const auto block = static_cast<BlockId>(first + i);
    if (!shrunk.free.Contains(PositionOf(block))) return false;
  }
  for (int64_t i = end - num_blocks; i < end; ++i) {
    (void)shrunk.free.Erase(PositionOf(static_cast<BlockId>(first + i)));
  }
  shrunk.counts.fetch_sub(static_cast<uint64_t>(num_blocks));
  capacities_[static_cast<size_t>(node)].store(end - num_blocks,
                                               std::memory_order_release);
  return true;
}

bool BlockAllocator::Move(BlockId from, BlockId to) noexcept {
  if (state(from) == BlockState::kFree || !IsBlock(to)) return false;
  Node& source = *nodes_[static_cast<size_t>(NodeOf(from))];
  Node& target = *nodes_[static_cast<size_t>(NodeOf(to))];
  if (!target.free.Erase(PositionOf(to))) return false;
  target.PassAllBack();
  const uint64_t cached = state(from) == BlockState::kCached ? kOneCached : 0;
  Word(to).store(Word(from).load());
  Word(from).store(0);
  source.free.Insert(PositionOf(from));
  target.counts.fetch_add(cached - 1);
  source.counts.fetch_sub(cached - 1);
  return true;
}

// --- any thread --------------------------------------------------------------

// Writes the blocks that stand at a word's taken positions; returns how many.
int64_t BlockAllocator::HandOut(int node, const FreeSet::Members& members,
                                BlockId* out) const noexcept {
  int64_t count = 0;
  for (uint64_t bits = members.bits; bits != 0; bits &= bits - 1) {
    const BlockId block =
        BlockAt(node, members.word * 64 + std::countr_zero(bits));
    VARLANE_DCHECK(Word(block).load() == 0);
    Word(block).store(1, std::memory_order_release);
    out[count++] = block;
  }
  return count;
}

// The right to `wanted` of the node's free blocks, or to fewer, `least` of them
// at least; 0 = there are not as many.
int64_t BlockAllocator::Owe(Node* node, int64_t wanted,
                            int64_t least) noexcept {
  std::atomic<int64_t>& hand = node->OwnHand();
  int64_t at_hand = hand.load(std::memory_order_relaxed);
  while (at_hand >= wanted) {
    if (hand.compare_exchange_weak(at_hand, at_hand - wanted)) return wanted;
  }
  return OweShared(node, wanted, least);
}

int64_t BlockAllocator::OweShared(Node* node, int64_t wanted,
                                  int64_t least) noexcept {
  const std::lock_guard lock(node->passing);
  node->PassBack(&node->hands[ThreadSlot() % kThreadSlots]);
  uint64_t counts = node->counts.load();
  if (static_cast<int64_t>(counts % kOneCached) < wanted) {
    node->PassAllBack();
    counts = node->counts.load();
  }
  int64_t owed = 0;
  int64_t more = 0;
  do {
    const auto free = static_cast<int64_t>(counts % kOneCached);
    owed = std::min(wanted, free);
    if (owed < least) return 0;
    // Only where there is plenty: what is at hand to one thread costs others a
    // visit to every hand.
    const int64_t share =
        (free - owed) / static_cast<int64_t>(4 * kThreadSlots);
    more = std::min(kToHand, share);
  } while (!node->counts.compare_exchange_weak(
      counts, counts - static_cast<uint64_t>(owed + more)));
  if (more > 0) node->OwnHand().fetch_add(more);
  return owed;
}

// The position from which the calling thread looks for blocks: 0, so that it
// finds the lowest, unless others have taken some of late.
int64_t BlockAllocator::PlaceOf(int node, Spread* spread) const noexcept {
  const int64_t calls = spread->calls.load(kRelaxed) + 1;
  spread->calls.store(calls, kRelaxed);
  if (calls % kSpreadCalls == 0) {
    int64_t others = -calls;
    for (const Spread& each : spread_) others += each.calls.load(kRelaxed);
    if (others == spread->others.load(kRelaxed)) {
      spread->place.store(0, kRelaxed);
    } else {
      KeepApart(node, spread);
      spread->others.store(others, kRelaxed);
    }
  }
  return spread->place.load(kRelaxed);
}

// A place that no other slot has which sees the same lowest block.
void BlockAllocator::KeepApart(int node, Spread* spread) const noexcept {
  const FreeSet& free = nodes_[static_cast<size_t>(node)]->free;
  const int64_t lowest = std::max<int64_t>(0, free.Min());
  const int64_t slot = spread - spread_.data();
  const int64_t place = RoundDown(lowest, kSpreadBlocks) + slot * kSpreadBlocks;
  spread->place.store(place % std::max<int64_t>(1, capacity(node)), kRelaxed);
}

// As many of the node's free blocks as there are, up to `out`'s size. What is
// owed is taken from the numbers first, so each caller finds its own.
int64_t BlockAllocator::TakeFromNode(int node,
                                     std::span<BlockId> out) noexcept {
  Node& source = *nodes_[static_cast<size_t>(node)];
  const auto wanted = static_cast<int64_t>(out.size());
  // With one node it is all or nothing, so that a refusal takes nothing away
  // from others even for a moment.
  const int64_t owed = Owe(&source, wanted, num_nodes() == 1 ? wanted : 1);

  Spread& spread = spread_[ThreadSlot() % kThreadSlots];
  const int64_t place = PlaceOf(node, &spread);
  int64_t taken = 0;
  while (taken < owed) {
    FreeSet::Members members;
    if (place > 0) members = source.free.Take(place, owed - taken);
    if (members.bits == 0) members = source.free.Take(0, owed - taken);
    if (members.contended) KeepApart(node, &spread);
    if (members.bits == 0) members = source.free.TakeSlow(owed - taken);
    taken += HandOut(node, members, &out[static_cast<size_t>(taken)]);
  }
  return taken;
}

bool BlockAllocator::Allocate(std::span<BlockId> out, int home,
                              int64_t* spilled) noexcept {
  if (spilled != nullptr) *spilled = 0;
  if (out.empty()) return true;
  int64_t taken = TakeFromNode(home, out);
  const int64_t at_home = taken;
  for (int i = 1; i < num_nodes() && taken < std::ssize(out); ++i) {
    taken += TakeFromNode((home + i) % num_nodes(),
                          out.subspan(static_cast<size_t>(taken)));
  }
  if (taken < std::ssize(out)) {
    out = out.first(static_cast<size_t>(taken));
    for (const BlockId block : out) Word(block).store(0);
    Free(out);
    return false;
  }
  references_.Add(taken);
  if (spilled != nullptr) *spilled = taken - at_home;
  return true;
}

BlockId BlockAllocator::Allocate() noexcept {
  BlockId block = kNoBlock;
  return Allocate({&block, 1}) ? block : kNoBlock;
}

bool BlockAllocator::Reference(BlockId block) noexcept {
  uint32_t word = WordOf(block);
  VARLANE_DCHECK((word & kCountMask) != 0);
  do {
    const uint32_t count = word & kCountMask;
    if (count == 0 || count == kCountMask) [[unlikely]] {
      return false;
    }
  } while (!Word(block).compare_exchange_weak(word, word + 1));
  references_.Add(1);
  return true;
}

Released BlockAllocator::Unreference(BlockId block) noexcept {
  uint32_t word = WordOf(block);
  VARLANE_DCHECK((word & kCountMask) != 0);
  for (;;) {
    if ((word & kCountMask) == 0) [[unlikely]] {
      return Released::kError;
    }
    // Counted as cached before it can be revived, so that the count of cached
    // blocks never falls below zero.
    const bool becomes_cached = word == (kKept | 1);
    Node& node = *nodes_[static_cast<size_t>(NodeOf(block))];
    if (becomes_cached) node.counts.fetch_add(kOneCached);
    if (Word(block).compare_exchange_strong(word, word - 1)) {
      references_.Add(-1);
      if (becomes_cached) return Released::kCached;
      return word == 1 ? Released::kFreed : Released::kShared;
    }
    if (becomes_cached) node.counts.fetch_sub(kOneCached);
  }
}

void BlockAllocator::Free(std::span<const BlockId> blocks) noexcept {
  for (size_t i = 0; i < blocks.size();) {
    const int node = NodeOf(blocks[i]);
    Node& owner = *nodes_[static_cast<size_t>(node)];
    const int64_t word = PositionOf(blocks[i]) / 64;
    uint64_t bits = 0;
    int64_t count = 0;
    for (; i < blocks.size() && NodeOf(blocks[i]) == node; ++i) {
      VARLANE_DCHECK(Word(blocks[i]).load() == 0);
      const int64_t position = PositionOf(blocks[i]);
      if (position / 64 != word) break;
      bits |= uint64_t{1} << (position % 64);
      ++count;
    }
    owner.free.InsertBits(word, bits);
    std::atomic<int64_t>& hand = owner.OwnHand();
    if (hand.fetch_add(count) + count <= kMostAtHand) continue;
    const std::lock_guard lock(owner.passing);
    owner.PassBack(&owner.hands[ThreadSlot() % kThreadSlots], kToHand);
  }
}

Released BlockAllocator::Release(BlockId block) noexcept {
  const Released released = Unreference(block);
  if (released == Released::kFreed) Free({&block, 1});
  return released;
}

bool BlockAllocator::Keep(BlockId block) noexcept {
  uint32_t word = WordOf(block);
  do {
    if ((word & kCountMask) == 0 || (word & kKept) != 0) return false;
  } while (!Word(block).compare_exchange_weak(word, word | kKept));
  return true;
}

bool BlockAllocator::Unkeep(BlockId block) noexcept {
  uint32_t word = WordOf(block);
  do {
    if ((word & kKept) == 0) return false;
  } while (!Word(block).compare_exchange_weak(word, word & kCountMask));
  if (word != kKept) return false;
  nodes_[static_cast<size_t>(NodeOf(block))]->counts.fetch_sub(kOneCached);
  return true;
}

Revived BlockAllocator::Revive(BlockId block) noexcept {
  uint32_t word = WordOf(block);
  do {
    if ((word & kKept) == 0 || (word & kCountMask) == kCountMask) {
      return Revived::kGone;
    }
  } while (!Word(block).compare_exchange_weak(word, word + 1));
  references_.Add(1);
  if (word != kKept) return Revived::kShared;
  nodes_[static_cast<size_t>(NodeOf(block))]->counts.fetch_sub(kOneCached);
  return Revived::kFromCached;
}

// --- looking -----------------------------------------------------------------

BlockState BlockAllocator::state(BlockId block) const noexcept {
  const uint32_t word = WordOf(block);
  if (word == 0) return BlockState::kFree;
  return word == kKept ? BlockState::kCached : BlockState::kReferenced;
}

BlockCounts BlockAllocator::counts(int node) const noexcept {
  const Node& of = *nodes_[static_cast<size_t>(node)];
  BlockCounts out = {.capacity = capacity(node)};
  const std::lock_guard lock(of.passing);
  const uint64_t counts = of.counts.load();
  out.cached = static_cast<int64_t>(counts / kOneCached);
  // A block that goes from hand to hand meanwhile may be seen in both.
  out.free = std::min(static_cast<int64_t>(counts % kOneCached) + of.at_hand(),
                      out.capacity - out.cached);
  return out;
}

int64_t BlockAllocator::ReferencedBlocksAtMost() const noexcept {
  int64_t sum = 0;
  for (int node = 0; node < num_nodes(); ++node) {
    Node& of = *nodes_[static_cast<size_t>(node)];
    const uint64_t counts = of.counts.load();
    sum += capacity(node) - static_cast<int64_t>(counts / kOneCached) -
           static_cast<int64_t>(counts % kOneCached) -
           of.OwnHand().load(std::memory_order_relaxed);
  }
  return sum;
}

int64_t BlockAllocator::FreeBlocksAtLeast() const noexcept {
  int64_t sum = 0;
  for (const std::unique_ptr<Node>& node : nodes_) {
    sum += static_cast<int64_t>(node->counts.load() % kOneCached) +
           node->OwnHand().load(std::memory_order_relaxed);
  }
  return sum;
}

BlockCounts BlockAllocator::counts() const noexcept {
  BlockCounts sum;
  for (int node = 0; node < num_nodes(); ++node) {
    const BlockCounts part = counts(node);
    sum.capacity += part.capacity;
    sum.free += part.free;
    sum.cached += part.cached;
  }
  return sum;
}

BlockId BlockAllocator::FirstFree(int node) const noexcept {
  const int64_t position = nodes_[static_cast<size_t>(node)]->free.Min();
  return position < 0 ? kNoBlock : BlockAt(node, position);
}

Status BlockAllocator::CheckNode(int node, int64_t* references) const {
  constexpr auto kInternal = StatusCode::kInternal;
  const FreeSet& free_set = nodes_[static_cast<size_t>(node)]->free;
  const BlockCounts total = counts(node);
  BlockCounts walked = {.capacity = total.capacity};
  for (int64_t i = 0; i < total.capacity; ++i) {
    const auto block = static_cast<BlockId>(FirstBlockOf(node) + i);
    const int64_t position = PositionOf(block);
    VARLANE_REQUIRE(position >= 0 && position < blocks_per_node() &&
                        BlockAt(node, position) == block,
                    kInternal, "block ", block, " stands at position ",
                    position, " of ", blocks_per_node(),
                    ", which is not its own");
    const BlockState is = state(block);
    const bool is_free = free_set.Contains(position);
    VARLANE_REQUIRE((is == BlockState::kFree) == is_free, kInternal, "block ",
                    block, " has ", reference_count(block), " references and ",
                    is_kept(block) ? "is" : "is not", " kept, but is ",
                    is_free ? "free" : "not free");
    walked.free += is == BlockState::kFree ? 1 : 0;
    walked.cached += is == BlockState::kCached ? 1 : 0;
    *references += reference_count(block);
  }
  VARLANE_REQUIRE(walked.free == total.free && walked.cached == total.cached,
                  kInternal, "node ", node, " has ", walked.free, " free and ",
                  walked.cached, " cached blocks, but its totals say ",
                  total.free, " and ", total.cached);
  const int64_t members = free_set.CountSlow();
  VARLANE_REQUIRE(members >= 0, kInternal,
                  "a summary of the free set hides a member");
  VARLANE_REQUIRE(members == walked.free, kInternal, "node ", node, " has ",
                  walked.free, " free blocks, but its free set has ", members);
  return {};
}

Status BlockAllocator::CheckInvariants() const {
  int64_t references = 0;
  for (int node = 0; node < num_nodes(); ++node) {
    VARLANE_RETURN_IF_ERROR(CheckNode(node, &references));
  }
  VARLANE_REQUIRE(references == references_.Sum(), StatusCode::kInternal,
                  "the blocks have ", references,
                  " references, but the total says ", references_.Sum());
  return {};
}

}  // namespace varlane
