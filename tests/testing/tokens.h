// Token ids of prompts, and what a model that has read them would hold.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_TOKENS_H_
#define VARLANE_TESTS_TESTING_TOKENS_H_

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace varlane::testing {

using Tokens = std::vector<int32_t>;

// first, first + 1, ..
inline Tokens From(int32_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// What K and V of a position hold: a function of all tokens up to it, as in a
// model. `before` is what the position before holds, at first the tenant.
inline uint32_t Mix(uint32_t before, int32_t token) {
  return (before ^ static_cast<uint32_t>(token)) * 2654435761u + 12345u;
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_TOKENS_H_
