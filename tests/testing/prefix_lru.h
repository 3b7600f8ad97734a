// What prefix caches are compared with: the simplest LRU of prefixes there is,
// made-up conversations, and published hit rates.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_PREFIX_LRU_H_
#define VARLANE_TESTS_TESTING_PREFIX_LRU_H_

#include <array>
#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

namespace varlane::testing {

// One id a block; equal ids are equal prefixes up to and with that block.
using HashIds = std::vector<int64_t>;

// A list of ids. A request hits up to the first id that is not in it; all its
// ids then come to the front, its first one foremost.
class NaivePrefixLru {
 public:
  explicit NaivePrefixLru(int64_t capacity) : capacity_(capacity) {}

  // Returns how many of the request's blocks were found.
  int64_t Request(const HashIds& ids);

 private:
  int64_t capacity_;
  std::list<int64_t> order_;
  std::unordered_map<int64_t, std::list<int64_t>::iterator> place_;
};

// Conversations: each turn sends everything said so far and some more; now and
// then one forks off an earlier turn. A fifth of the prompts are one-off. No
// prompt has more than 90 blocks.
std::vector<HashIds> MakeConversations(int num_prompts, uint64_t seed);

// Block hit rates, in percent, of prefix-aware LRU on a public Mooncake trace.
struct PrefixOracle {
  const char* file;
  std::array<const char*, 7> percent;
};
// In blocks; the last is more than either trace has.
inline constexpr std::array<int64_t, 7> kOracleCapacities = {
    1000, 3000, 10'000, 30'000, 50'000, 100'000, 200'000};
inline constexpr std::array<PrefixOracle, 2> kPrefixOracles = {
    PrefixOracle{"mooncake_conversation_trace.jsonl",
                 {"4.45", "6.53", "21.16", "32.57", "35.46", "36.37", "36.64"}},
    PrefixOracle{
        "mooncake_synthetic_trace.jsonl",
        {"8.41", "19.06", "42.39", "62.42", "63.96", "63.96", "63.96"}}};

// The requests of a Mooncake trace; empty where the file is not one.
std::vector<HashIds> ReadHashIds(const std::string& path);

// "4.45".
std::string Percent(int64_t hits, int64_t blocks);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_PREFIX_LRU_H_
