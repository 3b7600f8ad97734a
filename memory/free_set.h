// FreeSet: a set of small integers that many threads take members from, the
// smallest first.
//
// A bitmap with a tree of summaries over it: a bit of one level says whether a
// word of the level below has any bit set. Finding, inserting and taking walk
// the levels: two for 4096 members, three for 262144, six for all of int32.
//
// Lock-free. A summary bit may be set over an empty word (a finder clears it
// and goes on), and clear over a filled one only while the thread that cleared
// it has not looked again; so a search beside other threads may miss a member,
// and whoever knows that there is one asks TakeSlow. A thread alone always
// sees the exact set. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_FREE_SET_H_
#define VARLANE_MEMORY_FREE_SET_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace varlane {

// Threads: every member is safe from any thread. Orders are the strongest
//          (seq_cst): clearing a summary and looking at its word again must
//          not pass each other.
class FreeSet {
 public:
  // Members of one word, [64 * word, 64 * word + 64), as bits.
  struct Members {
    int64_t word = 0;
    uint64_t bits = 0;
    bool contended = false;  // another thread took some of them meanwhile
  };

  // An empty set that can hold [0, limit). Allocates all it ever needs.
  explicit FreeSet(int64_t limit);

  // The smallest member, or -1.
  int64_t Min() const noexcept { return FindFrom(0); }
  // The smallest member that is not below `from`, or -1.
  int64_t FindFrom(int64_t from) const noexcept;

  bool Contains(int64_t member) const noexcept;

  void Insert(int64_t member) noexcept {
    InsertBits(member / 64, uint64_t{1} << (member % 64));
  }
  void InsertBits(int64_t word, uint64_t bits) noexcept;
  // Inserts [begin, end).
  void InsertRange(int64_t begin, int64_t end) noexcept;

  // True where this call took it out.
  bool Erase(int64_t member) noexcept {
    return EraseBits(member / 64, uint64_t{1} << (member % 64)) != 0;
  }
  // Takes out those of `bits` that are members, and says which.
  uint64_t EraseBits(int64_t word, uint64_t bits) noexcept;

  // Takes up to `most` of the smallest members of one word: of the first that
  // has any, from the one that holds `from` on. No bits: none was found.
  Members Take(int64_t from, int64_t most) noexcept;
  // The same, looking at every word. O(limit / 64).
  Members TakeSlow(int64_t most) noexcept;

  // Counts the members the slow way. -1 when a summary hides one. Requires
  // that no other thread uses the set.
  int64_t CountSlow() const noexcept;

 private:
  using Words = std::vector<std::atomic<uint64_t>>;

  int64_t FindAt(size_t level, int64_t from) const noexcept;
  void InsertAt(size_t level, int64_t member) const noexcept;
  void NoteEmpty(size_t level, int64_t word) const noexcept;
  Members TakeFrom(int64_t word, int64_t most) noexcept;

  // Members first, root last. Mutable: a search repairs summaries, which
  // changes no member.
  mutable std::vector<Words> levels_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_FREE_SET_H_
