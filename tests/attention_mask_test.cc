// Masks: exactly the keys in [low, high) of each row count, whatever the kind
// of mask, and nothing outside it is ever read.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/exact_means.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

constexpr SequenceMask Causal(int left = -1) { return {true, left, -1, 0}; }
constexpr SequenceMask Both(int left, int right) {
  return {false, left, right, 0};
}
constexpr SequenceMask Prefix(int prefix, SequenceMask mask = {}) {
  mask.prefix_len = prefix;
  return mask;
}

// `check(case, output)` of every target and partition mode; the owner patterns
// take turns.
template <typename Check>
void OnEveryPath(const AttentionCase& c, const Check& check) {
  size_t turn = 0;
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const PartitionMode mode : kPartitionModes) {
      // Five turns are out of step with the two modes.
      const OwnerPattern owner = kOwnerPatterns[turn++ % 5 % 4];
      SCOPED_TRACE(std::string(engine.attention->simd_target()) + " " +
                   PartitionModeName(mode) + " " + OwnerPatternName(owner));
      check(c, c.Run(*engine.attention, {owner, mode}));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// All of a row is NaN, or as expected, bit for bit.
bool IsRow(const CaseSpec& spec, int64_t row, bool nan, const Output& output,
           const Output& expected) {
  const int64_t first = row * spec.v_size();
  for (int64_t at = first; at < first + spec.v_size(); ++at) {
    const float out = output.out[size_t(at)];
    if (nan ? !std::isnan(out) : out != expected.out[size_t(at)]) return false;
  }
  return true;
}

// Key `place` of the first KV head is NaN.
void ExpectNaNInRowsThatSee(int place, const AttentionCase& c,
                            const Output& output, const Output& expected) {
  const CaseSpec& spec = c.spec();
  for (int seq = 0; seq < int(spec.seqs.size()); ++seq) {
    for (int token = 0; token < spec.seqs[size_t(seq)].q_len; ++token) {
      const bool seen =
          c.Begin(seq, token) <= place && place < c.Limit(seq, token);
      const int64_t row = (c.FirstToken(seq) + token) * spec.q_heads;
      for (int head = 0; head < spec.q_heads; ++head) {
        const bool nan = seen && head < spec.group();
        ASSERT_TRUE(IsRow(spec, row + head, nan, output, expected))
            << "sequence " << seq << " token " << token << " head " << head;
      }
    }
  }
}

class MaskTest : public ::testing::TestWithParam<DType> {
 protected:
  static CaseSpec Spec(int q_heads = 3, int kv_heads = 1) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = 32;
    spec.q_heads = q_heads;
    spec.kv_heads = kv_heads;
    return spec;
  }
  static void Add(CaseSpec* spec, const SeqSpec& seq,
                  const SequenceMask& mask) {
    spec->seqs.push_back(seq);
    spec->masks.push_back(mask);
  }
};

TEST_P(MaskTest, WindowsAroundGroupsAndTilesAreWhole) {
  CaseSpec spec = Spec();
  for (const int left : {0,  1,  2,  14, 15, 16,  17,  31,  32,  47,  48,
                         62, 63, 64, 65, 66, 127, 128, 138, 139, 140, 5000}) {
    Add(&spec, {40, 140}, Causal(left));
    Add(&spec, {1, 131}, Causal(left));
    for (const int right : {0, 1, 17, 63, 64, -1}) {
      Add(&spec, {20, 140}, Both(left, right));
    }
  }
  OnEveryPath(MeansCase(spec), ExpectExactMeans);
}

TEST_P(MaskTest, RightWindowsAloneAreWhole) {
  CaseSpec spec = Spec();
  for (const int right : {0, 1, 15, 16, 17, 63, 64, 65, 99, 100, 5000, -1}) {
    Add(&spec, {90, 100}, Both(-1, right));
    Add(&spec, {3, 130}, Both(-1, right));
  }
  OnEveryPath(MeansCase(spec), ExpectExactMeans);
}

TEST_P(MaskTest, PrefixesAreWholeWithAndWithoutWindows) {
  CaseSpec spec = Spec();
  for (const int prefix : {0, 1, 15, 16, 17, 63, 64, 65, 99, 100, 101, 9999}) {
    Add(&spec, {100, 100}, Prefix(prefix));
    Add(&spec, {30, 100}, Prefix(prefix));
    Add(&spec, {1, 100}, Prefix(prefix));
    Add(&spec, {100, 100}, Prefix(prefix, Causal(7)));
    Add(&spec, {100, 100}, Prefix(prefix, Both(20, 33)));
  }
  OnEveryPath(MeansCase(spec), ExpectExactMeans);
}

// Every left edge around a partition's, and partitions that only some rows see.
TEST_P(MaskTest, WindowsAroundPartitionsAreWhole) {
  CaseSpec spec = Spec(4);
  spec.block_size = 64;
  for (const int low : {1007, 1008, 1022, 1023, 1024, 1025, 1026, 1088}) {
    Add(&spec, {1, 1100}, Causal(1099 - low));
    Add(&spec, {2, 2060}, Causal(2058 - low));
  }
  Add(&spec, {70, 1060}, Causal(5));  // chunks on either side of 1024
  Add(&spec, {70, 1060}, Both(3, 9));
  Add(&spec, {70, 2100}, Causal(1030));
  Add(&spec, {200, 1100}, Both(0, 0));
  Add(&spec, {5, 3100}, Causal(2000));
  Add(&spec, {5, 1500}, Prefix(1023, Causal()));
  Add(&spec, {600, 1300}, Prefix(1025));
  OnEveryPath(MeansCase(spec, Poison::kInf), ExpectExactMeans);
}

// Many rows share what is read at a time, some 512 keys, of which the last ones
// see nothing.
TEST_P(MaskTest, WindowsThatBeginAfterTheFirstRunAreWhole) {
  CaseSpec spec = Spec(2, 2);
  Add(&spec, {700, 700}, Causal(30));
  Add(&spec, {700, 1700}, Causal(90));
  OnEveryPath(MeansCase(spec), ExpectExactMeans);
}

// What a row does not see has no weight, and is not multiplied by it either.
TEST_P(MaskTest, ANaNReachesTheRowsThatSeeItAndNoOthers) {
  constexpr int kContext = 300;
  CaseSpec spec = Spec(6, 2);
  Add(&spec, {60, kContext}, Causal(140));
  Add(&spec, {kContext, kContext}, Causal(130));
  Add(&spec, {50, kContext}, Both(100, 30));
  Add(&spec, {1, kContext}, Causal(77));
  const AttentionCase clean(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(engine.attention->simd_target());
    const Output expected = clean.Run(*engine.attention);
    for (const int place : {63, 100, 127, 128, 165, 191, 223, 256, 290}) {
      SCOPED_TRACE(place);
      AttentionCase c(spec);
      for (int seq = 0; seq < int(spec.seqs.size()); ++seq) {
        c.Poke(seq, place, 0, std::numeric_limits<double>::quiet_NaN());
      }
      ExpectNaNInRowsThatSee(place, c, c.Run(*engine.attention), expected);
      if (HasFailure()) return;
    }
  }
}

TEST_P(MaskTest, EachSequenceOfABatchHasItsOwnMask) {
  for (const int group : {1, 4, 5, 8}) {
    CaseSpec spec = Spec(2 * group, 2);
    spec.block_size = group % 4 == 0 ? 128 : 16;
    Add(&spec, {1, 300}, Causal());
    Add(&spec, {1, 300}, Causal(100));
    Add(&spec, {33, 70}, Both(-1, -1));
    Add(&spec, {0, 50}, Causal(3));
    Add(&spec, {33, 70}, Both(4, 9));
    Add(&spec, {50, 50}, Prefix(20));
    Add(&spec, {5, 1030}, Causal(6));
    Add(&spec, {9, 1030}, Causal());
    OnEveryPath(MeansCase(spec), ExpectExactMeans);
    if (HasFailure()) return;
  }
}

TEST_P(MaskTest, RowsBeforeTheContextSeeOnlyWhatTheirMaskReaches) {
  CaseSpec spec = Spec();
  for (const SequenceMask& mask :
       {Causal(), Causal(3), Both(-1, -1), Both(2, 5), Both(-1, 0), Both(0, -1),
        Prefix(2), Prefix(9, Both(4, 1))}) {
    Add(&spec, {30, 10}, mask);
    Add(&spec, {300, 4}, mask);
    Add(&spec, {3, 0}, mask);
  }
  OnEveryPath(MeansCase(spec), ExpectExactMeans);
}

// A needle's key aligns with q, all others oppose it: it takes all the weight
// where the row sees it, and adds nothing where not.
TEST_P(MaskTest, ANeedleIsSeenUpToTheEdgesOfTheWindowAndNotBeyond) {
  CaseSpec spec = Spec(1);
  std::vector<int> needles;
  const auto add = [&](const SeqSpec& seq, const SequenceMask& mask,
                       int needle) {
    if (needle < 0 || needle >= seq.kv_len) return;
    Add(&spec, seq, mask);
    needles.push_back(needle);
  };
  for (const int left : {0, 15, 16, 63, 64, 130, 1030}) {
    for (const int step : {-1, 0, 1}) {
      add({3, 1100}, Causal(left), 1098 - left + step);
      add({3, 1100}, Causal(left), 1098 + step);
      add({3, 200}, Both(left, -1), 198 - left + step);
    }
  }
  for (const int right : {0, 1, 16, 64}) {
    for (const int step : {-1, 0, 1}) {
      add({80, 170}, Both(10, right), 120 + right + step);
      add({80, 170}, Both(10, right), 110 + step);
    }
  }
  const Fill ones = [](int, int, int, int) { return 1.0; };
  const Fill k = [&](int s, int pos, int, int) {
    return pos == needles[size_t(s)] ? 8.0 : -8.0;
  };
  const Fill v = [&](int s, int pos, int, int) {
    return pos == needles[size_t(s)] ? 1.0 : 0.0;
  };
  const AttentionCase c(spec, ones, k, v);
  OnEveryPath(c, [&](const AttentionCase&, const Output& output) {
    for (int s = 0; s < int(needles.size()); ++s) {
      for (int i = 0; i < spec.seqs[size_t(s)].q_len; ++i) {
        const int needle = needles[size_t(s)];
        const bool seen = needle >= c.Begin(s, i) && needle < c.Limit(s, i);
        const auto row = static_cast<size_t>(c.FirstToken(s) + i);
        ASSERT_EQ(output.out[row * 32], seen ? 1.0f : 0.0f)
            << "needle " << needle << " row " << i << " sees [" << c.Begin(s, i)
            << ", " << c.Limit(s, i) << ")";
      }
    }
  });
}

TEST_P(MaskTest, EveryHeadSizeMatchesUnderEveryKindOfMask) {
  const std::pair<int, int> sizes[] = {{32, 32},   {40, 40},   {128, 128},
                                       {192, 128}, {576, 512}, {576, 576},
                                       {72, 32}};
  for (const auto& [d, dv] : sizes) {
    CaseSpec spec = Spec(4, 2);
    spec.head_size = d;
    spec.v_head_size = dv;
    Add(&spec, {5, 70}, Causal(33));
    Add(&spec, {1, 90}, Causal(64));
    Add(&spec, {6, 40}, Both(3, 2));
    Add(&spec, {4, 80}, Prefix(78));
    OnEveryPath(AttentionCase(spec),
                [](const AttentionCase& c, const Output& output) {
                  c.ExpectMatchesReference(output);
                });
    if (HasFailure()) return;
  }
}

// --- what is out of view is not read -----------------------------------------

CaseSpec Windowed(DType dtype) {
  CaseSpec spec;
  spec.kv_dtype = dtype;
  spec.head_size = 64;
  spec.seqs = {{1, 1500}, {3, 2200}, {40, 300}, {17, 200}, {9, 130}, {2, 90}};
  spec.masks = {Causal(100),
                Causal(1023),
                Causal(0),
                Both(30, 5),
                Prefix(20, Both(-1, 0)),
                Both(15, 1)};
  return spec;
}

TEST_P(MaskTest, TableEntriesOutOfViewMayHoldAnything) {
  for (const int block_size : {16, 64, 256}) {
    CaseSpec spec = Windowed(GetParam());
    spec.block_size = block_size;
    AttentionCase c(spec);
    const Engine engine = MakeEngine(2);
    const Output expected = c.Run(*engine.attention);
    EXPECT_GE(c.HideBlocksOutOfView(), 15);
    OnEveryPath(c, [](const AttentionCase& hidden, const Output& output) {
      hidden.ExpectMatchesReference(output);
    });
    ExpectSameBits(expected, c.Run(*engine.attention), "hidden blocks");
    if (HasFailure()) return;
  }
}

TEST_P(MaskTest, PoisonOutOfViewChangesNothing) {
  const CaseSpec spec = Windowed(GetParam());
  const AttentionCase clean(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    const Output expected = clean.Run(*engine.attention);
    for (const double poison : {1e3, double(INFINITY), double(NAN)}) {
      AttentionCase c(spec);
      for (int s = 0; s < int(spec.seqs.size()); ++s) {
        const auto [low, high] = c.InView(s);
        for (int pos = 0; pos < spec.seqs[size_t(s)].kv_len; ++pos) {
          if (pos >= low && pos < high) continue;
          for (int h = 0; h < spec.kv_heads; ++h) c.Poke(s, pos, h, poison);
        }
      }
      ExpectSameBits(expected, c.Run(*engine.attention),
                     engine.attention->simd_target());
      if (HasFailure()) return;
    }
  }
}

// Keys that earlier rows of a tile see, and later ones must not be touched by.
TEST_P(MaskTest, PoisonLeftOfARowsWindowLeavesItAlone) {
  CaseSpec spec = Spec();
  Add(&spec, {60, 150}, Causal(9));
  Add(&spec, {60, 150}, Both(12, 4));
  Add(&spec, {31, 1040}, Causal(20));
  const AttentionCase clean(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    const Output expected = clean.Run(*engine.attention);
    for (const double poison : {1e3, double(INFINITY), double(NAN)}) {
      for (const int first : {1, 2, 7, 16, 29}) {  // the first unharmed row
        AttentionCase c(spec);
        for (int s = 0; s < int(spec.seqs.size()); ++s) {
          const int low = int(c.Begin(s, first));
          for (int pos = 0; pos < low; ++pos) c.Poke(s, pos, 0, poison);
        }
        const Output poisoned = c.Run(*engine.attention);
        for (int s = 0; s < int(spec.seqs.size()); ++s) {
          const int end = spec.seqs[size_t(s)].q_len;
          ExpectSameBits(RowsOf(clean, expected, s, first, end),
                         RowsOf(c, poisoned, s, first, end),
                         engine.attention->simd_target());
        }
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(KvTypes, MaskTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

// --- plans -------------------------------------------------------------------

TEST(MaskPlanTest, WindowsCostWhatTheySee) {
  CaseSpec spec;
  spec.seqs = {{1, 32768}};
  spec.q_heads = 1;
  spec.kv_heads = 1;
  spec.head_size = 32;
  spec.masks = {Causal(1023)};
  const AttentionCase c(spec);
  const Output output = c.Run(*MakeEngine(1).attention);
  EXPECT_EQ(output.report.kv_bytes, 1024 * (32 + 32) * 2);
  EXPECT_EQ(output.report.flops, 1024 * 2 * (32 + 32));
}

std::string Refusal(const std::vector<SequenceMask>& masks,
                    const AttentionShape& shape) {
  CaseSpec spec;
  spec.seqs = {{1, 20}, {2, 30}};
  spec.masks = masks;
  const AttentionCase c(spec);
  static const Engine engine = MakeEngine(1);
  AttentionPlan plan;
  const Status status =
      engine.attention->Plan(c.batch(), shape, c.view(), {}, &plan);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(MaskPlanTest, RefusalsNamePlaceValueAndLimit) {
  const AttentionShape shape = {.num_q_heads = 4};
  EXPECT_EQ(Refusal({Causal()}, shape),
            "masks has 1 entries, but seq_lens has 2");
  EXPECT_EQ(Refusal({Causal(), Causal(-2)}, shape),
            "masks[1].window_left = -2, must be -1 (all) or more");
  EXPECT_EQ(Refusal({Both(0, -7), Causal()}, shape),
            "masks[0].window_right = -7, must be -1 (all) or more");
  EXPECT_EQ(Refusal({Causal(), {true, -1, 3, 0}}, shape),
            "masks[1].window_right = 3, but the sequence is causal");
  EXPECT_EQ(Refusal({Prefix(-1), Causal()}, shape),
            "masks[0].prefix_len = -1, must not be negative");
  AttentionShape other = shape;
  other.mask.window_left = -3;
  EXPECT_EQ(Refusal({}, other),
            "mask.window_left = -3, must be -1 (all) or more");
  other = shape;
  other.softcap = -1;
  EXPECT_EQ(Refusal({}, other),
            "softcap = -1, must be 0 or a positive normal float");
  other.softcap = std::numeric_limits<double>::infinity();
  EXPECT_EQ(Refusal({}, other),
            "softcap = inf, must be 0 or a positive normal float");
}

TEST(MaskPlanTest, AnIdInViewIsRefusedWhereItIsWrong) {
  CaseSpec spec;
  spec.seqs = {{1, 100}};
  spec.masks = {Causal(16)};  // sees [83, 100): blocks 5 and 6
  AttentionCase c(spec);
  const Engine engine = MakeEngine(1);
  AttentionPlan plan;
  c.block_tables()[4] = -1;
  VARLANE_EXPECT_OK(
      engine.attention->Plan(c.batch(), c.shape(), c.view(), {}, &plan));
  c.block_tables()[5] = -1;
  EXPECT_EQ(engine.attention->Plan(c.batch(), c.shape(), c.view(), {}, &plan)
                .message(),
            "block_tables[0][5] = -1, but the pool has 10 blocks");
}

}  // namespace
}  // namespace varlane::testing
