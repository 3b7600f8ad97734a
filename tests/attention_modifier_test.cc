// Score modifiers: softcap, ALiBi slopes and sinks, alone, combined and under
// masks, against the oracle and bit against bit.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/exact_means.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// A slope and a sink for each head, all different, of either sign.
std::vector<float> Slopes(int heads) {
  std::vector<float> slopes;
  for (int h = 0; h < heads; ++h) {
    slopes.push_back((h % 3 == 2 ? -0.02f : 0.3f) *
                     std::exp2(-0.7f * float(h)));
  }
  return slopes;
}
std::vector<float> Sinks(int heads) {
  std::vector<float> sinks;
  for (int h = 0; h < heads; ++h) sinks.push_back(2.5f * float(h) - 4.0f);
  return sinks;
}

// Every path a row can take: decode, verify, chunk, prefill, one and more
// partitions, each under another mask.
CaseSpec Mixed(DType kv_dtype) {
  CaseSpec spec;
  spec.kv_dtype = kv_dtype;
  spec.q_heads = 6;
  spec.kv_heads = 2;
  spec.head_size = 64;
  spec.seqs = {{1, 77}, {5, 1030}, {60, 60}, {1, 2100}, {40, 1050}, {3, 1}};
  spec.masks = {{true, 40, -1, 0}, {true, 1023, -1, 0}, {false, -1, -1, 0},
                {true, -1, -1, 0}, {false, 30, 9, 0},   {true, -1, -1, 20}};
  return spec;
}

void Modify(CaseSpec* spec) {
  spec->softcap = 5;
  spec->alibi_slopes = Slopes(spec->q_heads);
  spec->sinks = Sinks(spec->q_heads);
}

// Spread and walked alternate: that they are equal has its own test.
void CheckAllTargets(const AttentionCase& c) {
  auto mode = PartitionMode::kWalk;
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(engine.attention->simd_target());
    c.ExpectMatchesReference(
        c.Run(*engine.attention, {OwnerPattern::kSearch, mode}));
    if (::testing::Test::HasFailure()) return;
    mode = mode == PartitionMode::kWalk ? PartitionMode::kSpread
                                        : PartitionMode::kWalk;
  }
}

class ModifierTest : public ::testing::TestWithParam<DType> {
 protected:
  static CaseSpec Spec(std::vector<SeqSpec> seqs) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = 32;
    spec.seqs = std::move(seqs);
    return spec;
  }
};

TEST_P(ModifierTest, SoftcapsMatch) {
  for (const double cap : {0.5, 5.0, 50.0}) {
    for (const double scale : {0.0, 2.0, -1.0}) {
      CaseSpec spec = Spec({{9, 80}, {1, 200}});
      spec.softcap = cap;
      spec.scale = scale;
      CheckAllTargets(AttentionCase(spec));
      if (HasFailure()) return;
    }
  }
}

// A cap far above the scores is almost none: tanh must be good for its size. An
// absolute error of 1e-7 is 3e-4 of a score of 5 here.
TEST_P(ModifierTest, SoftcapsFarAboveTheScoresMatch) {
  for (const double cap : {1e4, 1e6}) {
    CaseSpec spec = Spec({{9, 80}, {1, 200}});
    spec.softcap = cap;
    CheckAllTargets(AttentionCase(spec));
    if (HasFailure()) return;
  }
}

TEST_P(ModifierTest, SoftcapsOfHugeScoresSaturate) {
  const Fill ones = [](int, int, int, int) { return 1.0; };
  const Fill k = [](int, int pos, int, int d) {
    return d != 0 ? 0.0 : pos % 3 == 0 ? 1e4 : pos % 3 == 1 ? -1e4 : 0.0;
  };
  CaseSpec spec = Spec({{1, 200}, {9, 90}});
  spec.scale = 1;
  spec.softcap = 2;
  CheckAllTargets(AttentionCase(spec, ones, k));
}

TEST_P(ModifierTest, SlopesMatch) {
  CaseSpec spec = Spec({{9, 80}, {1, 200}, {30, 10}, {2, 1030}, {70, 70}});
  spec.q_heads = 10;
  spec.alibi_slopes = Slopes(10);
  CheckAllTargets(AttentionCase(spec));
  spec.causal = false;
  CheckAllTargets(AttentionCase(spec));
}

// From one end of a context to the other scores grow by more than 2^127: maxima
// must move with them, also where what was added to a score lies above it.
TEST_P(ModifierTest, SlopesThatOutgrowFloatsMatch) {
  CaseSpec spec = Spec({{9, 700}, {1, 1000}, {300, 300}, {5, 1024}});
  spec.alibi_slopes = {1.0f, -1.0f, 0.5f, 8.0f};
  CheckAllTargets(AttentionCase(spec));
  spec.causal = false;
  CheckAllTargets(AttentionCase(spec));
}

// With K = 0 an ALiBi weight is e^(slope x (key - position)), nothing else.
TEST_P(ModifierTest, SlopesFavourKeysNearTheRowWherePositive) {
  const Fill zero = [](int, int, int, int) { return 0.0; };
  const Fill v = [](int, int pos, int, int) { return pos == 9 ? 1.0 : 0.0; };
  CaseSpec spec = Spec({{1, 10}});
  spec.q_heads = 2;
  spec.alibi_slopes = {1.0f, -1.0f};
  const AttentionCase c(spec, {}, zero, v);
  const Output output = c.Run(*EnginesOfAllTargets().front().attention);
  double sum = 0;
  for (int away = 0; away < 10; ++away) sum += std::exp(-away);
  EXPECT_NEAR(output.out[0], 1.0 / sum, 4e-3);
  EXPECT_NEAR(output.lse[0], std::log(sum), 1e-5);
  EXPECT_NEAR(output.lse[1], std::log(sum) + 9.0, 1e-5);
}

TEST_P(ModifierTest, SinksMatch) {
  for (const float sink : {-1000.0f, -3.0f, 0.0f, 4.0f, 90.0f}) {
    CaseSpec spec = Spec({{9, 80}, {1, 200}, {4, 2}, {1, 0}, {2, 2060}});
    spec.sinks = {sink, 1.0f, sink, -sink};
    CheckAllTargets(AttentionCase(spec));
    if (HasFailure()) return;
  }
}

// A sink of 0 is one more key of weight 1 and value 0: counted once, not once a
// partition, tile or arrival.
TEST_P(ModifierTest, SinksAreCountedExactlyOnce) {
  CaseSpec spec = Spec({{1, 77},
                        {3, 1025},
                        {2, 3100},
                        {70, 1060},
                        {1, 5000},
                        {4, 0},
                        {9, 4},
                        {1, 1500}});
  spec.masks.assign(spec.seqs.size(), SequenceMask{});
  spec.masks[3].window_left = 5;
  spec.masks[7].window_left = 1000;
  spec.sinks.assign(4, 0.0f);
  const AttentionCase c = MeansCase(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const PartitionMode mode : kPartitionModes) {
      SCOPED_TRACE(std::string(engine.attention->simd_target()) + " " +
                   PartitionModeName(mode));
      ExpectExactMeans(c,
                       c.Run(*engine.attention, {OwnerPattern::kSearch, mode}));
      if (HasFailure()) return;
    }
  }
}

TEST_P(ModifierTest, ASinkOfMinusInfinityChangesNothing) {
  CaseSpec spec = Mixed(GetParam());
  spec.seqs.push_back({2, 0});  // saw nothing, and still does
  spec.masks.push_back({});
  const Engine engine = MakeEngine(2);
  const Output without = AttentionCase(spec).Run(*engine.attention);
  spec.sinks.assign(size_t(spec.q_heads), kMinusInf);
  ExpectSameBits(without, AttentionCase(spec).Run(*engine.attention),
                 "sinks of -inf");
}

// K = 0 scores 0 through any cap and slope of 0: the modified path is as exact
// as the plain one.
TEST_P(ModifierTest, ModifiedScoresCountEveryKeyOnce) {
  CaseSpec spec = Mixed(GetParam());
  spec.softcap = 30;
  spec.alibi_slopes.assign(size_t(spec.q_heads), 0.0f);
  spec.sinks.assign(size_t(spec.q_heads), 0.0f);
  const AttentionCase c = MeansCase(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(engine.attention->simd_target());
    ExpectExactMeans(c, c.Run(*engine.attention));
    if (HasFailure()) return;
  }
}

TEST_P(ModifierTest, AllCombinationsMatchUnderMasks) {
  for (int bits = 1; bits < 8; ++bits) {
    CaseSpec spec = Mixed(GetParam());
    Modify(&spec);
    spec.head_size = bits % 2 != 0 ? 32 : 40;
    if ((bits & 1) == 0) spec.softcap = 0;
    if ((bits & 2) == 0) spec.alibi_slopes.clear();
    if ((bits & 4) == 0) spec.sinks.clear();
    SCOPED_TRACE("softcap, slopes, sinks = bits of " + std::to_string(bits));
    CheckAllTargets(AttentionCase(spec));
    if (HasFailure()) return;
  }
}

TEST_P(ModifierTest, AVisibleNaNIsNeverHidden) {
  CaseSpec spec = Spec({{1, 100}});
  Modify(&spec);
  for (const int place : {0, 5, 63, 64, 99}) {
    AttentionCase c(spec);
    c.Poke(0, place, 0, std::numeric_limits<double>::quiet_NaN());
    for (const Engine& engine : EnginesOfAllTargets()) {
      const Output output = c.Run(*engine.attention);
      EXPECT_TRUE(std::isnan(output.out[0]) && std::isnan(output.lse[0]))
          << engine.attention->simd_target() << " at " << place;
      EXPECT_TRUE(std::isfinite(output.out[2 * 32]));
    }
  }
}

// --- bit for bit -------------------------------------------------------------

TEST_P(ModifierTest, ChunkedEqualsOneShotUnderWindows) {
  constexpr int kLength = 1200;
  const Engine engine = MakeEngine(2);
  for (const SequenceMask& mask :
       {SequenceMask{true, 100, -1, 0}, SequenceMask{true, 1050, -1, 0},
        SequenceMask{true, -1, -1, 17}, SequenceMask{true, 64, -1, 130}}) {
    CaseSpec spec = Spec({{kLength, kLength}});
    Modify(&spec);
    spec.masks = {mask};
    const AttentionCase whole(spec);
    const Output one_shot = whole.Run(*engine.attention);
    for (const int chunk : {512, 333, 61}) {
      for (int begin = 0; begin < kLength; begin += chunk) {
        const int end = std::min(kLength, begin + chunk);
        // A prefix is whole in the first chunk, or rows would lack its keys.
        if (end < mask.prefix_len) continue;
        CaseSpec part = spec;
        part.seqs = {{end - begin, end}};
        const AttentionCase c(part);
        ExpectSameBits(
            RowsOf(whole, one_shot, 0, begin, end), c.Run(*engine.attention),
            "chunk " + std::to_string(chunk) + " at " + std::to_string(begin));
        if (HasFailure()) return;
        if (chunk == 61 && begin > 200) begin += 10 * 61;  // a sample suffices
      }
    }
  }
}

TEST_P(ModifierTest, ARequestAloneEqualsTheSameRequestInACrowd) {
  CaseSpec spec = Mixed(GetParam());
  Modify(&spec);
  const Engine engine = MakeEngine(2);
  const AttentionCase crowd(spec);
  const Output together = crowd.Run(*engine.attention);
  for (int s = 0; s < int(spec.seqs.size()); ++s) {
    const AttentionCase c(AloneOf(spec, s));
    ExpectSameBits(RowsOf(crowd, together, s, 0, spec.seqs[size_t(s)].q_len),
                   c.Run(*engine.attention), "sequence " + std::to_string(s));
    if (HasFailure()) return;
  }
}

TEST_P(ModifierTest, PartitionsThreadsAndBlocksChangeNothing) {
  CaseSpec spec = Mixed(GetParam());
  Modify(&spec);
  const Engine engine = MakeEngine(2);
  const Output walk = AttentionCase(spec).Run(
      *engine.attention, {OwnerPattern::kSearch, PartitionMode::kWalk});
  const Output spread = AttentionCase(spec).Run(
      *engine.attention, {OwnerPattern::kMap, PartitionMode::kSpread});
  ExpectSameBits(walk, spread, "walk against spread");
  EXPECT_GT(spread.report.merges, 0) << "the path was not taken";
  ExpectSameBits(walk, AttentionCase(spec).Run(*MakeEngine(3).attention),
                 "3 threads");
  for (const int block_size : {32, 256}) {
    spec.block_size = block_size;
    spec.layout_seed += 1;
    ExpectSameBits(walk, AttentionCase(spec).Run(*engine.attention),
                   "block size " + std::to_string(block_size));
  }
}

TEST_P(ModifierTest, TargetsAgree) {
  for (const double magnitude : {1.0, 6.0, 1e-20}) {
    CaseSpec spec = Mixed(GetParam());
    Modify(&spec);
    const Fill k = [&](int s, int pos, int h, int d) {
      return magnitude * RandomValue(9, uint64_t(s), uint64_t(pos), uint64_t(h),
                                     uint64_t(d));
    };
    const AttentionCase c(spec, {}, k);
    Output expected;
    for (const Engine& engine : EnginesOfAllTargets()) {
      const Output now = c.Run(*engine.attention);
      if (expected.out.empty()) expected = now;
      ExpectSameBits(expected, now, engine.attention->simd_target());
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(KvTypes, ModifierTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

}  // namespace
}  // namespace varlane::testing
