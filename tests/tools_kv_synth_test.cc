// Synthetic Q/K/V: reproducible, exact in every cache dtype, and sane.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/kv_synth.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "tests/testing/testing.h"

namespace varlane::tools {
namespace {

std::vector<float> Row(SynthToken token, int layer, SynthKind kind, int head,
                       size_t size = 128) {
  std::vector<float> row(size);
  FillSynthRow(token, layer, kind, head, std::span<float>(row));
  return row;
}

TEST(KvSynthTest, ARowIsAFunctionOfItsCoordinatesOnly) {
  const auto row = Row({7, 11}, 2, SynthKind::kKey, 3);
  EXPECT_EQ(row, Row({7, 11}, 2, SynthKind::kKey, 3));
  EXPECT_NE(row, Row({8, 11}, 2, SynthKind::kKey, 3));
  EXPECT_NE(row, Row({7, 12}, 2, SynthKind::kKey, 3));
  EXPECT_NE(row, Row({7, 11}, 1, SynthKind::kKey, 3));
  EXPECT_NE(row, Row({7, 11}, 2, SynthKind::kValue, 3));
  EXPECT_NE(row, Row({7, 11}, 2, SynthKind::kQuery, 3));
  EXPECT_NE(row, Row({7, 11}, 2, SynthKind::kKey, 4));
}

// Values that anybody can check: a change of the generator changes every
// recorded replay.
TEST(KvSynthTest, ValuesStayTheSameAcrossReleases) {
  const auto row = Row({1, 2}, 3, SynthKind::kValue, 4, 8);
  const std::vector<float> expected = {1.09375F, 0.15625F,  -0.03125F,
                                       0.03125F, -0.84375F, -0.28125F,
                                       1.65625F, -0.15625F};
  EXPECT_EQ(row, expected);
}

TEST(KvSynthTest, AShorterRowIsAPrefixOfALongerOne) {
  const auto whole = Row({7, 11}, 2, SynthKind::kKey, 3, 200);
  const auto part = Row({7, 11}, 2, SynthKind::kKey, 3, 77);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin()));
}

TEST(KvSynthTest, EveryElementTypeHoldsTheSameExactValue) {
  constexpr size_t kSize = 256;
  std::vector<BF16> bf16(kSize);
  std::vector<double> f64(kSize);
  for (int64_t position = 0; position < 200; ++position) {
    const auto f32 = Row({5, position}, 0, SynthKind::kKey, 0, kSize);
    FillSynthRow({5, position}, 0, SynthKind::kKey, 0, std::span<BF16>(bf16));
    FillSynthRow({5, position}, 0, SynthKind::kKey, 0, std::span<double>(f64));
    for (size_t d = 0; d < kSize; ++d) {
      ASSERT_EQ(ToFloat(bf16[d]), f32[d]);
      ASSERT_EQ(static_cast<double>(f32[d]), f64[d]);
      ASSERT_EQ(ToFloat(ToBF16(f32[d])), f32[d]);
      ASSERT_EQ(ToFloat(ToF16(f32[d])), f32[d]);
      ASSERT_LE(std::abs(f32[d]), 93.0F / 32);
    }
  }
}

TEST(KvSynthTest, ValuesLookLikeAStandardNormal) {
  double sum = 0;
  double squares = 0;
  double neighbours = 0;
  int64_t count = 0;
  for (int64_t position = 0; position < 2000; ++position) {
    const auto row = Row({9, position}, 1, SynthKind::kQuery, 2);
    for (size_t d = 0; d < row.size(); ++d) {
      sum += row[d];
      squares += double{row[d]} * row[d];
      if (d > 0) neighbours += double{row[d]} * row[d - 1];
      ++count;
    }
  }
  const auto n = static_cast<double>(count);  // 256,000: deviation 0.002
  EXPECT_NEAR(sum / n, 0.0, 0.01);
  EXPECT_NEAR(squares / n, 1.0, 0.01);
  EXPECT_NEAR(neighbours / n, 0.0, 0.01);
}

TEST(KvSynthTest, StreamsOfRequestsAndHashIdsNeverMeet) {
  std::set<uint64_t> streams;
  for (int64_t id = 0; id < 1000; ++id) {
    streams.insert(RequestStream(id));
    streams.insert(HashIdStream(id));
  }
  EXPECT_EQ(streams.size(), 2000u);
}

TEST(KvSynthTest, SamplingTakesTheShareAskedFor) {
  int64_t taken = 0;
  for (int64_t position = 0; position < 100000; ++position) {
    const double u = SynthUniform({3, position}, 4, 5);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);  // so that a share of 1 is every row
    taken += u < 0.05 ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(taken), 5000.0, 350.0);
}

}  // namespace
}  // namespace varlane::tools
