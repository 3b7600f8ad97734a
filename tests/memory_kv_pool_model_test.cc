// KvPool against a naive model: random forests of sequences with a fingerprint
// in every token's slot, alone and from several threads while the pool grows.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

// One in kResizeEvery changes the pool's size or moves blocks.
constexpr int kOperations = testing::kSanitized ? 20'000 : 450'000;
constexpr int kResizeEvery = 50;

constexpr int kBlockSize = 16;
constexpr int64_t kMaxBlocks = 160;  // of a pool that one thread uses
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 1,
                              .num_kv_heads = 1,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = kBlockSize};

std::unique_ptr<Runtime> MakeRuntime() {
  RuntimeOptions options;
  options.num_threads = 2;
  Result<std::unique_ptr<Runtime>> runtime = Runtime::Create(options);
  EXPECT_TRUE(testing::IsOk(runtime));
  return runtime.ok() ? *std::move(runtime) : nullptr;
}

// A block of the model: shared_ptr counts its references, as naively as can be.
struct ModelBlock {
  std::array<uint32_t, kBlockSize> tokens{};
};

struct ModelSequence {
  SeqId id = -1;
  int64_t length = 0;
  std::vector<std::shared_ptr<ModelBlock>> blocks;
};

// Random operations of one thread on sequences of its own.
class Model {
 public:
  Model(KvPool* pool, uint64_t seed) : pool_(pool), random_(seed) {}

  void Step() {
    const uint64_t dice = Random(100);
    if (sequences_.empty() || (dice < 6 && sequences_.size() < 16)) {
      sequences_.emplace_back().id = pool_->CreateSequence();
    } else if (dice < 65) {
      Append(&Pick());
    } else if (dice < 75) {
      if (sequences_.size() < 16) Fork(Pick());
    } else if (dice < 90) {
      Truncate(&Pick());
    } else {
      Free(Random(sequences_.size()));
    }
  }

  // Shrinks, grows, limits or compacts the pool; afterwards everything must be
  // where the model says. Only where no other thread uses the pool.
  void Resize() {
    const int64_t capacity = pool_->capacity_blocks();
    const auto amount =
        static_cast<int64_t>(Random(static_cast<uint64_t>(capacity) + 1));
    const int64_t max_blocks =
        pool_->stats().reserved_bytes / kLayout.block_bytes();
    switch (Random(4)) {
      case 0: {
        const bool fits = capacity - amount >= live_blocks_;
        const Result<KvResize> shrunk = pool_->Shrink(amount);
        ASSERT_EQ(shrunk.ok(), fits) << shrunk.status().ToString();
        ++(fits ? shrinks_ : refused_shrinks_);
        if (fits) moves_ += shrunk->moved_blocks;
        break;
      }
      case 1:
        VARLANE_ASSERT_OK(
            pool_->Grow(std::min(amount / 2 + 1, kMaxBlocks - capacity)));
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
    ASSERT_LE(pool_->capacity_blocks(), max_blocks);
    ASSERT_NO_FATAL_FAILURE(VerifyAll());
    VARLANE_ASSERT_OK(pool_->CheckInvariants());
  }

  // Every token's slot holds what was written there, seen through the pool.
  void Verify(const ModelSequence& seq) {
    const Result<int64_t> length = pool_->Length(seq.id);
    VARLANE_ASSERT_OK(length);
    ASSERT_EQ(*length, seq.length);
    std::vector<int64_t> slots(static_cast<size_t>(seq.length));
    VARLANE_ASSERT_OK(pool_->CopySlotMapping(seq.id, 0, slots));
    for (size_t i = 0; i < slots.size(); ++i) {
      ASSERT_EQ(ReadToken(slots[i]),
                seq.blocks[i / kBlockSize]->tokens[i % kBlockSize])
          << "token " << i << " of sequence " << seq.id;
    }
  }

  void VerifyAll() {
    for (const ModelSequence& seq : sequences_) {
      ASSERT_NO_FATAL_FAILURE(Verify(seq));
    }
  }

  void VerifyOne() {
    if (!sequences_.empty()) Verify(Pick());
  }

  void FreeAll() {
    while (!sequences_.empty()) Free(sequences_.size() - 1);
  }

  // Only where no other thread uses the pool.
  void ExpectTotals() {
    int64_t references = 0;
    for (const ModelSequence& seq : sequences_) {
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

  int64_t waits() const { return waits_; }
  int64_t never_fits() const { return never_fits_; }
  int64_t copies() const { return copies_; }
  int64_t shrinks() const { return shrinks_; }
  int64_t refused_shrinks() const { return refused_shrinks_; }
  int64_t moves() const { return moves_; }

 private:
  uint64_t Random(uint64_t bound) { return random_() % bound; }
  ModelSequence& Pick() { return sequences_[Random(sequences_.size())]; }

  // The fingerprint stands in K and in V.
  void WriteToken(int64_t slot, uint32_t value) {
    const KvView view = pool_->view();
    const int64_t block = slot / kBlockSize;
    const int offset = static_cast<int>(slot % kBlockSize);
    std::memcpy(view.k(block, 0, 0) + 4 * kLayout.k_offset(offset, 0), &value,
                4);
    std::memcpy(view.v(block, 0, 0) + 4 * kLayout.v_offset(offset, 31), &value,
                4);
  }

  // 0, which is no fingerprint, where K and V differ.
  uint32_t ReadToken(int64_t slot) const {
    const KvView view = pool_->view();
    const int64_t block = slot / kBlockSize;
    const int offset = static_cast<int>(slot % kBlockSize);
    uint32_t k = 0;
    uint32_t v = 0;
    std::memcpy(&k, view.k(block, 0, 0) + 4 * kLayout.k_offset(offset, 0), 4);
    std::memcpy(&v, view.v(block, 0, 0) + 4 * kLayout.v_offset(offset, 31), 4);
    return k == v ? k : 0;
  }

  void Append(ModelSequence* seq) {
    const auto tokens =
        static_cast<int64_t>(Random(8) == 0 ? Random(400) : Random(20));
    int64_t needed = 0;
    const bool copies = tokens > 0 && seq->length % kBlockSize != 0 &&
                        seq->blocks.back().use_count() > 1;
    int64_t blocks = static_cast<int64_t>(seq->blocks.size());
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
      ASSERT_EQ(free, capacity - live_blocks_);
    }
    if (!admission->admitted()) {
      ++(expected == Admission::Kind::kWait ? waits_ : never_fits_);
      return;
    }
    if (copies) {
      seq->blocks.back() = std::make_shared<ModelBlock>(*seq->blocks.back());
      ++copies_;
    }
    live_blocks_ += needed;
    WriteTokens(seq, tokens);
  }

  void WriteTokens(ModelSequence* seq, int64_t tokens) {
    std::vector<int64_t> slots(static_cast<size_t>(tokens));
    VARLANE_ASSERT_OK(pool_->CopySlotMapping(seq->id, seq->length, slots));
    for (const int64_t slot : slots) {
      const auto offset = static_cast<size_t>(seq->length % kBlockSize);
      if (offset == 0) seq->blocks.push_back(std::make_shared<ModelBlock>());
      const auto value = static_cast<uint32_t>(random_() | 1);
      seq->blocks.back()->tokens[offset] = value;
      WriteToken(slot, value);
      ++seq->length;
    }
  }

  void Fork(const ModelSequence& seq) {
    const Result<SeqId> id = pool_->Fork(seq.id);
    VARLANE_ASSERT_OK(id);
    ModelSequence fork = seq;
    fork.id = *id;
    sequences_.push_back(std::move(fork));
  }

  void DropBlock(ModelSequence* seq) {
    live_blocks_ -= seq->blocks.back().use_count() == 1 ? 1 : 0;
    seq->blocks.pop_back();
  }

  void Truncate(ModelSequence* seq) {
    const auto length =
        static_cast<int64_t>(Random(static_cast<uint64_t>(seq->length) + 1));
    VARLANE_ASSERT_OK(pool_->Truncate(seq->id, length));
    seq->length = length;
    while (static_cast<int64_t>(seq->blocks.size() - 1) * kBlockSize >=
               length &&
           !seq->blocks.empty()) {
      DropBlock(seq);
    }
  }

  void Free(uint64_t index) {
    ModelSequence& seq = sequences_[index];
    VARLANE_ASSERT_OK(pool_->Free(seq.id));
    while (!seq.blocks.empty()) DropBlock(&seq);
    std::swap(seq, sequences_.back());
    sequences_.pop_back();
  }

  KvPool* pool_;
  std::mt19937_64 random_;
  std::vector<ModelSequence> sequences_;
  bool is_alone_ = false;
  int64_t live_blocks_ = 0;
  int64_t copies_ = 0;
  int64_t waits_ = 0;
  int64_t never_fits_ = 0;
  int64_t shrinks_ = 0;
  int64_t refused_shrinks_ = 0;
  int64_t moves_ = 0;
};

void RunModel(Runtime* runtime, int operations) {
  for (const uint64_t seed : {1001u, 1002u, 1003u}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::printf("seed %llu: %d operations\n",
                static_cast<unsigned long long>(seed), operations);
    auto pool = KvPool::Create({.layout = kLayout,
                                .num_blocks = 40,
                                .max_blocks = kMaxBlocks,
                                .check_limits = false,
                                .shuffle = seed % 2 == 0,
                                .seed = seed},
                               runtime);
    VARLANE_ASSERT_OK(pool);
    Model model(pool->get(), seed);
    for (int op = 0; op < operations; ++op) {
      if (op % kResizeEvery == kResizeEvery - 1) {
        model.Resize();
      } else {
        model.Step();
      }
      model.ExpectTotals();
      model.VerifyOne();
      if (op % 1000 == 0) {
        model.VerifyAll();
        VARLANE_ASSERT_OK((*pool)->CheckInvariants());
      }
      if (::testing::Test::HasFatalFailure()) FAIL() << "at operation " << op;
    }
    // The premises: every path was taken.
    EXPECT_GT(model.waits(), 10);
    EXPECT_GT(model.never_fits(), 0);
    EXPECT_GT(model.copies(), 100);
    EXPECT_GT(model.shrinks(), 10);
    EXPECT_GT(model.refused_shrinks(), 10);
    EXPECT_GT(model.moves(), 100);
    model.FreeAll();
    EXPECT_EQ((*pool)->free_blocks(), (*pool)->capacity_blocks());
    VARLANE_EXPECT_OK((*pool)->CheckInvariants());
  }
}

TEST(KvPoolModelTest, RandomSequencesKeepEveryTokenAndEveryCount) {
  const auto runtime = MakeRuntime();
  RunModel(runtime.get(), kOperations / 3);
}

TEST(KvPoolModelTest, DISABLED_AMillionOperationsKeepEveryTokenAndEveryCount) {
  const auto runtime = MakeRuntime();
  RunModel(runtime.get(), 400'000);
}

TEST(KvPoolModelTest, ThreadsWithSequencesOfTheirOwnDoNotDisturbEachOther) {
  const auto runtime = MakeRuntime();
  constexpr int kThreads = 4;
  constexpr int64_t kManyBlocks = 4000;
  auto pool = KvPool::Create({.layout = kLayout,
                              .num_blocks = 200,
                              .max_blocks = kManyBlocks,
                              .check_limits = false},
                             runtime.get());
  VARLANE_ASSERT_OK(pool);
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Model model(pool->get(), 77 + static_cast<uint64_t>(t));
      for (int op = 0; op < kOperations / 8 && !::testing::Test::HasFailure();
           ++op) {
        (*pool)->BeginStep();
        model.Step();
        model.VerifyOne();
        (*pool)->EndStep();
        // Now and then all threads are between steps, so that blocks can move.
        if (op % 64 == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
      (*pool)->BeginStep();
      model.VerifyAll();
      (*pool)->EndStep();
      if (t % 2 == 0) model.FreeAll();
      running.fetch_sub(1);
    });
  }
  // Meanwhile the pool grows and is looked at.
  int64_t looks = 0;
  int64_t shrinks = 0;
  int64_t moves = 0;
  while (running.load() > 0) {
    const KvPoolStats stats = (*pool)->stats();
    EXPECT_EQ(stats.free_blocks + stats.cached_blocks + stats.referenced_blocks,
              stats.capacity_blocks);
    EXPECT_EQ((*pool)->NodeOfBlock(
                  static_cast<BlockId>((*pool)->capacity_blocks() - 1)),
              0);
    if (++looks % 64 == 0) {
      VARLANE_EXPECT_OK((*pool)->CheckInvariants());
    }
    if (looks % 8 == 0 && stats.capacity_blocks + 100 <= kManyBlocks) {
      VARLANE_EXPECT_OK((*pool)->Grow(100));
    }
    // The threads' operations are their steps: no block is moved in one.
    if (looks % 8 == 4) {
      const Result<KvResize> shrunk =
          (*pool)->Shrink(std::max<int64_t>(0, stats.free_blocks / 2));
      shrinks += shrunk.ok() ? 1 : 0;
    }
    if (looks % 16 == 12) {
      const Result<KvResize> moved = (*pool)->Compact(64);
      moves += moved.ok() ? moved->moved_blocks : 0;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%lld looks, %lld shrinks, %lld blocks moved\n",
              static_cast<long long>(looks), static_cast<long long>(shrinks),
              static_cast<long long>(moves));
  EXPECT_GT(shrinks, 0);
  VARLANE_EXPECT_OK((*pool)->CheckInvariants());
}

}  // namespace
}  // namespace varlane
