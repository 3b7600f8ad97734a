// The yardsticks read what they say, and refuse what they cannot read.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/limits.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/limits.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

RuntimeOptions TwoWorkers(const std::string& target = "") {
  RuntimeOptions options;
  options.num_threads = 2;
  options.pin = false;
  options.simd_target = target;
  return options;
}

class LimitsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto runtime = Runtime::Create(TwoWorkers());
    VARLANE_ASSERT_OK(runtime.status());
    runtime_ = std::move(runtime).value();
    auto pool = KvPool::Create({.layout = {.dtype = DType::kBF16,
                                           .num_layers = 2,
                                           .num_kv_heads = 3,
                                           .head_size = 96,
                                           .v_head_size = 64,
                                           .block_size = 16},
                                .num_blocks = 20},
                               runtime_.get());
    VARLANE_ASSERT_OK(pool.status());
    pool_ = std::move(pool).value();
  }

  Result<std::unique_ptr<ReadProbe>> Make(const std::vector<int32_t>& lens,
                                          const std::vector<int32_t>& tables,
                                          int64_t stride, int layer = 0) {
    return ReadProbe::Create(runtime_.get(), pool_->view(), layer,
                             {.cu_seqlens_q = {},
                              .seq_lens = lens,
                              .block_tables = tables,
                              .block_table_stride = stride});
  }

  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<KvPool> pool_;
};

TEST_F(LimitsTest, AProbeCountsTheBytesOfWholeBlocksOfOneLayer) {
  // Two and one block, the second row's other entry is not looked at.
  const auto probe = Make({17, 16}, {5, 9, 3, -1}, 2, 1);
  VARLANE_ASSERT_OK(probe.status());
  EXPECT_EQ((*probe)->bytes(), 3 * pool_->layout().layer_bytes());
}

TEST_F(LimitsTest, EveryLoopRunsAndHasANameOfItsOwn) {
  const auto probe = Make({170, 90}, {0,  1,  2,  3,  4,  5,  6, 7, 8, 9, 10,
                                      11, 12, 13, 14, 15, 16, 0, 0, 0, 0, 0},
                          11);
  VARLANE_ASSERT_OK(probe.status());
  std::set<std::string> names;
  for (int loop = 0; loop < (*probe)->num_loops(); ++loop) {
    const Result<double> seconds = (*probe)->Run(loop);
    VARLANE_ASSERT_OK(seconds.status());
    EXPECT_GT(*seconds, 0);
    EXPECT_TRUE(names.insert((*probe)->LoopName(loop)).second);
  }
  EXPECT_GE(names.size(), 8u);
  EXPECT_EQ((*probe)->Run(-1).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ((*probe)->Run((*probe)->num_loops()).status().code(),
            StatusCode::kOutOfRange);
}

TEST_F(LimitsTest, AnEmptyBatchIsReadInNoTime) {
  const auto probe = Make({0}, {}, 0);
  VARLANE_ASSERT_OK(probe.status());
  EXPECT_EQ((*probe)->bytes(), 0);
  VARLANE_ASSERT_OK((*probe)->Run(0).status());
}

TEST_F(LimitsTest, WhatCannotBeReadIsRefusedByName) {
  const auto message = [](const auto& result) {
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    return std::string(result.status().message());
  };
  EXPECT_EQ(message(Make({16}, {20}, 1)),
            "block_tables[0][0] = 20, but the pool has 20 blocks");
  EXPECT_EQ(message(Make({17}, {0}, 1)),
            "seq_lens[0] = 17 needs 2 blocks, but block_table_stride = 1");
  EXPECT_EQ(message(Make({-1}, {0}, 1)),
            "seq_lens[0] = -1, must not be negative");
  EXPECT_EQ(message(Make({16, 16}, {0}, 1)),
            "block_tables has 1 entries, but block_tables[1][0] is needed");
  EXPECT_EQ(message(Make({16}, {0}, 1, 2)),
            "layer = 2, but the layout has 2 layers");
}

TEST_F(LimitsTest, MultiplyPeaksAreHadOnEveryTarget) {
  for (const std::string& target : SupportedSimdTargets()) {
    auto runtime = Runtime::Create(TwoWorkers(target));
    VARLANE_ASSERT_OK(runtime.status());
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const Operands operands : {Operands::kRegisters, Operands::kL1}) {
        const Result<double> peak =
            MeasureMultiplyPeak(runtime->get(), dtype, 1e-4, operands);
        VARLANE_ASSERT_OK(peak.status());
        EXPECT_GT(*peak, 0) << target << " " << DTypeName(dtype);
      }
      const Result<double> attention =
          MeasureAttentionPeak(runtime->get(), dtype, 72, 1e-4);
      VARLANE_ASSERT_OK(attention.status());
      EXPECT_GT(*attention, 0) << target << " " << DTypeName(dtype);
    }
  }
}

TEST_F(LimitsTest, FlopsFedFromL1AreThoseOfTheProductsSummedUp) {
  const auto factor = double{std::bit_cast<float>(0x3c3c3c3c)};  // all there is
  for (const KernelTable* kernels : SupportedKernels()) {
    const LimitKernels& limits = *kernels->limits;
    for (const auto fed : {limits.fed_f32, limits.fed_bf16}) {
      float sum = 0;
      const int64_t flops = fed(1000, 0, &sum);
      const double products = static_cast<double>(flops) / 2;
      EXPECT_GE(flops, 2 * 1000) << kernels->name;
      EXPECT_NEAR(sum / (products * factor * factor), 1, 0.01) << kernels->name;
    }
  }
}

TEST_F(LimitsTest, SumsThatAreWeighedAreExponentialsOfTheirOwnProducts) {
  const auto factor = double{std::bit_cast<float>(0x3c3c3c3c)};
  constexpr int kWeighSteps = 100;  // more than a block, and not a multiple
  for (const KernelTable* kernels : SupportedKernels()) {
    const LimitKernels& limits = *kernels->limits;
    const auto check = [&](const auto& fed, int pack) {
      float sum = 0;
      const int64_t flops = fed(10 * kWeighSteps, kWeighSteps, &sum);
      const double products = static_cast<double>(flops) / 2;
      const double of_weight = kWeighSteps * pack;
      EXPECT_NEAR(sum / (products / of_weight),
                  std::exp2(of_weight * factor * factor), 1e-3)
          << kernels->name << " " << pack;
    };
    check(limits.fed_f32, 1);
    check(limits.fed_bf16, limits.bf16_pack);
  }
}

TEST_F(LimitsTest, AnAttentionsPeakNeedsAHeadSizeThatThereIs) {
  for (const int head_size : {0, -8, 12, 584}) {
    EXPECT_EQ(MeasureAttentionPeak(runtime_.get(), DType::kF32, head_size, 1e-4)
                  .status()
                  .message(),
              "head_size = " + std::to_string(head_size) +
                  ", must be a multiple of 8 in [8, 576]");
  }
}

TEST_F(LimitsTest, AMultiplyPeakNeedsSomeTimeAndAKnownTarget) {
  EXPECT_EQ(MeasureMultiplyPeak(runtime_.get(), DType::kF32, 0).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MeasureMultiplyPeak(nullptr, DType::kF32, 1).status().code(),
            StatusCode::kInvalidArgument);
  auto other = Runtime::Create(TwoWorkers("VAX"));
  VARLANE_ASSERT_OK(other.status());
  EXPECT_EQ(
      MeasureMultiplyPeak(other->get(), DType::kF32, 1e-4).status().code(),
      StatusCode::kNotFound);
}

}  // namespace
}  // namespace varlane
