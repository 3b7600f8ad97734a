// Every kernel against the fp64 oracle, over a seeded covering design.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

std::string Describe(const CaseSpec& spec, const Engine& engine) {
  std::ostringstream out;
  out << engine.attention->simd_target() << " kv=" << DTypeName(spec.kv_dtype)
      << " q=" << DTypeName(spec.q_dtype)
      << " out=" << DTypeName(spec.out_dtype) << " heads=" << spec.q_heads
      << "/" << spec.kv_heads << " D=" << spec.head_size
      << " Dv=" << spec.v_size() << " block=" << spec.block_size
      << " causal=" << spec.causal << " seqs:";
  for (const SeqSpec& s : spec.seqs) out << " " << s.q_len << "@" << s.kv_len;
  return out.str();
}

void Check(const CaseSpec& spec, const PlanOptions& options = {}) {
  const AttentionCase c(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(Describe(spec, engine));
    c.ExpectMatchesReference(c.Run(*engine.attention, options));
    if (::testing::Test::HasFailure()) return;
  }
}

// Two KV heads with each of so many query heads.
void CheckGroups(std::initializer_list<int> groups, DType kv_dtype,
                 int head_size, const std::vector<SeqSpec>& seqs) {
  for (const int group : groups) {
    CaseSpec spec;
    spec.kv_dtype = kv_dtype;
    spec.head_size = head_size;
    spec.kv_heads = 2;
    spec.q_heads = 2 * group;
    spec.seqs = seqs;
    Check(spec);
    if (::testing::Test::HasFailure()) return;
  }
}

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class ReferenceTest : public ::testing::TestWithParam<DType> {};

TEST_P(ReferenceTest, DecodeMatches) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.seqs = {{1, 1},  {1, 15}, {1, 16}, {1, 17},
               {1, 63}, {1, 64}, {1, 65}, {1, 200}};
  Check(spec);
}

TEST_P(ReferenceTest, PrefillMatches) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.seqs = {{70, 70}, {3, 3}, {129, 129}};
  Check(spec);
}

TEST_P(ReferenceTest, ChunkBehindContextMatches) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.seqs = {{33, 300}, {5, 77}, {1, 130}};
  Check(spec);
}

TEST_P(ReferenceTest, PartitionBoundariesMatch) {
  for (const PartitionMode mode :
       {PartitionMode::kSpread, PartitionMode::kWalk}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = 32;
    spec.q_heads = 2;
    spec.kv_heads = 1;
    spec.seqs = {{1, 1023}, {1, 1024}, {1, 1025}, {3, 1026}, {2, 2049}};
    Check(spec, {OwnerPattern::kSearch, mode});
  }
}

TEST_P(ReferenceTest, BidirectionalMatches) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.causal = false;
  spec.seqs = {{40, 40}, {3, 90}, {1, 17}};
  Check(spec);
}

TEST_P(ReferenceTest, ScaleOfEitherSignMatches) {
  for (const double scale : {1.0, -0.3, 1e-6}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = 32;
    spec.scale = scale;
    spec.seqs = {{9, 80}, {1, 20}};
    Check(spec);
  }
}

TEST_P(ReferenceTest, EveryHeadSizeMatches) {
  for (const int head_size :
       {32, 40, 64, 72, 80, 96, 104, 112, 120, 128, 136, 192, 256}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = head_size;
    spec.seqs = {{5, 70}, {1, 33}};
    Check(spec);
    if (HasFailure()) return;
  }
}

TEST_P(ReferenceTest, KAndVSizesMayDiffer) {
  const std::pair<int, int> sizes[] = {{192, 128}, {64, 256}, {256, 40}};
  for (const auto& [d, dv] : sizes) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = d;
    spec.v_head_size = dv;
    spec.seqs = {{6, 90}, {1, 40}};
    Check(spec);
  }
}

TEST_P(ReferenceTest, EveryGroupMatches) {
  CheckGroups({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 40}, GetParam(),
              32, {{1, 75}, {11, 75}});
}

// Several runs of keys at a common head size: what decode streams from memory.
TEST_P(ReferenceTest, EveryGroupMatchesOverALongContext) {
  CheckGroups({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 20, 40}, GetParam(),
              128, {{1, 700}, {1, 1411}});
}

TEST_P(ReferenceTest, EveryBlockSizeMatches) {
  for (const int block_size : {16, 32, 64, 128, 256}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.block_size = block_size;
    spec.seqs = {{1, block_size - 1},
                 {1, block_size},
                 {2, block_size + 1},
                 {1, 2 * block_size}};
    Check(spec);
  }
}

// Pairs of everything else, drawn from a fixed seed.
TEST_P(ReferenceTest, SampledCombinationsMatch) {
  std::mt19937 rng(20261121);
  const auto pick = [&](auto... choices) {
    const int values[] = {choices...};
    return values[rng() % std::size(values)];
  };
  for (int round = 0; round < 24; ++round) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.q_dtype = kDTypes[rng() % 3];
    spec.out_dtype = kDTypes[rng() % 3];
    spec.head_size = pick(32, 64, 80, 96, 112, 120, 128, 192);
    spec.kv_heads = pick(1, 2, 3);
    spec.q_heads = spec.kv_heads * pick(1, 2, 3, 4, 5, 7, 8);
    spec.block_size = pick(16, 32, 64, 128, 256);
    spec.causal = rng() % 4 != 0;
    spec.seed = rng();
    spec.layout_seed = rng();
    const int n = 1 + int(rng() % 4);
    for (int i = 0; i < n; ++i) {
      const int kv = int(rng() % 260);
      spec.seqs.push_back({rng() % 2 != 0 ? 1 : int(rng() % 40), kv});
    }
    Check(spec, {rng() % 2 != 0 ? OwnerPattern::kMap : OwnerPattern::kSearch,
                 PartitionMode::kAuto});
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(KvTypes, ReferenceTest, ::testing::ValuesIn(kDTypes),
                         DTypeParam);

// The ragged sets that found bugs elsewhere, at small head counts.
TEST(RaggedSetTest, FamousRaggedSetsMatch) {
  const std::vector<std::vector<SeqSpec>> sets = {
      {{235, 2}, {1, 1353}},
      {{245, 245}, {5, 5}, {3, 16}, {134, 513}},
      {{17, 819}, {1, 1024}, {17, 1024}, {1, 1024}},
      {{3, 1500}, {1, 600}, {3, 1500}, {1, 600}},
  };
  for (const auto& seqs : sets) {
    CaseSpec spec;
    spec.head_size = 32;
    spec.q_heads = 4;
    spec.kv_heads = 1;
    spec.seqs = seqs;
    Check(spec);
  }
}

}  // namespace
}  // namespace varlane::testing
