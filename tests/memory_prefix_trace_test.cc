// Hit rates of the prefix cache, driven as the pool drives it, against the
// simplest LRU of prefixes there is and against published figures.
//
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <list>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/prefix_cache.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

// One id a block; equal ids are equal prefixes up to and with that block.
using Prompt = std::vector<int64_t>;

struct Tally {
  int64_t blocks = 0;
  int64_t hits = 0;

  std::string Percent() const {
    std::array<char, 32> text{};
    (void)std::snprintf(text.data(), text.size(), "%.2f",
                        100.0 * double(hits) / double(blocks));
    return text.data();
  }
};

// The reference: a list of ids. A request hits up to the first id that is not
// in it; all its ids then come to the front, its first one foremost.
class NaiveLru {
 public:
  explicit NaiveLru(int64_t capacity) : capacity_(capacity) {}

  void Request(const Prompt& prompt, Tally* tally) {
    tally->blocks += static_cast<int64_t>(prompt.size());
    for (const int64_t id : prompt) {
      if (!place_.contains(id)) break;
      ++tally->hits;
    }
    for (auto id = prompt.rbegin(); id != prompt.rend(); ++id) {
      const auto known = place_.find(*id);
      if (known != place_.end()) order_.erase(known->second);
      order_.push_front(*id);
      place_[*id] = order_.begin();
    }
    while (static_cast<int64_t>(order_.size()) > capacity_) {
      place_.erase(order_.back());
      order_.pop_back();
    }
  }

 private:
  int64_t capacity_;
  std::list<int64_t> order_;
  std::unordered_map<int64_t, std::list<int64_t>::iterator> place_;
};

constexpr int kBlockSize = 3;

// A pool of `capacity` blocks without bytes: takes what is free, then evicts.
class CachedPool {
 public:
  explicit CachedPool(int64_t capacity)
      : capacity_(capacity),
        cache_({.block_size = kBlockSize,
                .max_blocks = capacity,
                .key = {.k0 = 3, .k1 = 4}}) {}

  void Request(const Prompt& prompt, Tally* tally) {
    tokens_.clear();
    for (const int64_t id : prompt) {
      // Nothing but the id tells two blocks apart.
      tokens_.insert(tokens_.end(), {static_cast<int32_t>(id), 5, 6});
    }
    blocks_.clear();
    PrefixCache::Cursor cursor = cache_.Find(0, tokens_, &blocks_).cursor;
    const size_t hits = blocks_.size();
    for (const BlockId block : blocks_) cache_.Acquire(block);
    for (size_t i = hits; i < prompt.size(); ++i) {
      const BlockId block =
          used_ < capacity_ ? static_cast<BlockId>(used_++) : cache_.Evict();
      ASSERT_NE(block, kNoBlock);
      const auto tokens = std::span<const int32_t>(tokens_).subspan(
          i * kBlockSize, size_t{kBlockSize});
      ASSERT_EQ(cache_.Insert(&cursor, tokens, block), block);
      blocks_.push_back(block);
    }
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
      ASSERT_TRUE(cache_.Release(*block));
    }
    tally->blocks += static_cast<int64_t>(prompt.size());
    tally->hits += static_cast<int64_t>(hits);
  }

  const PrefixCache& cache() const { return cache_; }

 private:
  int64_t capacity_;
  int64_t used_ = 0;
  PrefixCache cache_;
  std::vector<int32_t> tokens_;
  std::vector<BlockId> blocks_;
};

// Request by request, not only in the end.
void ExpectEqualHits(const std::vector<Prompt>& prompts, int64_t capacity,
                     Tally* tally) {
  Tally naive;
  NaiveLru lru(capacity);
  CachedPool pool(capacity);
  for (size_t i = 0; i < prompts.size(); ++i) {
    lru.Request(prompts[i], &naive);
    ASSERT_NO_FATAL_FAILURE(pool.Request(prompts[i], tally));
    ASSERT_EQ(tally->hits, naive.hits) << "request " << i;
  }
  VARLANE_EXPECT_OK(pool.cache().CheckInvariants());
  const PrefixCacheStats& stats = pool.cache().stats();
  EXPECT_EQ(stats.lookup_blocks, tally->blocks);
  EXPECT_EQ(stats.hit_blocks, tally->hits);
  EXPECT_EQ(stats.inserted_blocks - stats.evicted_blocks, stats.cached_blocks);
}

// Conversations: each turn sends everything said so far and some more; now and
// then one forks off an earlier turn. A fifth of the prompts are one-off.
std::vector<Prompt> Conversations(int num_prompts, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Prompt> prompts;
  int64_t next_id = 0;
  for (int i = 0; i < num_prompts; ++i) {
    Prompt prompt;
    if (!prompts.empty() && random() % 5 != 0) {
      const size_t back = 1 + random() % 60;
      prompt = prompts[prompts.size() - std::min(back, prompts.size())];
      if (random() % 4 == 0) prompt.resize(1 + random() % prompt.size());
    }
    const size_t more = 1 + random() % 12;
    if (prompt.size() + more > 90) prompt.resize(90 - more);
    for (size_t n = 0; n < more; ++n) prompt.push_back(next_id++);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

TEST(PrefixTraceTest, EqualsTheSimplestLruOnConversations) {
  const std::vector<Prompt> prompts = Conversations(6000, 31);
  int64_t last = -1;
  for (const int64_t capacity : {90, 150, 300, 700}) {
    SCOPED_TRACE(capacity);
    Tally tally;
    ExpectEqualHits(prompts, capacity, &tally);
    // The premise: capacity matters.
    EXPECT_GT(tally.hits, last);
    last = tally.hits;
  }
}

std::vector<Prompt> ReadHashIds(const std::string& path) {
  std::vector<Prompt> prompts;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    Prompt& prompt = prompts.emplace_back();
    const char* at = std::strstr(line.c_str(), "\"hash_ids\": [");
    if (at == nullptr) continue;
    at += std::strlen("\"hash_ids\": [");
    while (*at != ']' && *at != '\0') {
      char* end = nullptr;
      prompt.push_back(std::strtoll(at, &end, 10));
      if (end == at) return {};
      at = *end == ',' ? end + 1 : end;
    }
  }
  return prompts;
}

struct Oracle {
  const char* file;
  std::array<const char*, 7> percent;
};
// Block hit rates of prefix-aware LRU at these capacities, in blocks.
constexpr std::array<int64_t, 7> kCapacities = {
    1000, 3000, 10'000, 30'000, 50'000, 100'000, 200'000};  // the last: all
constexpr std::array<Oracle, 2> kOracles = {
    Oracle{"mooncake_conversation_trace.jsonl",
           {"4.45", "6.53", "21.16", "32.57", "35.46", "36.37", "36.64"}},
    Oracle{"mooncake_synthetic_trace.jsonl",
           {"8.41", "19.06", "42.39", "62.42", "63.96", "63.96", "63.96"}}};

class PrefixOracleTest : public ::testing::TestWithParam<Oracle> {};

TEST_P(PrefixOracleTest, HitRateOfAPublicTrace) {
  const std::string path =
      std::string(VARLANE_SOURCE_DIR) + "/../shared/traces/" + GetParam().file;
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there (docs/prefix_cache.md)";
  }
  const std::vector<Prompt> prompts = ReadHashIds(path);
  ASSERT_GT(prompts.size(), 3000u);
  for (size_t i = 0; i < kCapacities.size(); ++i) {
    SCOPED_TRACE(kCapacities[i]);
    Tally tally;
    ExpectEqualHits(prompts, kCapacities[i], &tally);
    EXPECT_EQ(tally.Percent(), GetParam().percent[i]);
    std::printf("%7lld blocks: %s%%\n", static_cast<long long>(kCapacities[i]),
                tally.Percent().c_str());
  }
}

INSTANTIATE_TEST_SUITE_P(Mooncake, PrefixOracleTest,
                         ::testing::ValuesIn(kOracles), [](const auto& oracle) {
                           return std::string(oracle.index == 0 ? "conversation"
                                                                : "synthetic");
                         });

}  // namespace
}  // namespace varlane
