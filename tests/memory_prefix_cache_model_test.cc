// Random operations on the prefix cache, after each of which it equals a model
// that keeps whole prefixes in a map and searches all of them for everything.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "memory/prefix_cache.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

constexpr int kOperations = testing::Operations(400'000, 30'000);
constexpr int kBlockSize = 2;
constexpr int64_t kCapacity = 48;

using Tokens = std::vector<int32_t>;
// A tenant and all tokens from the first one on.
using Prefix = std::pair<uint64_t, Tokens>;

struct ModelBlock {
  BlockId id = kNoBlock;
  int references = 0;
  int pins = 0;
  int64_t unused_since = 0;  // only while neither referenced nor pinned
};

struct Sequence {
  uint64_t tenant = 0;
  Tokens tokens;
  std::vector<BlockId> blocks;
  PrefixCache::Cursor cursor;
};

class Model {
 public:
  Model(uint64_t seed, uint64_t hash_mask)
      : random_(seed),
        cache_({.block_size = kBlockSize,
                .max_blocks = kCapacity,
                .key = {.k0 = seed, .k1 = ~seed},
                .hash_mask = hash_mask}) {
    for (BlockId block = 0; block < kCapacity; ++block) free_.push_back(block);
  }

  void Step() {
    const uint64_t dice = Random(100);
    if (sequences_.size() < 3 || (dice < 20 && sequences_.size() < 12)) {
      Start();
    } else if (dice < 50) {
      Extend(&Pick());
    } else if (dice < 60) {
      Fork();
    } else if (dice < 70) {
      Sequence& seq = Pick();
      Cut(&seq, Random(seq.blocks.size() + 1));
    } else if (dice < 88) {
      Free(Random(sequences_.size()));
    } else if (dice < 91) {
      EvictOne();
    } else if (dice < 94) {
      Move();
    } else if (dice < 97) {
      Pin();
    } else {
      Forget();
    }
    ExpectTotals();
  }

  void CheckAll() {
    VARLANE_ASSERT_OK(cache_.CheckInvariants());
    for (const auto& [prefix, block] : known_) {
      std::vector<BlockId> found;
      (void)cache_.Find(prefix.first, prefix.second, &found);
      ASSERT_EQ(found.size() * kBlockSize, prefix.second.size());
      ASSERT_EQ(found.back(), block.id);
    }
  }

  // Everything is given back and dropped: no block is lost.
  void Drain() {
    while (!sequences_.empty()) Free(sequences_.size() - 1);
    while (!pins_.empty()) Unpin(pins_.size() - 1);
    while (!known_.empty()) ASSERT_NO_FATAL_FAILURE(EvictOne());
    ASSERT_EQ(static_cast<int64_t>(free_.size()), kCapacity);
    ASSERT_EQ(cache_.stats().indexed_blocks, 0);
    VARLANE_ASSERT_OK(cache_.CheckInvariants());
  }

  const PrefixCacheStats& stats() const { return cache_.stats(); }
  int64_t forgotten() const { return forgotten_; }
  int64_t moved() const { return moved_; }

 private:
  uint64_t Random(uint64_t bound) { return random_() % bound; }
  Sequence& Pick() { return sequences_[Random(sequences_.size())]; }

  // A small alphabet, so that prefixes meet.
  Tokens RandomTokens(size_t count) {
    Tokens tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(Random(3));
    return tokens;
  }

  static Prefix PrefixOf(uint64_t tenant, const Tokens& tokens, size_t blocks) {
    return {tenant,
            Tokens(tokens.begin(),
                   tokens.begin() + static_cast<int>(blocks * kBlockSize))};
  }

  void Start() {
    Sequence seq;
    seq.tenant = Random(3);
    seq.cursor.tenant = seq.tenant;
    const Tokens wanted = RandomTokens(Random(14));
    const PrefixCache::Match match =
        cache_.Find(seq.tenant, wanted, &seq.blocks);
    seq.cursor = match.cursor;
    // The longest prefix in the map, and no other block.
    size_t expected = 0;
    while ((expected + 1) * kBlockSize <= wanted.size()) {
      const auto known =
          known_.find(PrefixOf(seq.tenant, wanted, expected + 1));
      if (known == known_.end()) break;
      ASSERT_LT(expected, seq.blocks.size());
      ASSERT_EQ(known->second.id, seq.blocks[expected]);
      ++expected;
    }
    ASSERT_EQ(expected, seq.blocks.size());
    ASSERT_NO_FATAL_FAILURE(CheckPartial(match, seq, wanted));
    seq.tokens = PrefixOf(seq.tenant, wanted, expected).second;
    for (size_t i = 0; i < seq.blocks.size(); ++i) Hold(seq, i);
    sequences_.push_back(std::move(seq));
  }

  // What is offered for copying continues the match, and nothing is offered
  // only where few siblings, or none, do.
  void CheckPartial(const PrefixCache::Match& match, const Sequence& seq,
                    const Tokens& wanted) {
    const size_t length = seq.blocks.size() * kBlockSize;
    int best = 0;
    int siblings = 0;
    for (const auto& [prefix, block] : known_) {
      const Tokens& known = prefix.second;
      if (prefix.first != seq.tenant || known.size() != length + kBlockSize ||
          !std::equal(known.begin(), known.end() - kBlockSize,
                      wanted.begin())) {
        continue;
      }
      ++siblings;
      int common = 0;
      while (common < kBlockSize && length + common < wanted.size() &&
             known[length + common] == wanted[length + common]) {
        ++common;
      }
      best = std::max(best, common);
      if (block.id == match.partial_block) {
        ASSERT_EQ(common, match.partial_tokens);
      }
    }
    ASSERT_LE(match.partial_tokens, best);
    if (siblings <= PrefixCache::kSiblings) {
      ASSERT_EQ(match.partial_tokens, best);
    }
    ASSERT_EQ(match.partial_block == kNoBlock, match.partial_tokens == 0);
  }

  void Extend(Sequence* seq) {
    if (seq->blocks.size() > 8) return;
    if (free_.empty()) {
      if (cache_.evictable_blocks() == 0) return;
      ASSERT_NO_FATAL_FAILURE(EvictOne());
    }
    const BlockId own = free_.back();
    const Tokens tokens = RandomTokens(kBlockSize);
    seq->tokens.insert(seq->tokens.end(), tokens.begin(), tokens.end());
    const auto known = known_.find({seq->tenant, seq->tokens});
    const BlockId taken = cache_.Insert(&seq->cursor, tokens, own);
    if (known != known_.end()) {
      ASSERT_EQ(taken, known->second.id);
    } else {
      ASSERT_EQ(taken, own);
      free_.pop_back();
      known_[{seq->tenant, seq->tokens}].id = own;
      // It was born referenced.
      ++known_[{seq->tenant, seq->tokens}].references;
      seq->blocks.push_back(own);
      return;
    }
    seq->blocks.push_back(taken);
    Hold(*seq, seq->blocks.size() - 1);
  }

  ModelBlock& Known(const Sequence& seq, size_t i) {
    return known_.at(PrefixOf(seq.tenant, seq.tokens, i + 1));
  }

  void Hold(const Sequence& seq, size_t i) {
    ModelBlock& block = Known(seq, i);
    if (block.references++ == 0) cache_.Acquire(block.id);
  }

  void Fork() {
    if (sequences_.size() >= 12) return;
    const Sequence fork = Pick();
    for (size_t i = 0; i < fork.blocks.size(); ++i) Hold(fork, i);
    sequences_.push_back(fork);
  }

  void Cut(Sequence* seq, size_t blocks) {
    while (seq->blocks.size() > blocks) {
      ModelBlock& block = Known(*seq, seq->blocks.size() - 1);
      ASSERT_EQ(block.id, seq->blocks.back());
      if (--block.references == 0) {
        ASSERT_TRUE(cache_.Release(block.id));
        block.unused_since = ++now_;
      }
      seq->blocks.pop_back();
      seq->tokens.resize(seq->blocks.size() * kBlockSize);
      seq->cursor = cache_.Parent(seq->cursor);
    }
  }

  void Free(size_t index) {
    Cut(&sequences_[index], 0);
    std::swap(sequences_[index], sequences_.back());
    sequences_.pop_back();
  }

  static bool IsEvictable(const ModelBlock& block) {
    return block.references == 0 && block.pins == 0;
  }

  void EvictOne() {
    auto due = known_.end();
    for (auto it = known_.begin(); it != known_.end(); ++it) {
      if (IsEvictable(it->second) &&
          (due == known_.end() ||
           it->second.unused_since < due->second.unused_since)) {
        due = it;
      }
    }
    const BlockId evicted = cache_.Evict();
    if (due == known_.end()) {
      ASSERT_EQ(evicted, kNoBlock);
      return;
    }
    ASSERT_EQ(evicted, due->second.id);
    ASSERT_TRUE(IsLeaf(due->first));
    free_.push_back(evicted);
    known_.erase(due);
  }

  bool IsLeaf(const Prefix& prefix) const {
    return std::none_of(known_.begin(), known_.end(), [&](const auto& entry) {
      const Tokens& tokens = entry.first.second;
      return entry.first.first == prefix.first &&
             tokens.size() > prefix.second.size() &&
             std::equal(prefix.second.begin(), prefix.second.end(),
                        tokens.begin());
    });
  }

  void Move() {
    if (free_.empty() || known_.empty()) return;
    auto moved = known_.begin();
    std::advance(moved, Random(known_.size()));
    const BlockId from = moved->second.id;
    std::swap(free_[Random(free_.size())], free_.back());
    const BlockId to = free_.back();
    cache_.Move(from, to);
    free_.back() = from;
    moved->second.id = to;
    for (Sequence& seq : sequences_) {
      std::replace(seq.blocks.begin(), seq.blocks.end(), from, to);
    }
    ++moved_;
  }

  void Pin() {
    if (pins_.size() >= 3) return Unpin(Random(pins_.size()));
    const Sequence& seq = Pick();
    cache_.Pin(seq.cursor);
    for (size_t i = 0; i < seq.blocks.size(); ++i) ++Known(seq, i).pins;
    pins_.push_back(seq);
  }

  void Unpin(size_t index) {
    const Sequence pinned = std::move(pins_[index]);
    std::swap(pins_[index], pins_.back());
    pins_.pop_back();
    cache_.Unpin(pinned.cursor);
    for (size_t i = pinned.blocks.size(); i > 0; --i) {
      ModelBlock& block = Known(pinned, i - 1);
      if (--block.pins == 0) block.unused_since = ++now_;
    }
  }

  // The last block of a sequence that alone holds it, as before writing to it.
  void Forget() {
    Sequence& seq = Pick();
    if (seq.blocks.empty()) return;
    const size_t last = seq.blocks.size() - 1;
    const ModelBlock& block = Known(seq, last);
    const Prefix prefix = PrefixOf(seq.tenant, seq.tokens, last + 1);
    const bool is_loose_leaf = IsLeaf(prefix) && block.pins == 0;
    ASSERT_EQ(cache_.IsLooseLeaf(block.id), is_loose_leaf);
    if (!is_loose_leaf || block.references > 1) return;
    seq.cursor = cache_.Parent(seq.cursor);
    cache_.Forget(block.id);
    ASSERT_FALSE(cache_.Release(block.id));
    free_.push_back(block.id);
    known_.erase(prefix);
    seq.blocks.pop_back();
    seq.tokens.resize(seq.blocks.size() * kBlockSize);
    ++forgotten_;
  }

  void ExpectTotals() {
    int64_t cached = 0;
    int64_t pinned = 0;
    int64_t evictable = 0;
    for (const auto& [prefix, block] : known_) {
      cached += block.references == 0 ? 1 : 0;
      pinned += block.pins > 0 ? 1 : 0;
      evictable += IsEvictable(block) ? 1 : 0;
    }
    const PrefixCacheStats& stats = cache_.stats();
    ASSERT_EQ(stats.indexed_blocks, static_cast<int64_t>(known_.size()));
    ASSERT_EQ(stats.cached_blocks, cached);
    ASSERT_EQ(stats.pinned_blocks, pinned);
    ASSERT_EQ(stats.evictable_blocks, evictable);
    ASSERT_EQ(static_cast<int64_t>(free_.size() + known_.size()), kCapacity);
  }

  std::mt19937_64 random_;
  PrefixCache cache_;
  std::map<Prefix, ModelBlock> known_;
  std::vector<BlockId> free_;
  std::vector<Sequence> sequences_;
  std::vector<Sequence> pins_;  // their blocks' ids may be stale
  int64_t now_ = 0;
  int64_t forgotten_ = 0;
  int64_t moved_ = 0;
};

class PrefixCacheModelTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(PrefixCacheModelTest, RandomOperationsEqualTheModel) {
  const uint64_t hash_mask = GetParam();
  Model model(hash_mask + 77, hash_mask);
  std::printf("%d operations\n", kOperations);
  for (int op = 0; op < kOperations; ++op) {
    model.Step();
    if (op % 64 == 0) model.CheckAll();
    if (HasFatalFailure()) FAIL() << "at operation " << op;
  }
  // The premises: every path was taken.
  EXPECT_GT(model.stats().evicted_blocks, kOperations / 400);
  EXPECT_GT(model.stats().hit_blocks, kOperations / 400);
  EXPECT_GT(model.stats().partial_hits, kOperations / 400);
  EXPECT_GT(model.stats().duplicate_blocks, kOperations / 400);
  EXPECT_GT(model.forgotten(), kOperations / 4000);
  EXPECT_GT(model.moved(), kOperations / 400);
  EXPECT_EQ(model.stats().collisions > 0, hash_mask != ~uint64_t{0});
  model.Drain();
}

// Of the hash 64, 3 and no bits are used.
INSTANTIATE_TEST_SUITE_P(HashMasks, PrefixCacheModelTest,
                         ::testing::Values(~uint64_t{0}, 7, 0));

}  // namespace
}  // namespace varlane
