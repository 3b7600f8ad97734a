// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/kv_pool_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

constexpr int64_t kBlockSize = kModelBlockSize;
constexpr uint64_t kMostSequences = 16;

std::byte* KPlace(const KvView& view, int64_t slot, int head) {
  const int offset = static_cast<int>(slot % kBlockSize);
  return view.k(slot / kBlockSize, 0, head) +
         4 * kModelLayout.k_offset(offset, 0);
}
std::byte* VPlace(const KvView& view, int64_t slot, int head) {
  const int offset = static_cast<int>(slot % kBlockSize);
  return view.v(slot / kBlockSize, 0, head) +
         4 * kModelLayout.v_offset(offset, 31);
}
// What tells heads apart; nothing of head 0.
uint32_t OfHead(uint32_t value, int head) {
  return value ^ static_cast<uint32_t>(head) * 0x9e3779b2u;
}

}  // namespace

void WriteFingerprint(const KvPool& pool, int64_t slot, uint32_t value) {
  const KvView view = pool.view();
  for (int head = 0; head < view.layout.num_kv_heads; ++head) {
    const uint32_t written = OfHead(value, head);
    std::memcpy(KPlace(view, slot, head), &written, 4);
    std::memcpy(VPlace(view, slot, head), &written, 4);
  }
}

uint32_t ReadFingerprint(const KvPool& pool, int64_t slot) {
  const KvView view = pool.view();
  uint32_t first = 0;
  for (int head = 0; head < view.layout.num_kv_heads; ++head) {
    uint32_t k = 0;
    uint32_t v = 0;
    std::memcpy(&k, KPlace(view, slot, head), 4);
    std::memcpy(&v, VPlace(view, slot, head), 4);
    if (head == 0) first = k;
    if (k != v || k != OfHead(first, head)) return 0;
  }
  return first;
}

void KvPoolModel::Step() {
  const uint64_t dice = Random(100);
  if (sequences_.empty() || (dice < 6 && sequences_.size() < kMostSequences)) {
    sequences_.emplace_back().id = pool_->CreateSequence();
  } else if (dice < 65) {
    Append(&Pick());
  } else if (dice < 75) {
    if (sequences_.size() < kMostSequences) Fork(Pick());
  } else if (dice < 90) {
    Truncate(&Pick());
  } else {
    Free(Random(sequences_.size()));
  }
}

// --- size --------------------------------------------------------------------

void KvPoolModel::Resize() {
  const int64_t capacity = pool_->capacity_blocks();
  const auto amount =
      static_cast<int64_t>(Random(static_cast<uint64_t>(capacity) + 1));
  switch (Random(4)) {
    case 0:
      ASSERT_NO_FATAL_FAILURE(Shrink(amount));
      break;
    case 1:
      VARLANE_ASSERT_OK(
          pool_->Grow(std::min(amount / 2 + 1, max_blocks_ - capacity)));
      break;
    case 2: {
      const Result<KvResize> moved =
          pool_->Compact(static_cast<int64_t>(Random(20)));
      VARLANE_ASSERT_OK(moved);
      moves_ += moved->moved_blocks;
      break;
    }
    default: {
      pool_->BeginStep();
      const Result<KvResize> shrunk = pool_->Shrink(amount);
      pool_->EndStep();
      if (shrunk.ok()) {
        ASSERT_EQ(shrunk->moved_blocks, 0);
      }
      break;
    }
  }
  ASSERT_LE(pool_->capacity_blocks(), max_blocks_);
  ASSERT_NO_FATAL_FAILURE(VerifyAll());
  VARLANE_ASSERT_OK(pool_->CheckInvariants());
}

void KvPoolModel::Shrink(int64_t num_blocks) {
  const bool fits = pool_->capacity_blocks() - num_blocks >= live_blocks_;
  const Result<KvResize> shrunk = pool_->Shrink(num_blocks);
  ASSERT_EQ(shrunk.ok(), fits) << shrunk.status().ToString();
  ++(fits ? shrinks_ : refused_shrinks_);
  if (fits) moves_ += shrunk->moved_blocks;
}

// --- swap --------------------------------------------------------------------

void KvPoolModel::Swap(SequenceSwapper* swapper) {
  if (swapped_.empty() || (swapped_.size() < 4 && Random(2) == 0)) {
    SwapOut(swapper);
  } else {
    SwapIn(swapper);
  }
}

void KvPoolModel::SwapOut(SequenceSwapper* swapper) {
  if (sequences_.empty()) return;
  const uint64_t index = Random(sequences_.size());
  const Sequence& seq = sequences_[index];
  if (seq.length == 0) return;
  const Result<SwapId> swap = swapper->SwapOut(seq.id);
  if (swap.status().code() == StatusCode::kResourceExhausted) return;
  VARLANE_ASSERT_OK(swap);
  ASSERT_EQ(swapper->Wait(*swap), SwapState::kStored);
  Swapped& stored = swapped_.emplace_back();
  stored.id = *swap;
  for (int64_t i = 0; i < seq.length; ++i) {
    stored.tokens.push_back(seq.blocks[static_cast<size_t>(i / kBlockSize)]
                                ->tokens[static_cast<size_t>(i % kBlockSize)]);
  }
  Forget(index);
}

// Into blocks of its own, whatever it shared before.
void KvPoolModel::SwapIn(SequenceSwapper* swapper) {
  const size_t index = Random(swapped_.size());
  const auto length = static_cast<int64_t>(swapped_[index].tokens.size());
  ASSERT_EQ(swapper->length(swapped_[index].id), length);
  Sequence seq;
  seq.id = pool_->CreateSequence();
  seq.length = length;
  const Result<Admission> admission = pool_->Append(seq.id, length);
  VARLANE_ASSERT_OK(admission);
  if (!admission->admitted() || sequences_.size() >= kMostSequences) {
    VARLANE_ASSERT_OK(pool_->Free(seq.id));
    return;
  }
  VARLANE_ASSERT_OK(swapper->SwapIn(swapped_[index].id, seq.id));
  ASSERT_EQ(swapper->Wait(swapped_[index].id), SwapState::kLoaded);
  swapper->Drop(swapped_[index].id);
  for (int64_t i = 0; i < length; ++i) {
    const auto offset = static_cast<size_t>(i % kBlockSize);
    if (offset == 0) seq.blocks.push_back(std::make_shared<Block>());
    seq.blocks.back()->tokens[offset] =
        swapped_[index].tokens[static_cast<size_t>(i)];
  }
  live_blocks_ += static_cast<int64_t>(seq.blocks.size());
  sequences_.push_back(std::move(seq));
  std::swap(swapped_[index], swapped_.back());
  swapped_.pop_back();
  ++swaps_;
  ASSERT_NO_FATAL_FAILURE(Verify(sequences_.back()));
}

// --- what sequences do -------------------------------------------------------

void KvPoolModel::Append(Sequence* seq) {
  const uint64_t size = Random(64);  // a few tokens, a prompt, too much
  const auto tokens =
      static_cast<int64_t>(Random(size == 0 ? 4000 : (size < 8 ? 400 : 20)));
  int64_t needed = 0;
  const bool copies = tokens > 0 && seq->length % kBlockSize != 0 &&
                      seq->blocks.back().use_count() > 1;
  auto blocks = static_cast<int64_t>(seq->blocks.size());
  for (int64_t i = seq->length; i < seq->length + tokens; ++i) {
    if (i % kBlockSize == 0) {
      ++needed;
      ++blocks;
    }
  }
  needed += copies ? 1 : 0;
  const Result<Admission> admission = pool_->Append(seq->id, tokens);
  VARLANE_ASSERT_OK(admission);
  ASSERT_EQ(admission->needed_blocks, needed);
  const int64_t free = admission->free_blocks;
  const int64_t capacity = admission->capacity_blocks;
  const Admission::Kind expected =
      blocks > capacity ? Admission::Kind::kNeverFits
                        : (needed > free ? Admission::Kind::kWait
                                         : Admission::Kind::kAdmitted);
  ASSERT_EQ(admission->kind, expected);
  if (is_alone_) {
    // Other threads (the swap file's) may have some at hand.
    ASSERT_LE(free, capacity - live_blocks_);
    ASSERT_TRUE(admission->admitted() || free == capacity - live_blocks_);
  }
  if (!admission->admitted()) {
    ++(expected == Admission::Kind::kWait ? waits_ : never_fits_);
    return;
  }
  if (copies) {
    seq->blocks.back() = std::make_shared<Block>(*seq->blocks.back());
    ++copies_;
  }
  live_blocks_ += needed;
  WriteTokens(seq, tokens);
}

void KvPoolModel::WriteTokens(Sequence* seq, int64_t tokens) {
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  VARLANE_ASSERT_OK(pool_->CopySlotMapping(seq->id, seq->length, slots));
  for (const int64_t slot : slots) {
    const auto offset = static_cast<size_t>(seq->length % kBlockSize);
    if (offset == 0) seq->blocks.push_back(std::make_shared<Block>());
    const auto value = static_cast<uint32_t>(random_() | 1);
    seq->blocks.back()->tokens[offset] = value;
    WriteFingerprint(*pool_, slot, value);
    ++seq->length;
  }
}

void KvPoolModel::Fork(const Sequence& seq) {
  const Result<SeqId> id = pool_->Fork(seq.id);
  VARLANE_ASSERT_OK(id);
  Sequence fork = seq;
  fork.id = *id;
  sequences_.push_back(std::move(fork));
}

void KvPoolModel::DropBlock(Sequence* seq) {
  live_blocks_ -= seq->blocks.back().use_count() == 1 ? 1 : 0;
  seq->blocks.pop_back();
}

void KvPoolModel::Truncate(Sequence* seq) {
  const auto length =
      static_cast<int64_t>(Random(static_cast<uint64_t>(seq->length) + 1));
  VARLANE_ASSERT_OK(pool_->Truncate(seq->id, length));
  seq->length = length;
  while (!seq->blocks.empty() &&
         static_cast<int64_t>(seq->blocks.size() - 1) * kBlockSize >= length) {
    DropBlock(seq);
  }
}

void KvPoolModel::Free(uint64_t index) {
  VARLANE_ASSERT_OK(pool_->Free(sequences_[index].id));
  Forget(index);
}

// The pool has the sequence no more.
void KvPoolModel::Forget(uint64_t index) {
  Sequence& seq = sequences_[index];
  while (!seq.blocks.empty()) DropBlock(&seq);
  std::swap(seq, sequences_.back());
  sequences_.pop_back();
}

void KvPoolModel::FreeAll(SequenceSwapper* swapper) {
  while (!sequences_.empty()) Free(sequences_.size() - 1);
  for (const Swapped& swapped : swapped_) swapper->Drop(swapped.id);
  swapped_.clear();
}

// --- comparing ---------------------------------------------------------------

void KvPoolModel::Verify(const Sequence& seq) {
  const Result<int64_t> length = pool_->Length(seq.id);
  VARLANE_ASSERT_OK(length);
  ASSERT_EQ(*length, seq.length);
  std::vector<int64_t> slots(static_cast<size_t>(seq.length));
  VARLANE_ASSERT_OK(pool_->CopySlotMapping(seq.id, 0, slots));
  for (size_t i = 0; i < slots.size(); ++i) {
    ASSERT_EQ(ReadFingerprint(*pool_, slots[i]),
              seq.blocks[i / kBlockSize]->tokens[i % kBlockSize])
        << "token " << i << " of sequence " << seq.id;
  }
}

void KvPoolModel::VerifyAll() {
  for (const Sequence& seq : sequences_) {
    ASSERT_NO_FATAL_FAILURE(Verify(seq));
  }
}

void KvPoolModel::VerifyOne() {
  if (!sequences_.empty()) Verify(Pick());
}

void KvPoolModel::ExpectTotals() {
  int64_t references = 0;
  for (const Sequence& seq : sequences_) {
    references += static_cast<int64_t>(seq.blocks.size());
  }
  const KvPoolStats stats = pool_->stats();
  ASSERT_EQ(stats.free_blocks + stats.cached_blocks + stats.referenced_blocks,
            stats.capacity_blocks);
  ASSERT_EQ(stats.referenced_blocks, live_blocks_);
  ASSERT_EQ(stats.references, references);
  ASSERT_EQ(stats.sequences, static_cast<int64_t>(sequences_.size()));
  ASSERT_EQ(stats.cow_copies, copies_);
  is_alone_ = true;
}

}  // namespace varlane::testing
