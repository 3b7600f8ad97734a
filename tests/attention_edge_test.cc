// The corners: rows that see nothing, extreme scores, needles, strides, far
// offsets, shared blocks, concurrency, cancellation.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

void CheckAllTargets(const AttentionCase& c, const PlanOptions& options = {}) {
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(engine.attention->simd_target());
    c.ExpectMatchesReference(c.Run(*engine.attention, options));
    if (::testing::Test::HasFailure()) return;
  }
}

class EdgeTest : public ::testing::TestWithParam<DType> {
 protected:
  CaseSpec Spec(std::vector<SeqSpec> seqs) const {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.head_size = 32;
    spec.seqs = std::move(seqs);
    return spec;
  }
};

TEST_P(EdgeTest, RowsThatSeeNothingAreZeroWithMinusInfinity) {
  const AttentionCase c(
      Spec({{3, 0}, {5, 2}, {0, 9}, {0, 0}, {1, 0}, {2, 70}}));
  CheckAllTargets(c);
  CheckAllTargets(c, {OwnerPattern::kMap, PartitionMode::kSpread});
}

// A needle's key aligns with q, all others oppose it: its weight is 1 and out
// is its value, which codes its position.
TEST_P(EdgeTest, ANeedleIsFoundAtEveryBoundary) {
  std::vector<int> places;
  for (const int edge : {0, 16, 32, 48, 64, 128, 1024, 1088, 1100}) {
    for (const int delta : {-1, 0, 1}) places.push_back(edge + delta);
  }
  std::vector<SeqSpec> seqs;
  std::vector<int> needle;
  for (const int place : places) {
    if (place < 0 || place >= 1101) continue;
    seqs.push_back({1, 1101});
    needle.push_back(place);
  }
  const Fill ones = [](int, int, int, int) { return 1.0; };
  const Fill k = [&](int s, int pos, int, int) {
    return pos == needle[size_t(s)] ? 8.0 : -8.0;
  };
  const Fill v = [&](int, int pos, int, int d) {
    return d == 0 ? double(pos / 32) : d == 1 ? double(pos % 32) : 1.0;
  };
  CaseSpec spec = Spec(seqs);
  spec.q_heads = 1;
  spec.kv_heads = 1;
  const AttentionCase c(spec, ones, k, v);
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const PartitionMode mode : kPartitionModes) {
      const Output output =
          c.Run(*engine.attention, {OwnerPattern::kSearch, mode});
      for (size_t s = 0; s < needle.size(); ++s) {
        EXPECT_EQ(output.out[s * 32], float(needle[s] / 32))
            << engine.attention->simd_target() << " needle " << needle[s];
        EXPECT_EQ(output.out[s * 32 + 1], float(needle[s] % 32));
      }
    }
  }
}

// ... and is invisible one token before its position: the causal diagonal.
TEST_P(EdgeTest, ANeedleOnTheDiagonalIsSeenByItsOwnRowAndLaterOnes) {
  constexpr int kLength = 150;
  for (const int needle : {0, 1, 15, 16, 63, 64, 65, 127, 149}) {
    const Fill ones = [](int, int, int, int) { return 1.0; };
    const Fill k = [&](int, int pos, int, int) {
      return pos == needle ? 8.0 : -8.0;
    };
    const Fill v = [&](int, int pos, int, int) {
      return pos == needle ? 1.0 : 0.0;
    };
    CaseSpec spec = Spec({{kLength, kLength}});
    spec.q_heads = 3;
    spec.kv_heads = 1;
    const AttentionCase c(spec, ones, k, v);
    const Output output = c.Run(*EnginesOfAllTargets().front().attention);
    for (int i = 0; i < kLength; ++i) {
      for (int h = 0; h < 3; ++h) {
        ASSERT_EQ(output.out[size_t((i * 3 + h) * 32)], i < needle ? 0.f : 1.f)
            << "needle " << needle << " row " << i;
      }
    }
  }
}

TEST_P(EdgeTest, ScoresThatFallOrRiseTileByTileMatch) {
  for (const double direction : {-1.0, 1.0}) {
    const Fill ones = [](int, int, int, int) { return 1.0; };
    const Fill k = [&](int, int pos, int, int d) {
      return d == 0 ? direction * 20.0 * double(pos / 64) : 0.0;
    };
    CaseSpec spec = Spec({{3, 700}, {70, 300}});
    spec.scale = 0.5;
    CheckAllTargets(AttentionCase(spec, ones, k));
  }
}

// So far that weights of the first maximum would be infinite.
TEST_P(EdgeTest, ScoresThatRiseForOneHeadOfAGroupMatch) {
  for (int rising = 0; rising < 4; ++rising) {
    const Fill q = [&](int, int, int head, int) {
      return head == rising ? 1.0 : 0.0;
    };
    const Fill k = [&](int, int pos, int, int d) {
      return d == 0 ? 20.0 * double(pos / 64) : 0.0;
    };
    CaseSpec spec = Spec({{1, 1000}});
    spec.q_heads = 4;
    spec.kv_heads = 1;
    spec.scale = 0.5;
    CheckAllTargets(AttentionCase(spec, q, k));
  }
}

TEST_P(EdgeTest, HugeScoresMatch) {
  const Fill ones = [](int, int, int, int) { return 1.0; };
  const Fill k = [](int s, int pos, int, int d) {
    return d == 0 ? (pos % 7 == s ? 1e4 : -1e4) : 0.0;
  };
  CaseSpec spec = Spec({{1, 200}, {9, 90}});
  spec.scale = 1;
  CheckAllTargets(AttentionCase(spec, ones, k));
}

TEST_P(EdgeTest, ScoresOfMinusInfinityThenFiniteOnesMatch) {
  const double inf = std::numeric_limits<double>::infinity();
  const Fill q = [](int, int, int, int d) { return d == 0 ? 1.0 : 0.0; };
  const Fill k = [&](int s, int pos, int, int d) {
    if (d != 0) return 0.0;
    const int finite_from = s == 0 ? 80 : s == 1 ? 64 : 1 << 20;
    return pos < finite_from ? -inf : 0.25 * (pos % 5);
  };
  const CaseSpec spec = Spec({{1, 130}, {4, 100}, {2, 70}});
  const AttentionCase c(spec, q, k);
  for (const Engine& engine : EnginesOfAllTargets()) {
    const Output output = c.Run(*engine.attention);
    SCOPED_TRACE(engine.attention->simd_target());
    c.ExpectMatchesReference(output);
    EXPECT_EQ(output.lse.back(), -inf);  // nothing but -inf: as an empty row
    if (HasFailure()) return;
  }
}

TEST_P(EdgeTest, AVisibleNaNIsNeverHidden) {
  for (const int place : {0, 5, 63, 64, 99}) {
    AttentionCase c(Spec({{1, 100}}));
    c.Poke(0, place, 0, std::numeric_limits<double>::quiet_NaN());
    for (const Engine& engine : EnginesOfAllTargets()) {
      const Output output = c.Run(*engine.attention);
      EXPECT_TRUE(std::isnan(output.out[0]))
          << engine.attention->simd_target() << " at " << place;
      EXPECT_TRUE(std::isnan(output.lse[0]))
          << engine.attention->simd_target() << " at " << place;
      // The other KV head saw no NaN.
      EXPECT_TRUE(std::isfinite(output.out[2 * 32]));
    }
  }
}

// ... and leaves the other dims of the row alone.
TEST_P(EdgeTest, AnInfiniteValueStaysInfinite) {
  const double inf = std::numeric_limits<double>::infinity();
  const Fill zero = [](int, int, int, int) { return 0.0; };
  const Fill v = [&](int, int pos, int, int d) {
    return pos != 5 ? 1.0 : d == 3 ? inf : d == 20 ? -inf : 1.0;
  };
  for (const DType out_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    CaseSpec spec = Spec({{2, 40}});
    spec.out_dtype = out_dtype;
    const AttentionCase c(spec, zero, zero, v);
    for (const Engine& engine : EnginesOfAllTargets()) {
      SCOPED_TRACE(engine.attention->simd_target());
      const Output output = c.Run(*engine.attention);
      for (size_t i = 0; i < output.out.size(); ++i) {
        const size_t d = i % 32;
        ASSERT_EQ(output.out[i], d == 3 ? inf : d == 20 ? -inf : 1.0) << i;
      }
    }
  }
}

TEST_P(EdgeTest, RepeatedBlocksAreReadAsOften) {
  CaseSpec spec = Spec({{1, 64}, {1, 64}});
  AttentionCase c(spec);
  // The second sequence shares the first one's two leading blocks.
  const int64_t stride = c.batch().block_table_stride;
  c.block_tables()[size_t(stride)] = c.block_tables()[0];
  c.block_tables()[size_t(stride) + 1] = c.block_tables()[1];
  CheckAllTargets(c);
}

INSTANTIATE_TEST_SUITE_P(KvTypes, EdgeTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

TEST(AttentionTensorTest, StridedAndUnalignedTensorsGiveTheSameBits) {
  CaseSpec spec;
  spec.seqs = {{5, 40}, {1, 90}};
  spec.q_dtype = DType::kBF16;
  const AttentionCase c(spec);
  // Caches that are full: rows that begin a line would go past them.
  const Engine engine = MakeSmallCaches("");
  const Output packed = c.Run(*engine.attention);

  const int64_t tokens = spec.total_q();
  const int64_t row = spec.head_size;
  const int64_t token_stride = 2 * spec.q_heads * row + 6;
  const int64_t head_stride = row + 3;
  std::vector<BF16> q(size_t(tokens * token_stride) + 1);
  std::vector<float> out(size_t(tokens * token_stride) + 1, 7.0f);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < spec.q_heads; ++h) {
      for (int d = 0; d < row; ++d) {
        q[size_t(1 + t * token_stride + h * head_stride + d)] =
            ToBF16(float(c.Q(t, h, d)));
      }
    }
  }
  AttentionPlan plan;
  VARLANE_ASSERT_OK(
      engine.attention->Plan(c.batch(), c.shape(), c.view(), {}, &plan));
  AttentionTensors tensors;
  tensors.q = {q.data() + 1, DType::kBF16, token_stride, head_stride};
  tensors.out = {out.data() + 1, DType::kF32, token_stride, head_stride};
  VARLANE_ASSERT_OK(engine.attention->Run(&plan, c.view(), 0, tensors));
  int64_t untouched = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < spec.q_heads; ++h) {
      for (int d = 0; d < row; ++d) {
        ASSERT_EQ(out[size_t(1 + t * token_stride + h * head_stride + d)],
                  packed.out[size_t((t * spec.q_heads + h) * row + d)]);
      }
    }
  }
  for (const float value : out) untouched += value == 7.0f ? 1 : 0;
  EXPECT_EQ(untouched, int64_t(out.size()) - tokens * spec.q_heads * row);
}

// Rows of whole lines go past caches that q and out fill; others do not.
TEST(AttentionTensorTest, OutputPastTheCachesIsTheSameBits) {
  for (const DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int v_head_size : {128, 72, 576}) {
      CaseSpec spec;
      spec.seqs = {{Operations(40, 12), 1300}, {5, 40}, {1, 90}};
      spec.v_head_size = v_head_size;
      spec.out_dtype = out;
      const AttentionCase c(spec);
      for (const Engine& engine : EnginesOfAllTargets()) {
        SCOPED_TRACE(engine.attention->simd_target());
        const Engine small = MakeSmallCaches(engine.attention->simd_target());
        const Output streamed = c.Run(*small.attention);
        c.ExpectMatchesReference(streamed);
        ExpectSameBits(c.Run(*engine.attention), streamed, "small caches");
        if (HasFailure()) return;
      }
    }
  }
}

TEST(AttentionTensorTest, OffsetsBeyondFourGiBAreReached) {
  // Address space only: two blocks of a view of 6 GiB are touched.
  KvLayout layout = {.dtype = DType::kF32,
                     .num_layers = 1,
                     .num_kv_heads = 1,
                     .head_size = 64,
                     .v_head_size = 64,
                     .block_size = 16};
  const int64_t bytes = int64_t{6} << 30;
  void* memory = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for 6 GiB";
  const KvView view = {static_cast<std::byte*>(memory),
                       bytes / layout.block_bytes(), layout};
  const Engine engine = MakeEngine(1);
  const std::vector<int32_t> table = {int32_t(view.num_blocks - 1), 3};
  std::vector<float> kv(20 * 64, 0.0f);
  std::vector<float> values(20 * 64);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i / 64);
  std::vector<int64_t> slots(20);
  for (int t = 0; t < 20; ++t) {
    slots[size_t(t)] = int64_t{table[size_t(t / 16)]} * 16 + t % 16;
  }
  VARLANE_ASSERT_OK(engine.attention->WriteKv(
      view, 0, {kv.data(), DType::kF32}, {values.data(), DType::kF32}, slots));
  const std::vector<int32_t> cu = {0, 1};
  const std::vector<int32_t> lens = {20};
  AttentionPlan plan;
  AttentionShape shape = {.num_q_heads = 1};
  VARLANE_ASSERT_OK(
      engine.attention->Plan({cu, lens, table, 2}, shape, view, {}, &plan));
  std::vector<float> q(64, 1.0f);
  std::vector<float> out(64);
  VARLANE_ASSERT_OK(engine.attention->Run(
      &plan, view, 0, {{q.data(), DType::kF32}, {out.data(), DType::kF32}}));
  EXPECT_EQ(out[0], 9.5f);  // the mean of 0..19
  munmap(memory, size_t(bytes));
}

TEST(AttentionRunTest, ConcurrentLaunchesDoNotMix) {
  CaseSpec spec;
  spec.seqs = {{1, 300}, {20, 100}, {1, 1500}};
  const Engine engine = MakeEngine(2);
  std::vector<AttentionCase> cases;
  std::vector<Output> expected;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    spec.seed = seed;
    cases.emplace_back(spec);
    expected.push_back(cases.back().Run(*engine.attention));
  }
  std::vector<Output> got(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 10; ++round) {
        got[i] = cases[i].Run(*engine.attention,
                              {OwnerPattern::kSearch, PartitionMode::kSpread});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < 4; ++i) {
    ExpectSameBits(expected[i], got[i], "launch " + std::to_string(i));
  }
}

TEST(AttentionRunTest, ACancelledLaunchSaysSoAndTheNextOneIsRight) {
  CaseSpec spec;
  spec.q_heads = 4;
  spec.kv_heads = 4;
  spec.head_size = 32;
  spec.seqs.assign(40, {1, 2500});
  const AttentionCase c(spec);
  const Engine engine = MakeEngine(2);
  const Output expected = c.Run(*engine.attention);
  AttentionPlan plan;
  VARLANE_ASSERT_OK(engine.attention->Plan(
      c.batch(), c.shape(), c.view(),
      {OwnerPattern::kSearch, PartitionMode::kSpread}, &plan));
  Output got;
  got.out.resize(expected.out.size());
  got.lse.resize(expected.lse.size());
  const AttentionTensors tensors = {
      c.q(), {got.out.data(), DType::kF32}, got.lse.data()};
  std::stop_source before;
  before.request_stop();
  EXPECT_EQ(engine.attention
                ->Run(&plan, c.view(), 0, tensors, nullptr, before.get_token())
                .code(),
            StatusCode::kCancelled);
  // Stopped somewhere in the middle: arrival counters must not survive.
  for (int round = 0; round < 20; ++round) {
    std::stop_source stop;
    std::thread stopper([&] {
      for (int yields = 0; yields < round; ++yields) std::this_thread::yield();
      stop.request_stop();
    });
    (void)engine.attention->Run(&plan, c.view(), 0, tensors, nullptr,
                                stop.get_token());
    stopper.join();
    VARLANE_ASSERT_OK(engine.attention->Run(&plan, c.view(), 0, tensors));
    ExpectSameBits(expected, got, "round " + std::to_string(round));
  }
}

TEST(AttentionRunTest, WrongViewsAndPlansAreRefused) {
  CaseSpec spec;
  spec.seqs = {{1, 20}};
  const AttentionCase c(spec);
  const Engine engine = MakeEngine(1);
  AttentionPlan plan;
  std::vector<float> out(4 * 64);
  const AttentionTensors tensors = {c.q(), {out.data(), DType::kF32}};
  EXPECT_EQ(engine.attention->Run(&plan, c.view(), 0, tensors).code(),
            StatusCode::kFailedPrecondition);
  VARLANE_ASSERT_OK(
      engine.attention->Plan(c.batch(), c.shape(), c.view(), {}, &plan));
  EXPECT_EQ(engine.attention->Run(&plan, c.view(), 3, tensors).message(),
            "layer = 3, but the layout has 1 layers");
  KvView small = c.view();
  small.num_blocks = 0;
  EXPECT_EQ(engine.attention->Run(&plan, small, 0, tensors).code(),
            StatusCode::kInvalidArgument);
  KvView other = c.view();
  other.layout.head_size = 128;
  EXPECT_EQ(engine.attention->Run(&plan, other, 0, tensors).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(
      engine.attention->Run(&plan, c.view(), 0, {{}, tensors.out}).message(),
      "q is null");
  // A failed Plan empties the plan: no stale batch can run.
  AttentionShape bad = c.shape();
  bad.num_q_heads = 3;
  EXPECT_FALSE(
      engine.attention->Plan(c.batch(), bad, c.view(), {}, &plan).ok());
  EXPECT_EQ(engine.attention->Run(&plan, c.view(), 0, tensors).code(),
            StatusCode::kFailedPrecondition);
}

TEST(AttentionCreateTest, AnUnknownTargetIsRefusedWithTheOnesThereAre) {
  RuntimeOptions options;
  options.num_threads = 1;
  options.simd_target = "AVX9";
  auto runtime = Runtime::Create(options);
  VARLANE_ASSERT_OK(runtime);
  auto attention = Attention::Create(runtime->get());
  ASSERT_FALSE(attention.ok());
  EXPECT_EQ(attention.status().code(), StatusCode::kNotFound);
  EXPECT_NE(attention.status().message().find(SupportedSimdTargets().front()),
            std::string::npos);
}

}  // namespace
}  // namespace varlane::testing
