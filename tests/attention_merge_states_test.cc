// MergeStates: attention over parts of the keys, merged, is attention over all.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/merge_states.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"

namespace varlane::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// --- split attention ---------------------------------------------------------

// Attention over some keys of a case: other lengths, tables and masks.
struct Part {
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> tables;
  std::vector<SequenceMask> masks;
  std::vector<std::byte> out;
  std::vector<float> lse;
};

void RunPart(const AttentionCase& c, const Attention& attention, DType dtype,
             bool with_sinks, Part* part) {
  const CaseSpec& spec = c.spec();
  Batch batch = c.batch();
  batch.seq_lens = part->seq_lens;
  if (!part->tables.empty()) batch.block_tables = part->tables;
  batch.masks = part->masks;
  AttentionPlan plan;
  VARLANE_ASSERT_OK(attention.Plan(batch, c.shape(), c.view(), {}, &plan));
  const auto rows = size_t(spec.total_q() * spec.q_heads);
  part->out.resize(rows * size_t(spec.v_size()) * SizeOf(dtype));
  part->lse.resize(rows);
  AttentionTensors tensors;
  tensors.q = c.q();
  tensors.out = {part->out.data(), dtype};
  tensors.lse = part->lse.data();
  if (with_sinks) tensors.sinks = spec.sinks.data();
  VARLANE_ASSERT_OK(attention.Run(&plan, c.view(), 0, tensors));
}

Output Merge(const CaseSpec& spec, Runtime* runtime,
             const std::vector<Part>& parts, DType dtype) {
  std::vector<AttentionState> states;
  for (const Part& part : parts) {
    states.push_back({part.out.data(), dtype, 0, part.lse.data()});
  }
  Output merged;
  const int64_t rows = spec.total_q() * spec.q_heads;
  merged.out.assign(size_t(rows * spec.v_size()), kNaN);
  merged.lse.assign(size_t(rows), kNaN);
  VARLANE_EXPECT_OK(
      MergeStates(runtime, states, rows, spec.v_size(),
                  {merged.out.data(), DType::kF32, 0, merged.lse.data()}));
  return merged;
}

CaseSpec SplitSpec(DType kv_dtype) {
  CaseSpec spec;
  spec.kv_dtype = kv_dtype;
  spec.q_heads = 6;
  spec.kv_heads = 2;
  spec.head_size = 64;
  spec.v_head_size = 40;
  // The history of the third has no block to give, of the fourth one: their
  // other parts are empty.
  spec.seqs = {{1, 1100}, {9, 300}, {30, 30}, {2, 20}, {0, 50}};
  return spec;
}

// Cuts the history, i.e. the keys that all rows see, into blocks' table rows;
// the last part is causal.
std::vector<Part> CutHistory(AttentionCase& c, int num_parts) {
  const CaseSpec& spec = c.spec();
  const auto stride = size_t(c.batch().block_table_stride);
  std::vector<Part> parts(static_cast<size_t>(num_parts));
  for (Part& part : parts) part.tables.assign(c.block_tables().size(), -1);
  for (size_t s = 0; s < spec.seqs.size(); ++s) {
    const int blocks =
        (spec.seqs[s].kv_len - spec.seqs[s].q_len) / spec.block_size;
    for (int j = 0; j < num_parts; ++j) {
      const bool last = j + 1 == num_parts;
      const int begin = blocks * j / (num_parts - 1);
      const int end = blocks * (j + 1) / (num_parts - 1);
      Part& part = parts[size_t(j)];
      const int first = last ? blocks : begin;
      part.seq_lens.push_back(last ? spec.seqs[s].kv_len -
                                         blocks * spec.block_size
                                   : (end - begin) * spec.block_size);
      part.masks.push_back({.causal = last});
      const auto row = c.block_tables().begin() + std::ptrdiff_t(s * stride);
      std::copy(row + first, row + std::ptrdiff_t(stride),
                part.tables.begin() + std::ptrdiff_t(s * stride));
    }
  }
  return parts;
}

class SplitTest : public ::testing::TestWithParam<DType> {};

TEST_P(SplitTest, PartsOfTheBlockTableMergeToTheWhole) {
  const Engine engine = MakeEngine(2);
  AttentionCase c(SplitSpec(GetParam()));
  for (int num_parts = 2; num_parts <= 5; ++num_parts) {
    std::vector<Part> parts = CutHistory(c, num_parts);
    int empty = 0;
    for (Part& part : parts) {
      RunPart(c, *engine.attention, DType::kF32, false, &part);
      empty += std::count(part.lse.begin(), part.lse.end(), -kInf) > 0;
    }
    EXPECT_GT(empty, 0) << "no part was empty for any row";
    c.ExpectMatchesReference(
        Merge(c.spec(), engine.runtime.get(), parts, DType::kF32));
    if (HasFailure()) return;
  }
}

TEST_P(SplitTest, StatesOfSixteenBitsMergeWithinTheirRounding) {
  const Engine engine = MakeEngine(2);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    CaseSpec spec = SplitSpec(GetParam());
    spec.out_dtype = dtype;
    AttentionCase c(spec);
    std::vector<Part> parts = CutHistory(c, 3);
    for (Part& part : parts) RunPart(c, *engine.attention, dtype, false, &part);
    const Output merged = Merge(spec, engine.runtime.get(), parts, dtype);
    const Output whole = c.Run(*engine.attention);
    double largest = 0;
    for (const float x : whole.out) {
      largest = std::max(largest, double(std::abs(x)));
    }
    const double ulp = std::ldexp(1.0, dtype == DType::kBF16 ? -8 : -11);
    for (size_t i = 0; i < whole.out.size(); ++i) {
      // One rounding of the whole, one of each part, and the weights of the
      // parts sum to one.
      ASSERT_NEAR(
          merged.out[i], whole.out[i],
          2 * ulp * (largest + 4) + (GetParam() == DType::kBF16 ? 0.02 : 1e-4));
    }
  }
}

// Slices of the window by distance from the row: [first, end) keys back.
TEST_P(SplitTest, SlicesOfAWindowMergeToTheWindow) {
  const Engine engine = MakeEngine(2);
  CaseSpec spec = SplitSpec(GetParam());
  constexpr int kWindow = 150;
  spec.masks.assign(spec.seqs.size(), {.window_left = kWindow - 1});
  const AttentionCase c(spec);
  for (const std::vector<int>& cuts :
       {std::vector<int>{0, 1, kWindow}, std::vector<int>{0, 20, 64, kWindow},
        std::vector<int>{0, 3, 16, 17, 19, kWindow}}) {
    std::vector<Part> parts;
    for (size_t j = 0; j + 1 < cuts.size(); ++j) {
      Part part;
      for (const SeqSpec& seq : spec.seqs) {
        part.seq_lens.push_back(std::max(0, seq.kv_len - cuts[j]));
        part.masks.push_back({.window_left = cuts[j + 1] - cuts[j] - 1});
        // Where there are fewer keys than that, none are in the slice.
        if (seq.kv_len < cuts[j]) {
          part.masks.back() = {.causal = false};
          part.seq_lens.back() = 0;
        }
      }
      RunPart(c, *engine.attention, DType::kF32, false, &part);
      parts.push_back(std::move(part));
    }
    c.ExpectMatchesReference(
        Merge(spec, engine.runtime.get(), parts, DType::kF32));
    if (HasFailure()) return;
  }
}

TEST_P(SplitTest, ASinkOfOnePartCountsOnce) {
  const Engine engine = MakeEngine(2);
  CaseSpec spec = SplitSpec(GetParam());
  spec.sinks = {0.5F, -1, 3, 8, 0, 2};
  AttentionCase c(spec);
  std::vector<Part> parts = CutHistory(c, 4);
  for (size_t j = 0; j < parts.size(); ++j) {
    RunPart(c, *engine.attention, DType::kF32, j == 1, &parts[j]);
  }
  c.ExpectMatchesReference(
      Merge(spec, engine.runtime.get(), parts, DType::kF32));
}

INSTANTIATE_TEST_SUITE_P(KvTypes, SplitTest, ::testing::ValuesIn(kDTypes),
                         DTypeParam);

// --- states made here --------------------------------------------------------

// Rows of random values around an lse of a few units.
struct Rows {
  DType dtype = DType::kF32;
  int64_t stride = 0;
  int size = 0;
  std::vector<std::byte> out;
  std::vector<float> lse;

  double at(int64_t row, int dim) const {
    return LoadElement(out.data(), dtype, row * stride + dim);
  }
  void set(int64_t row, int dim, double value) {
    StoreElement(out.data(), dtype, row * stride + dim, value);
  }
  AttentionState state() const {
    return {out.data(), dtype, stride, lse.data()};
  }
};

Rows MakeRows(int64_t rows, int size, DType dtype, uint64_t seed,
              int64_t padding = 0) {
  Rows r;
  r.dtype = dtype;
  r.size = size;
  r.stride = size + padding;
  r.out.assign(size_t(rows * r.stride) * SizeOf(dtype), std::byte{0xff});
  for (int64_t i = 0; i < rows; ++i) {
    r.lse.push_back(float(4 * RandomValue(seed, uint64_t(i), 1, 2, 3)));
    for (int d = 0; d < size; ++d) {
      r.set(i, d, RandomValue(seed, uint64_t(i), uint64_t(d), 5, 6));
    }
  }
  return r;
}

struct Merged {
  std::vector<float> out;
  std::vector<float> lse;
};

Merged MergeRows(Runtime* runtime, const std::vector<Rows>& parts) {
  std::vector<AttentionState> states;
  for (const Rows& part : parts) states.push_back(part.state());
  const auto rows = int64_t(parts[0].lse.size());
  const int size = parts[0].size;
  Merged m;
  m.out.assign(size_t(rows * size), kNaN);
  m.lse.assign(size_t(rows), kNaN);
  VARLANE_EXPECT_OK(MergeStates(runtime, states, rows, size,
                                {m.out.data(), DType::kF32, 0, m.lse.data()}));
  return m;
}

void ExpectSame(const Merged& a, const Merged& b, const std::string& what) {
  ExpectSameBits({a.out, a.lse, {}}, {b.out, b.lse, {}}, what);
}

void ExpectClose(const Merged& a, const Merged& b, double tolerance) {
  ASSERT_EQ(a.out.size(), b.out.size());
  for (size_t i = 0; i < a.out.size(); ++i) {
    ASSERT_NEAR(a.out[i], b.out[i], tolerance) << i;
  }
  for (size_t i = 0; i < a.lse.size(); ++i) {
    ASSERT_NEAR(a.lse[i], b.lse[i], tolerance) << i;
  }
}

// Any number of states, sizes that fill no vector, strides, types: against
// fp64, on every target.
TEST(MergeStatesTest, AgreesWithDoublePrecision) {
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const int size : {1, 7, 64, 128, 573}) {
      for (const int num_states : {1, 2, 5, 9}) {
        constexpr int64_t kRows = 70;
        std::vector<Rows> parts;
        for (int i = 0; i < num_states; ++i) {
          parts.push_back(
              MakeRows(kRows, size, kDTypes[i % 3], uint64_t(i + 1), i));
          parts.back().lse[size_t(i)] = -kInf;
          parts.back().lse[size_t(20 + i)] = 80.0F * float(i % 2 * 2 - 1);
        }
        const Merged m = MergeRows(engine.runtime.get(), parts);
        for (int64_t row = 0; row < kRows; ++row) {
          double sum = 0;
          for (const Rows& part : parts) {
            sum += std::exp(double(part.lse[size_t(row)]));
          }
          if (sum == 0) continue;
          ASSERT_NEAR(m.lse[size_t(row)], std::log(sum), 1e-5);
          for (int d = 0; d < size; ++d) {
            double want = 0;
            for (const Rows& part : parts) {
              const float lse = part.lse[size_t(row)];
              if (lse != -kInf) {
                want += std::exp(double(lse)) / sum * part.at(row, d);
              }
            }
            ASSERT_NEAR(m.out[size_t(row * size + d)], want, 4e-6)
                << engine.attention->simd_target() << " size " << size
                << " row " << row << " dim " << d;
          }
        }
      }
    }
  }
}

TEST(MergeStatesTest, EmptyStatesAreTheIdentityBitForBit) {
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const DType dtype : kDTypes) {
      Rows whole = MakeRows(50, 72, dtype, 3);
      whole.set(4, 7, -0.0);
      Rows empty = MakeRows(50, 72, DType::kF32, 4);
      std::fill(empty.lse.begin(), empty.lse.end(), -kInf);
      for (int d = 0; d < 72; ++d) empty.set(11, d, kNaN);  // never read
      Merged want;
      for (int64_t row = 0; row < 50; ++row) {
        for (int d = 0; d < 72; ++d)
          want.out.push_back(float(whole.at(row, d)));
      }
      want.lse = whole.lse;
      Runtime* runtime = engine.runtime.get();
      ExpectSame(want, MergeRows(runtime, {whole}), "alone");
      ExpectSame(want, MergeRows(runtime, {empty, whole}), "after an empty");
      ExpectSame(want, MergeRows(runtime, {whole, empty}), "before an empty");
      ExpectSame(want, MergeRows(runtime, {empty, empty, whole, empty}),
                 "amid");
    }
  }
}

TEST(MergeStatesTest, OnlyEmptyStatesGiveZeroAndMinusInfinity) {
  const Engine engine = MakeEngine(1);
  Rows empty = MakeRows(3, 40, DType::kBF16, 4);
  std::fill(empty.lse.begin(), empty.lse.end(), -kInf);
  for (int d = 0; d < 40; ++d) empty.set(1, d, kNaN);
  const Merged m = MergeRows(engine.runtime.get(), {empty, empty});
  for (const float x : m.out) {
    ASSERT_EQ(std::bit_cast<uint32_t>(x), 0u);
  }
  for (const float x : m.lse) ASSERT_EQ(x, -kInf);
}

TEST(MergeStatesTest, MergingIsAssociativeAndCommutativeWithinRounding) {
  const Engine engine = MakeEngine(2);
  Runtime* runtime = engine.runtime.get();
  const Rows a = MakeRows(40, 128, DType::kF32, 1);
  const Rows b = MakeRows(40, 128, DType::kF32, 2);
  const Rows c = MakeRows(40, 128, DType::kF32, 3);
  const auto as_rows = [&](const Merged& m) {
    Rows r = a;
    for (int64_t row = 0; row < 40; ++row) {
      for (int d = 0; d < 128; ++d) {
        r.set(row, d, m.out[size_t(row * 128 + d)]);
      }
    }
    r.lse = m.lse;
    return r;
  };
  const Merged all = MergeRows(runtime, {a, b, c});
  ExpectClose(all, MergeRows(runtime, {as_rows(MergeRows(runtime, {a, b})), c}),
              3e-6);
  ExpectClose(all, MergeRows(runtime, {a, as_rows(MergeRows(runtime, {b, c}))}),
              3e-6);
  ExpectClose(all, MergeRows(runtime, {c, a, b}), 3e-6);
  ExpectClose(all, MergeRows(runtime, {b, c, a}), 3e-6);
}

TEST(MergeStatesTest, WorkersAndTargetsChangeNoBit) {
  std::vector<Rows> parts;
  for (int i = 0; i < 5; ++i) {
    parts.push_back(MakeRows(333, 120, kDTypes[i % 3], uint64_t(i + 1)));
  }
  const Merged one = MergeRows(MakeEngine(1).runtime.get(), parts);
  ExpectSame(one, MergeRows(MakeEngine(4).runtime.get(), parts), "4 workers");
  for (const Engine& engine : EnginesOfAllTargets()) {
    const char* name = engine.attention->simd_target();
    ExpectSame(one, MergeRows(engine.runtime.get(), parts), name);
  }
}

TEST(MergeStatesTest, NaNSurfacesWhereItStands) {
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (size_t at = 0; at < 3; ++at) {
      std::vector<Rows> parts;
      for (uint64_t i = 0; i < 3; ++i) {
        parts.push_back(MakeRows(5, 40, DType::kF32, i + 1));
      }
      parts[at].lse[0] = kNaN;
      parts[at].lse[1] = kInf;
      parts[at].set(2, 33, kNaN);
      // Among empty ones, too.
      for (Rows& part : parts) part.lse[3] = -kInf;
      parts[at].lse[3] = kNaN;
      const Merged m = MergeRows(engine.runtime.get(), parts);
      EXPECT_TRUE(std::isnan(m.lse[0]));
      EXPECT_TRUE(std::isnan(m.lse[1]));
      EXPECT_TRUE(std::isfinite(m.lse[2]));
      EXPECT_TRUE(std::isnan(m.lse[3]));
      EXPECT_TRUE(std::isfinite(m.lse[4]));
      for (int d = 0; d < 40; ++d) {
        EXPECT_TRUE(std::isnan(m.out[size_t(d)])) << "NaN lse " << d;
        EXPECT_TRUE(std::isnan(m.out[size_t(40 + d)])) << "inf lse " << d;
        EXPECT_EQ(std::isnan(m.out[size_t(80 + d)]), d == 33) << d;
        EXPECT_TRUE(std::isnan(m.out[size_t(120 + d)])) << "alone " << d;
        EXPECT_FALSE(std::isnan(m.out[size_t(160 + d)])) << d;
      }
    }
  }
}

TEST(MergeStatesTest, MergesInPlaceAndRoundsToTheOutputsType) {
  const Engine engine = MakeEngine(2);
  const Rows a = MakeRows(100, 64, DType::kBF16, 1, 5);
  const Rows b = MakeRows(100, 64, DType::kF32, 2);
  const Merged want = MergeRows(engine.runtime.get(), {a, b});
  Rows in_place = a;
  const AttentionState states[] = {in_place.state(), b.state()};
  VARLANE_ASSERT_OK(MergeStates(
      engine.runtime.get(), states, 100, 64,
      {in_place.out.data(), DType::kBF16, 69, in_place.lse.data()}));
  for (int64_t row = 0; row < 100; ++row) {
    for (int d = 0; d < 64; ++d) {
      ASSERT_EQ(in_place.at(row, d),
                Rounded(want.out[size_t(row * 64 + d)], DType::kBF16));
    }
    for (int d = 64; d < 69; ++d) {  // between the rows
      ASSERT_EQ(
          std::memcmp(&in_place.out[size_t(row * 69 + d) * 2], "\xff\xff", 2),
          0);
    }
  }
  EXPECT_EQ(in_place.lse, want.lse);
}

TEST(MergeStatesTest, RefusalsNamePlaceAndValue) {
  const Engine engine = MakeEngine(1);
  Runtime* runtime = engine.runtime.get();
  Rows a = MakeRows(2, 8, DType::kF32, 1);
  std::vector<float> out(16);
  const MergedState to = {out.data(), DType::kF32, 0, nullptr};
  const auto refusal = [&](std::vector<AttentionState> states, int64_t rows,
                           int size, const MergedState& merged) {
    const Status status = MergeStates(runtime, states, rows, size, merged);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(refusal({}, 2, 8, to), "states is empty, must have at least 1");
  EXPECT_EQ(refusal({a.state()}, -2, 8, to),
            "num_rows = -2, must not be negative");
  EXPECT_EQ(refusal({a.state()}, 2, 0, to),
            "v_head_size = 0, must be in [1, 576]");
  EXPECT_EQ(refusal({a.state(), {a.out.data(), DType::kF32, 7, a.lse.data()}},
                    2, 8, to),
            "states[1].row_stride = 7, must be 0 or at least v_head_size = 8");
  EXPECT_EQ(refusal({{nullptr, DType::kF32, 0, a.lse.data()}}, 2, 8, to),
            "states[0].out is null");
  EXPECT_EQ(refusal({{a.out.data(), DType::kF32, 0, nullptr}}, 2, 8, to),
            "states[0].lse is null");
  EXPECT_EQ(refusal({a.state()}, 2, 8, {}), "merged.out is null");
  EXPECT_EQ(MergeStates(nullptr, {}, 2, 8, to).message(), "runtime is null");
  VARLANE_EXPECT_OK(
      MergeStates(runtime, std::vector{AttentionState{}}, 0, 8, MergedState{}));
}

}  // namespace
}  // namespace varlane::testing
