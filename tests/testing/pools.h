// Pools, and small ones with known contents.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_POOLS_H_
#define VARLANE_TESTS_TESTING_POOLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "varlane/kv_pool.h"

namespace varlane::testing {

// Null, and the test fails, where there can be none.
std::unique_ptr<KvPool> MakePool(const KvPoolOptions& options,
                                 Runtime* runtime);

// 2 layers, 2 heads of 16 and 24, blocks of 16 tokens.
KvLayout SmallLayout(DType dtype = DType::kBF16);

// A pool on one worker, blocks in shuffled order, every byte of it 0xff (NaN in
// all types). Fails the test when it cannot be made.
std::unique_ptr<KvPool> SmallPool(const KvLayout& layout, int64_t num_blocks);

// A sequence of `length` tokens whose slots, padding aside, are a function of
// (seed, position, layer, head, dimension). -1 when the pool is too full.
SeqId MakeSequence(KvPool* pool, int64_t length, uint64_t seed);
// Writes positions [begin, end) of it.
void FillSequence(KvPool* pool, SeqId seq, int64_t begin, int64_t end,
                  uint64_t seed);
// Whether positions [0, length) hold those values still, and no more.
void ExpectSequence(const KvPool& pool, SeqId seq, int64_t length,
                    uint64_t seed);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_POOLS_H_
