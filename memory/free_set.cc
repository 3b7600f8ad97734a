// SPDX-License-Identifier: Apache-2.0

#include "memory/free_set.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

uint64_t Bit(int64_t member) { return uint64_t{1} << (member % 64); }

// The `most` lowest of `bits`.
uint64_t LowestBits(uint64_t bits, int64_t most) {
  if (std::popcount(bits) <= most) return bits;
  uint64_t out = 0;
  for (; most > 0; --most) {
    out |= bits & -bits;
    bits &= bits - 1;
  }
  return out;
}

}  // namespace

FreeSet::FreeSet(int64_t limit) {
  int64_t words = limit;
  do {
    words = DivCeil<int64_t>(words, 64);
    levels_.emplace_back(static_cast<size_t>(words));
  } while (words > 1);
}

bool FreeSet::Contains(int64_t member) const noexcept {
  return (levels_[0][static_cast<size_t>(member / 64)].load() & Bit(member)) !=
         0;
}

int64_t FreeSet::FindFrom(int64_t from) const noexcept {
  return FindAt(0, from);
}

// The first bit set at `level` from `from` on: in its own word, or in the next
// one that the level above names.
int64_t FreeSet::FindAt(size_t level, int64_t from) const noexcept {
  const Words& words = levels_[level];
  int64_t word = from / 64;
  if (word >= static_cast<int64_t>(words.size())) return -1;
  uint64_t bits =
      words[static_cast<size_t>(word)].load() & (~uint64_t{0} << (from % 64));
  while (bits == 0) {
    if (level + 1 == levels_.size()) return -1;
    word = FindAt(level + 1, word + 1);
    if (word < 0) return -1;
    bits = words[static_cast<size_t>(word)].load();
    if (bits == 0) NoteEmpty(level, word);  // the summary was behind
  }
  return word * 64 + std::countr_zero(bits);
}

void FreeSet::InsertAt(size_t level, int64_t member) const noexcept {
  for (; level < levels_.size(); ++level) {
    std::atomic<uint64_t>& word =
        levels_[level][static_cast<size_t>(member / 64)];
    if (word.fetch_or(Bit(member)) != 0) return;  // those above know
    member /= 64;
  }
}

// Clears the summaries of a word that was seen empty. Whoever fills the word
// meanwhile may have seen its summary still set, so it is looked at once more
// after the clearing, and the summary set again.
void FreeSet::NoteEmpty(size_t level, int64_t word) const noexcept {
  for (; level + 1 < levels_.size(); ++level) {
    std::atomic<uint64_t>& upper =
        levels_[level + 1][static_cast<size_t>(word / 64)];
    const uint64_t before = upper.fetch_and(~Bit(word));
    if (levels_[level][static_cast<size_t>(word)].load() != 0) {
      InsertAt(level + 1, word);
      return;
    }
    if (before != Bit(word)) return;  // others keep the upper word filled
    word /= 64;
  }
}

void FreeSet::InsertBits(int64_t word, uint64_t bits) noexcept {
  if (bits == 0) return;
  if (levels_[0][static_cast<size_t>(word)].fetch_or(bits) != 0) return;
  InsertAt(1, word);
}

void FreeSet::InsertRange(int64_t begin, int64_t end) noexcept {
  while (begin < end) {
    const int64_t stop = std::min(end, RoundDown<int64_t>(begin, 64) + 64);
    const int64_t count = stop - begin;
    const uint64_t bits =
        count == 64 ? ~uint64_t{0} : ((uint64_t{1} << count) - 1);
    InsertBits(begin / 64, bits << (begin % 64));
    begin = stop;
  }
}

uint64_t FreeSet::EraseBits(int64_t word, uint64_t bits) noexcept {
  const uint64_t before =
      levels_[0][static_cast<size_t>(word)].fetch_and(~bits);
  const uint64_t taken = before & bits;
  if (taken != 0 && taken == before) NoteEmpty(0, word);
  return taken;
}

FreeSet::Members FreeSet::TakeFrom(int64_t word, int64_t most) noexcept {
  const uint64_t wanted =
      LowestBits(levels_[0][static_cast<size_t>(word)].load(), most);
  if (wanted == 0) return {.word = word};
  const uint64_t taken = EraseBits(word, wanted);
  return {.word = word, .bits = taken, .contended = taken != wanted};
}

FreeSet::Members FreeSet::Take(int64_t from, int64_t most) noexcept {
  VARLANE_DCHECK(most > 0);
  bool contended = false;
  for (;;) {
    const int64_t member = FindFrom(from);
    if (member < 0) return {.contended = contended};
    Members members = TakeFrom(member / 64, most);
    contended |= members.contended || members.bits == 0;
    members.contended = contended;
    if (members.bits != 0) return members;
  }
}

FreeSet::Members FreeSet::TakeSlow(int64_t most) noexcept {
  const auto words = static_cast<int64_t>(levels_[0].size());
  for (int64_t word = 0; word < words; ++word) {
    if (levels_[0][static_cast<size_t>(word)].load() == 0) continue;
    Members members = TakeFrom(word, most);
    members.contended = true;
    if (members.bits != 0) return members;
  }
  return {.contended = true};
}

int64_t FreeSet::CountSlow() const noexcept {
  int64_t count = 0;
  for (const std::atomic<uint64_t>& word : levels_[0]) {
    count += std::popcount(word.load());
  }
  for (size_t level = 1; level < levels_.size(); ++level) {
    const Words& below = levels_[level - 1];
    for (size_t i = 0; i < below.size(); ++i) {
      const bool summary =
          (levels_[level][i / 64].load() & Bit(static_cast<int64_t>(i))) != 0;
      if (!summary && below[i].load() != 0) return -1;
    }
  }
  return count;
}

}  // namespace varlane
