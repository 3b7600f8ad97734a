// A naive model of a KvPool beside the real one: random operations on both,
// a fingerprint in every token's slot, blocks counted by shared_ptr.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_KV_POOL_MODEL_H_
#define VARLANE_TESTS_TESTING_KV_POOL_MODEL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "varlane/kv_pool.h"
#include "varlane/swap.h"

namespace varlane::testing {

// One layer and head; 4 KiB a block, 512 blocks a slab of 2 MiB. A pool under
// test may have more heads.
inline constexpr int kModelBlockSize = 16;
inline constexpr KvLayout kModelLayout = {.dtype = DType::kF32,
                                          .num_layers = 1,
                                          .num_kv_heads = 1,
                                          .head_size = 32,
                                          .v_head_size = 32,
                                          .block_size = kModelBlockSize};

// Writes the value to a token's slot, in K and in V, changed for each head.
void WriteFingerprint(const KvPool& pool, int64_t slot, uint32_t value);
// 0, which is no fingerprint, where K and V or heads differ.
uint32_t ReadFingerprint(const KvPool& pool, int64_t slot);

// Random operations of one thread on sequences of its own. Everything it finds
// wrong is a fatal failure of the test.
class KvPoolModel {
 public:
  // `max_blocks` of the pool: for Resize.
  KvPoolModel(KvPool* pool, uint64_t seed, int64_t max_blocks = 0)
      : pool_(pool), max_blocks_(max_blocks), random_(seed) {}

  // Creates, extends, forks, cuts or frees a sequence.
  void Step();
  // Shrinks, grows or compacts the pool; afterwards everything must be where
  // the model says. Only where no other thread uses the pool.
  void Resize();
  // Swaps a sequence out, or one that is out back in, where there is room.
  void Swap(SequenceSwapper* swapper);

  // Every token's slot holds what was written there, seen through the pool.
  void VerifyAll();
  void VerifyOne();  // a random sequence
  // The pool's totals are the model's, from now on exactly. Only where no other
  // thread uses the pool.
  void ExpectTotals();
  void FreeAll(SequenceSwapper* swapper = nullptr);

  // How often what happened.
  int64_t waits() const { return waits_; }
  int64_t never_fits() const { return never_fits_; }
  int64_t copies() const { return copies_; }
  int64_t shrinks() const { return shrinks_; }
  int64_t refused_shrinks() const { return refused_shrinks_; }
  int64_t moves() const { return moves_; }
  int64_t swaps() const { return swaps_; }  // there and back

 private:
  struct Block {
    std::array<uint32_t, kModelBlockSize> tokens{};
  };
  struct Sequence {
    SeqId id = -1;
    int64_t length = 0;
    std::vector<std::shared_ptr<Block>> blocks;
  };
  struct Swapped {
    SwapId id = kNoSwap;
    std::vector<uint32_t> tokens;
  };

  uint64_t Random(uint64_t bound) { return random_() % bound; }
  Sequence& Pick() { return sequences_[Random(sequences_.size())]; }
  void Append(Sequence* seq);
  void WriteTokens(Sequence* seq, int64_t tokens);
  void Fork(const Sequence& seq);
  void Truncate(Sequence* seq);
  void Free(uint64_t index);
  void Forget(uint64_t index);
  void DropBlock(Sequence* seq);
  void Shrink(int64_t num_blocks);
  void SwapOut(SequenceSwapper* swapper);
  void SwapIn(SequenceSwapper* swapper);
  void Verify(const Sequence& seq);

  KvPool* const pool_;
  const int64_t max_blocks_;
  std::mt19937_64 random_;
  std::vector<Sequence> sequences_;
  std::vector<Swapped> swapped_;
  bool is_alone_ = false;
  int64_t live_blocks_ = 0;
  int64_t copies_ = 0;
  int64_t waits_ = 0;
  int64_t never_fits_ = 0;
  int64_t shrinks_ = 0;
  int64_t refused_shrinks_ = 0;
  int64_t moves_ = 0;
  int64_t swaps_ = 0;
};

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_KV_POOL_MODEL_H_
