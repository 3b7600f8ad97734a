// The bitwise equalities: what must not change one bit of any row.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

// A mixed batch that meets every path: decode, verify, chunk, prefill, two and
// more partitions, ragged tails.
CaseSpec Mixed(DType kv_dtype) {
  CaseSpec spec;
  spec.kv_dtype = kv_dtype;
  spec.q_heads = 6;
  spec.kv_heads = 2;
  spec.head_size = 64;
  spec.seqs = {{1, 77}, {5, 1030}, {100, 100}, {1, 2100}, {40, 1100}, {1, 1}};
  return spec;
}

class BitsTest : public ::testing::TestWithParam<DType> {};

TEST_P(BitsTest, ChunkedPrefillEqualsOneShot) {
  constexpr int kLength = 1400;
  CaseSpec spec = Mixed(GetParam());
  spec.q_heads = 4;
  spec.kv_heads = 1;
  spec.seqs = {{kLength, kLength}};
  const Engine engine = MakeEngine(2);
  const AttentionCase whole(spec);
  const Output one_shot = whole.Run(*engine.attention);
  for (const int chunk : {1400, 512, 333, 64, 17}) {
    for (int begin = 0; begin < kLength; begin += chunk) {
      const int end = std::min(kLength, begin + chunk);
      CaseSpec part = spec;
      part.seqs = {{end - begin, end}};
      const AttentionCase c(part);
      ExpectSameBits(
          c.Run(*engine.attention), RowsOf(whole, one_shot, 0, begin, end),
          "chunk " + std::to_string(chunk) + " at " + std::to_string(begin));
      if (HasFailure()) return;
      if (chunk == 17 && begin > 200) begin += 30 * 17;  // a sample suffices
    }
  }
}

TEST_P(BitsTest, ARequestAloneEqualsTheSameRequestInACrowd) {
  const CaseSpec spec = Mixed(GetParam());
  const Engine engine = MakeEngine(2);
  const AttentionCase crowd(spec);
  const Output together = crowd.Run(*engine.attention);
  for (int s = 0; s < int(spec.seqs.size()); ++s) {
    const AttentionCase c(AloneOf(spec, s));
    ExpectSameBits(c.Run(*engine.attention),
                   RowsOf(crowd, together, s, 0, spec.seqs[size_t(s)].q_len),
                   "sequence " + std::to_string(s));
    if (HasFailure()) return;
  }
}

TEST_P(BitsTest, ThreadsChangeNothing) {
  const AttentionCase c(Mixed(GetParam()));
  const Output one = c.Run(*MakeEngine(1).attention);
  for (const int threads : {2, 3, 4, 8}) {
    const Engine engine = MakeEngine(threads);
    ASSERT_EQ(engine.runtime->num_workers(), threads);
    ExpectSameBits(one, c.Run(*engine.attention),
                   std::to_string(threads) + " threads");
  }
}

// All four, walked and spread; the counters prove which one ran.
TEST_P(BitsTest, OwnerPatternsAreEqualAndCounted) {
  const AttentionCase c(Mixed(GetParam()));
  const Engine engine = MakeEngine(2);
  for (const PartitionMode mode : kPartitionModes) {
    const Output search =
        c.Run(*engine.attention, {OwnerPattern::kSearch, mode});
    const int64_t work =
        search.report.threadgroups - search.report.surplus_threadgroups;
    for (const OwnerPattern owner : kOwnerPatterns) {
      const Output now = c.Run(*engine.attention, {owner, mode});
      const std::string what =
          std::string(OwnerPatternName(owner)) + " " + PartitionModeName(mode);
      ExpectSameBits(search, now, what);
      const LaunchReport& r = now.report;
      const auto all_if = [&](OwnerPattern pattern) {
        return owner == pattern ? r.threadgroups : 0;
      };
      EXPECT_EQ(r.owner_searches, all_if(OwnerPattern::kSearch)) << what;
      EXPECT_EQ(r.owner_lookups, all_if(OwnerPattern::kMap)) << what;
      EXPECT_EQ(r.owner_planned, all_if(OwnerPattern::kPlanned)) << what;
      EXPECT_EQ(r.owner_padded, all_if(OwnerPattern::kPadded)) << what;
      EXPECT_EQ(r.threadgroups - r.surplus_threadgroups, work) << what;
      EXPECT_EQ(r.spread_partitions, search.report.spread_partitions) << what;
      EXPECT_EQ(r.merges, search.report.merges) << what;
      if (owner == OwnerPattern::kPlanned) {
        EXPECT_EQ(r.surplus_threadgroups, 0) << what;
      } else {
        EXPECT_GT(r.surplus_threadgroups, 0) << what;
      }
    }
  }
}

TEST_P(BitsTest, SpreadAndWalkedPartitionsAreEqual) {
  const AttentionCase c(Mixed(GetParam()));
  const Engine engine = MakeEngine(2);
  const Output walk =
      c.Run(*engine.attention, {OwnerPattern::kSearch, PartitionMode::kWalk});
  const Output spread =
      c.Run(*engine.attention, {OwnerPattern::kSearch, PartitionMode::kSpread});
  ExpectSameBits(walk, spread, "walk against spread");
  EXPECT_EQ(walk.report.spread_partitions, 0);
  EXPECT_GT(spread.report.spread_partitions, 0) << "the path was not taken";
  EXPECT_GT(spread.report.merges, 0);
}

// A launch of a few long threadgroups walks, but spreads its last ones.
TEST_P(BitsTest, ASpreadTailChangesNothing) {
  CaseSpec spec = Mixed(GetParam());
  spec.seqs.assign(8, {1, 3100});
  spec.seqs[1] = {3, 3080};
  spec.seqs[2] = {1, 1900};
  const AttentionCase c(spec);
  const Engine engine = MakeEngine(2);
  const Output walk =
      c.Run(*engine.attention, {OwnerPattern::kSearch, PartitionMode::kWalk});
  const Output all =
      c.Run(*engine.attention, {OwnerPattern::kSearch, PartitionMode::kSpread});
  for (const OwnerPattern owner : kOwnerPatterns) {
    const Output now = c.Run(*engine.attention, {.owner = owner});
    ExpectSameBits(walk, now, OwnerPatternName(owner));
    const int64_t spread = now.report.spread_partitions;
    EXPECT_LT(spread, all.report.spread_partitions);
    if (owner == OwnerPattern::kPadded) {
      EXPECT_EQ(spread, 0) << "others end that one";
    } else {
      EXPECT_GT(spread, 0) << OwnerPatternName(owner) << ": not taken";
    }
  }
}

TEST_P(BitsTest, ASpreadPlanRunsAgainAndAgain) {
  const AttentionCase c(Mixed(GetParam()));
  const Engine engine = MakeEngine(2);
  AttentionPlan plan;
  VARLANE_ASSERT_OK(engine.attention->Plan(
      c.batch(), c.shape(), c.view(),
      {OwnerPattern::kSearch, PartitionMode::kSpread}, &plan));
  Output first;
  for (int round = 0; round < 5; ++round) {
    Output now;
    now.out.resize(size_t(c.spec().total_q() * 6 * 64));
    now.lse.resize(size_t(c.spec().total_q() * 6));
    VARLANE_ASSERT_OK(engine.attention->Run(
        &plan, c.view(), 0,
        {c.q(), {now.out.data(), DType::kF32}, now.lse.data()}));
    if (round == 0) first = now;
    ExpectSameBits(first, now, "round " + std::to_string(round));
  }
}

TEST_P(BitsTest, BlockSizeAndBlockTableChangeNothing) {
  CaseSpec spec = Mixed(GetParam());
  const Engine engine = MakeEngine(2);
  const Output base = AttentionCase(spec).Run(*engine.attention);
  for (const int block_size : {16, 32, 64, 128, 256}) {
    for (const uint64_t seed : {2, 3}) {
      spec.block_size = block_size;
      spec.layout_seed = seed;
      ExpectSameBits(base, AttentionCase(spec).Run(*engine.attention),
                     "block size " + std::to_string(block_size));
      if (HasFailure()) return;
    }
  }
}

TEST_P(BitsTest, TargetsAgree) {
  // Scores wide enough to rescale often, and tiny inputs whose products are
  // denormal.
  for (const double magnitude : {1.0, 6.0, 1e-20, 3e-38}) {
    CaseSpec spec = Mixed(GetParam());
    const Fill k = [&](int s, int pos, int h, int d) {
      return magnitude * RandomValue(9, uint64_t(s), uint64_t(pos), uint64_t(h),
                                     uint64_t(d));
    };
    const Fill v = [&](int s, int pos, int h, int d) {
      return (magnitude < 1 ? magnitude : 1.0) *
             RandomValue(11, uint64_t(s), uint64_t(pos), uint64_t(h),
                         uint64_t(d));
    };
    const AttentionCase c(spec, {}, k, v);
    const KernelTable* best = SupportedKernels().front();
    Output expected;
    int compared = 0;
    for (const Engine& engine : EnginesOfAllTargets()) {
      const Output now = c.Run(*engine.attention);
      if (engine.attention->simd_target() == std::string(best->name)) {
        expected = now;
      } else {
        ++compared;
        ExpectSameBits(expected, now,
                       std::string(best->name) + " against " +
                           engine.attention->simd_target());
      }
      if (HasFailure()) return;
    }
    if (std::string(best->name).starts_with("AVX3")) {
      // AVX2 really ran, a target without FMA and, where there is bf16, the
      // other AVX-512 tables.
      EXPECT_GE(compared, FindKernels("AVX3_BF16") != nullptr ? 4 : 2);
    }
  }
}

// A number of f16, or every other time one halfway between two bf16 neighbours.
double BetweenBf16(int seq, int pos, int head, int dim) {
  const double x = Rounded(RandomValue(5, uint64_t(seq), uint64_t(pos),
                                       uint64_t(head), uint64_t(dim)),
                           DType::kF16);
  if (dim % 2 == 0 || x == 0) return x;
  const double ulp = std::ldexp(1, std::ilogb(x) - 7);
  return (std::floor(x / ulp) + 0.5) * ulp;
}

TEST(QueryBitsTest, ABf16CacheRoundsQueriesToNearestEven) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (const double scale : {0.125, -0.125}) {
      CaseSpec spec = Mixed(DType::kBF16);
      spec.q_dtype = dtype;
      spec.scale = scale;
      const AttentionCase rounded(spec, BetweenBf16);
      spec.round_q = false;
      const AttentionCase exact(spec, BetweenBf16);
      ASSERT_NE(rounded.Q(0, 0, 1), exact.Q(0, 0, 1));
      for (const Engine& engine : EnginesOfAllTargets()) {
        ExpectSameBits(rounded.Run(*engine.attention),
                       exact.Run(*engine.attention),
                       std::string(DTypeName(dtype)) + " q, " +
                           engine.attention->simd_target());
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(BitsTest, APoisonedFutureChangesNothing) {
  const CaseSpec spec = Mixed(GetParam());
  const Engine engine = MakeEngine(2);
  const AttentionCase clean(spec);
  const Output expected = clean.Run(*engine.attention);
  for (const double poison : {1e3, double(INFINITY), double(NAN)}) {
    // Of each multi-token sequence, everything from the middle query token on.
    AttentionCase c(spec);
    std::vector<int> first_poisoned(spec.seqs.size(), -1);
    for (int s = 0; s < int(spec.seqs.size()); ++s) {
      const SeqSpec& seq = spec.seqs[size_t(s)];
      if (seq.q_len < 2) continue;
      first_poisoned[size_t(s)] = seq.q_len / 2;
      for (int pos = seq.kv_len - seq.q_len + seq.q_len / 2; pos < seq.kv_len;
           ++pos) {
        for (int h = 0; h < spec.kv_heads; ++h) c.Poke(s, pos, h, poison);
      }
    }
    const Output poisoned = c.Run(*engine.attention);
    for (int s = 0; s < int(spec.seqs.size()); ++s) {
      const int end = first_poisoned[size_t(s)] < 0 ? spec.seqs[size_t(s)].q_len
                                                    : first_poisoned[size_t(s)];
      ExpectSameBits(RowsOf(clean, expected, s, 0, end),
                     RowsOf(c, poisoned, s, 0, end),
                     "poison " + std::to_string(poison));
      if (HasFailure()) return;
    }
  }
}

TEST_P(BitsTest, WhatLiesInPaddingChangesNothing) {
  const CaseSpec spec = Mixed(GetParam());
  for (const Engine& engine : EnginesOfAllTargets()) {
    const Output nan =
        AttentionCase(spec, {}, {}, {}, Poison::kNaN).Run(*engine.attention);
    for (const Poison poison : {Poison::kInf, Poison::kStale, Poison::kZero}) {
      ExpectSameBits(
          nan, AttentionCase(spec, {}, {}, {}, poison).Run(*engine.attention),
          engine.attention->simd_target());
      if (HasFailure()) return;
    }
    for (const float value : nan.out) ASSERT_TRUE(std::isfinite(value));
  }
}

INSTANTIATE_TEST_SUITE_P(KvTypes, BitsTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

}  // namespace
}  // namespace varlane::testing
