// Exact membership: K = 0 gives every visible key weight 1, and small integers
// in V make the sum exact in any order, so out == fl(sum / n) bit for bit. A
// dropped, doubled or foreign key shows.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <string>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/exact_means.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

void Check(CaseSpec spec, Poison poison) {
  const AttentionCase c = MeansCase(spec, poison);
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const PartitionMode mode : kPartitionModes) {
      for (const OwnerPattern owner :
           {OwnerPattern::kSearch, OwnerPattern::kMap}) {
        SCOPED_TRACE(std::string(engine.attention->simd_target()) + " " +
                     PartitionModeName(mode) + " " + OwnerPatternName(owner) +
                     " " + DTypeName(spec.kv_dtype));
        ExpectExactMeans(c, c.Run(*engine.attention, {owner, mode}));
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

class ExactTest : public ::testing::TestWithParam<DType> {};

TEST_P(ExactTest, EveryContextLengthAroundBlocksAndTilesIsWhole) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.q_heads = 3;
  spec.kv_heads = 1;
  spec.head_size = 32;
  for (int kv = 0; kv <= 130; ++kv) spec.seqs.push_back({1, kv});
  Check(spec, Poison::kNaN);
}

TEST_P(ExactTest, EveryRowOfAPrefillIsWhole) {
  for (const int group : {1, 3, 4, 5, 8}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.kv_heads = 1;
    spec.q_heads = group;
    spec.head_size = 32;
    spec.block_size = 32;
    spec.seqs = {{150, 150}, {67, 130}, {1, 64}, {0, 20}, {30, 10}};
    Check(spec, Poison::kNaN);
    if (HasFailure()) return;
  }
}

// Few rows: every size of a register tile, and rows of it that end at different
// keys.
TEST_P(ExactTest, EveryRowOfAFewTokensIsWhole) {
  for (const int group : {1, 2, 5}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.kv_heads = 2;
    spec.q_heads = 2 * group;
    spec.head_size = 32;
    for (int tokens = 1; tokens <= 14; ++tokens) {
      for (const int context : {tokens, 64, 129, 300}) {
        spec.seqs.push_back({tokens, context});
      }
    }
    Check(spec, Poison::kNaN);
    if (HasFailure()) return;
  }
}

TEST_P(ExactTest, ContextsAroundPartitionsAreWhole) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.q_heads = 4;
  spec.kv_heads = 1;
  spec.head_size = 32;
  spec.block_size = 64;
  spec.seqs = {{1, 1023}, {2, 1024}, {3, 1025}, {70, 1090}, {1, 3000}};
  Check(spec, Poison::kInf);
}

TEST_P(ExactTest, BidirectionalRowsAreWhole) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.causal = false;
  spec.head_size = 32;
  spec.seqs = {{50, 77}, {1, 33}, {7, 7}};
  Check(spec, Poison::kStale);
}

INSTANTIATE_TEST_SUITE_P(KvTypes, ExactTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

}  // namespace
}  // namespace varlane::testing
