// The verifier: passes what is right, fails what is wrong by little.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/verify.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/testing/testing.h"
#include "tools/kv_synth.h"
#include "tools/report.h"

namespace varlane::tools {
namespace {

// One row of synthetic data and its exact answer in fp32.
class RowVerifierTest : public ::testing::Test {
 protected:
  static constexpr size_t kD = 64;
  static constexpr int64_t kKeys = 300;

  void SetUp() override {
    q_.resize(kD);
    k_.resize(kD * kKeys);
    v_.resize(kD * kKeys);
    FillSynthRow({1, 0}, 0, SynthKind::kQuery, 0, std::span(q_));
    for (int64_t t = 0; t < kKeys; ++t) {
      const auto at = static_cast<size_t>(t) * kD;
      FillSynthRow({1, t}, 0, SynthKind::kKey, 0,
                   std::span(k_).subspan(at, kD));
      FillSynthRow({1, t}, 0, SynthKind::kValue, 0,
                   std::span(v_).subspan(at, kD));
    }
    row_ = {q_, k_.data(), v_.data(), kKeys, kD, 0.125};
    std::vector<double> exact(kD);
    lse_ = static_cast<float>(ReferenceAttention(row_, exact));
    out_.assign(exact.begin(), exact.end());
  }

  VerifyResult Check(DType dtype) {
    RowVerifier verifier;
    verifier.Check(row_, {dtype, 10.0}, out_, &lse_, "row");
    return verifier.result();
  }

  std::vector<double> q_;
  std::vector<double> k_;
  std::vector<double> v_;
  ReferenceRow row_;
  std::vector<float> out_;
  float lse_ = 0;
};

TEST_F(RowVerifierTest, TheExactAnswerPasses) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const VerifyResult result = Check(dtype);
    EXPECT_TRUE(result.ok()) << result.first_failure;
    EXPECT_EQ(result.rows, 1);
    EXPECT_LT(result.worst_ratio, 0.01);
  }
}

TEST_F(RowVerifierTest, AMissingKeyFailsInFp32) {
  ReferenceRow shorter = row_;
  shorter.num_keys -= 1;
  std::vector<double> wrong(kD);
  ReferenceAttention(shorter, wrong);
  out_.assign(wrong.begin(), wrong.end());
  EXPECT_FALSE(Check(DType::kF32).ok());
}

TEST_F(RowVerifierTest, ASmallShiftOfOneElementFails) {
  out_[17] += 1e-3F;
  const VerifyResult result = Check(DType::kF32);
  EXPECT_EQ(result.failed_rows, 1);
  EXPECT_GT(result.worst_ratio, 1);
  EXPECT_EQ(result.first_failure.substr(0, 14), "row: out[17] =")
      << result.first_failure;
}

TEST_F(RowVerifierTest, NanAndInfinityFail) {
  const float right = out_[3];
  for (const float wrong : {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
    out_[3] = wrong;
    EXPECT_FALSE(Check(DType::kBF16).ok());
    out_[3] = right;
  }
  lse_ = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(Check(DType::kBF16).ok());
}

TEST_F(RowVerifierTest, AWrongLogSumExpFails) {
  lse_ += 3e-4F;
  const VerifyResult result = Check(DType::kBF16);
  EXPECT_FALSE(result.ok());
  EXPECT_NE(result.first_failure.find("lse = "), std::string::npos);
}

TEST_F(RowVerifierTest, ARowThatSeesNothingMustBeZeroAndMinusInfinity) {
  row_.num_keys = 0;
  EXPECT_FALSE(Check(DType::kBF16).ok());
  out_.assign(kD, 0.0F);
  EXPECT_FALSE(Check(DType::kBF16).ok());
  lse_ = -std::numeric_limits<float>::infinity();
  EXPECT_TRUE(Check(DType::kBF16).ok());
}

TEST(ReportTest, PercentilesAreNearestRank) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Percentiles p = ComputePercentiles(values);
  EXPECT_EQ(p.count, 100);
  EXPECT_EQ(p.mean, 50.5);
  EXPECT_EQ(p.p50, 50);
  EXPECT_EQ(p.p90, 90);
  EXPECT_EQ(p.p99, 99);
  EXPECT_EQ(p.max, 100);
  EXPECT_EQ(ComputePercentiles({7}).p99, 7);
  EXPECT_EQ(ComputePercentiles({}).max, 0);
}

TEST(ReportTest, ASeriesOfAnyLengthKeepsAnEvenSample) {
  SampledSeries series(8);
  for (int i = 0; i < 1000; ++i) series.Add(i);
  ASSERT_LE(series.values().size(), 8u);
  ASSERT_GE(series.values().size(), 4u);
  for (size_t i = 0; i < series.values().size(); ++i) {
    EXPECT_EQ(series.values()[i],
              static_cast<double>(i) * static_cast<double>(series.stride()));
  }
}

TEST(ReportTest, TextForPeople) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(-1234567), "-1,234,567");
  EXPECT_EQ(FormatSeconds(0.0123), "12.30 ms");
  EXPECT_EQ(Sparkline(std::vector<double>{0, 0.5, 1}, 10), " +@");
  EXPECT_EQ(Sparkline({}, 10), "");
  Table table({Table::Align::kLeft, Table::Align::kRight});
  table.AddRow({"a", "1"});
  table.AddRow({"bcd", "234"});
  EXPECT_EQ(table.ToString(), "  a      1\n  bcd  234\n");
}

}  // namespace
}  // namespace varlane::tools
