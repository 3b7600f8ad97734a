// FreeSet: a set of small integers that finds its smallest member at once.
//
// A bitmap with a tree of summaries over it: a bit of one level says whether a
// word of the level below has any bit set. Finding, inserting and erasing walk
// the levels: two for 4096 members, three for 262144, six for all of int32.
// Not synchronised. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_FREE_SET_H_
#define VARLANE_MEMORY_FREE_SET_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "base/math.h"

namespace varlane {

class FreeSet {
 public:
  // An empty set that can hold [0, limit). Allocates all it ever needs.
  explicit FreeSet(int64_t limit) {
    int64_t words = limit;
    do {
      words = DivCeil<int64_t>(words, 64);
      levels_.emplace_back(static_cast<size_t>(words), uint64_t{0});
    } while (words > 1);
  }

  // The smallest member, or -1.
  int64_t Min() const noexcept {
    const std::vector<uint64_t>& top = levels_.back();
    if (top.empty() || top[0] == 0) return -1;
    int64_t index = 0;
    for (size_t level = levels_.size(); level-- > 0;) {
      const uint64_t word = levels_[level][static_cast<size_t>(index)];
      VARLANE_DCHECK(word != 0);
      index = index * 64 + std::countr_zero(word);
    }
    return index;
  }

  bool Contains(int64_t member) const noexcept {
    return (levels_[0][Word(member)] & Bit(member)) != 0;
  }

  void Insert(int64_t member) noexcept {
    for (std::vector<uint64_t>& level : levels_) {
      uint64_t& word = level[Word(member)];
      const bool was_empty = word == 0;
      word |= Bit(member);
      if (!was_empty) return;  // the levels above know already
      member /= 64;
    }
  }

  void Erase(int64_t member) noexcept {
    for (std::vector<uint64_t>& level : levels_) {
      uint64_t& word = level[Word(member)];
      word &= ~Bit(member);
      if (word != 0) return;
      member /= 64;
    }
  }

  // Counts the members the slow way. -1 when a summary contradicts the bits
  // below it.
  int64_t CountSlow() const noexcept {
    int64_t count = 0;
    for (const uint64_t word : levels_[0]) count += std::popcount(word);
    for (size_t level = 1; level < levels_.size(); ++level) {
      const std::vector<uint64_t>& below = levels_[level - 1];
      for (size_t i = 0; i < below.size(); ++i) {
        const auto member = static_cast<int64_t>(i);
        const bool summary = (levels_[level][Word(member)] & Bit(member)) != 0;
        if (summary != (below[i] != 0)) return -1;
      }
    }
    return count;
  }

 private:
  static size_t Word(int64_t member) noexcept {
    return static_cast<size_t>(member) / 64;
  }
  static uint64_t Bit(int64_t member) noexcept {
    return uint64_t{1} << (static_cast<size_t>(member) % 64);
  }

  std::vector<std::vector<uint64_t>> levels_;  // members first, root last
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_FREE_SET_H_
