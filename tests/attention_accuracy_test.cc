// How far from fp64 the kernels are, beside a plain fp32 attention on the same
// rounded inputs: rounding of what is stored is not an error of ours.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/reference.h"

namespace varlane::testing {
namespace {

// Errors in units of sum_t p_t |v_t|, over all elements.
struct Errors {
  double max = 0;
  double squares = 0;
  int64_t count = 0;
  double lse = 0;  // largest, absolute

  void Add(double got, double want, double unit) {
    const double error = std::abs(got - want) / unit;
    max = std::max(max, error);
    squares += error * error;
    ++count;
  }
  double rms() const { return std::sqrt(squares / double(count)); }
};

// The textbook in fp32: two passes over the scores, sums in order.
float NaiveAttention(const std::vector<float>& q, const std::vector<float>& k,
                     const std::vector<float>& v, size_t keys, float scale,
                     std::vector<float>* out) {
  std::vector<float> p(keys);
  float max = -INFINITY;
  for (size_t t = 0; t < keys; ++t) {
    for (size_t d = 0; d < q.size(); ++d) p[t] += q[d] * k[t * q.size() + d];
    p[t] *= scale;
    max = std::max(max, p[t]);
  }
  float sum = 0;
  for (float& x : p) sum += x = std::exp(x - max);
  std::fill(out->begin(), out->end(), 0.0f);
  for (size_t t = 0; t < keys; ++t) {
    for (size_t d = 0; d < out->size(); ++d) {
      (*out)[d] += p[t] / sum * v[t * out->size() + d];
    }
  }
  return max + std::log(sum);
}

struct Table {
  Errors ours;
  Errors naive;
};

Table Measure(DType kv_dtype, int context) {
  CaseSpec spec;
  spec.kv_dtype = kv_dtype;
  spec.q_heads = 4;
  spec.kv_heads = 1;
  spec.head_size = 128;
  spec.seqs = {{8, context}};
  const AttentionCase c(spec);
  const Output output = c.Run(*EnginesOfAllTargets().front().attention);
  const auto d_size = size_t(spec.head_size);
  std::vector<double> k(size_t(context) * d_size);
  std::vector<double> v(k.size());
  for (int pos = 0; pos < context; ++pos) {
    c.LoadToken(0, pos, 0, std::span(k).subspan(size_t(pos) * d_size, d_size),
                std::span(v).subspan(size_t(pos) * d_size, d_size));
  }
  const std::vector<float> k32(k.begin(), k.end());
  const std::vector<float> v32(v.begin(), v.end());
  std::vector<double> q(d_size);
  std::vector<double> want(d_size);
  std::vector<double> unit(d_size);
  std::vector<float> naive(d_size);
  const double scale = 1.0 / std::sqrt(spec.head_size);
  Table table;
  for (int i = 0; i < 8; ++i) {
    for (int h = 0; h < spec.q_heads; ++h) {
      for (int d = 0; d < spec.head_size; ++d) q[size_t(d)] = c.Q(i, h, d);
      ReferenceRow row = {
          q, k.data(), v.data(), c.Limit(0, i), spec.head_size, scale};
      const double lse = ReferenceAttention(row, want, unit);
      const std::vector<float> q32(q.begin(), q.end());
      const float naive_lse =
          NaiveAttention(q32, k32, v32, size_t(row.num_keys),
                         static_cast<float>(scale), &naive);
      const auto at = size_t(i * spec.q_heads + h);
      for (size_t d = 0; d < d_size; ++d) {
        table.ours.Add(output.out[at * d_size + d], want[d], unit[d]);
        table.naive.Add(naive[d], want[d], unit[d]);
      }
      table.ours.lse = std::max(table.ours.lse, std::abs(output.lse[at] - lse));
      table.naive.lse = std::max(table.naive.lse, std::abs(naive_lse - lse));
    }
  }
  return table;
}

// f32 and f16 caches are computed in fp32 throughout; the factor leaves room
// for our exp2 (1.2e-7 with its roundings) beside the library's exp. A bf16
// cache adds the rounding of p to bf16: at most 2^-9 of each term, and their
// walk averages out.
TEST(AccuracyTest, ErrorsAreThoseOfTheStorageType) {
  std::printf(
      "| cache | context | max | rms | lse | naive fp32: max | rms | lse |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int context : {128, 1024, 8192}) {
      // How long it sums shows nothing that a sanitizer looks for.
      if (kSanitized && context > 1024) continue;
      const auto [ours, naive] = Measure(dtype, context);
      std::printf("| %s | %d | %.1e | %.1e | %.1e | %.1e | %.1e | %.1e |\n",
                  DTypeName(dtype), context, ours.max, ours.rms(), ours.lse,
                  naive.max, naive.rms(), naive.lse);
      SCOPED_TRACE(std::string(DTypeName(dtype)) + " at context " +
                   std::to_string(context));
      if (dtype == DType::kBF16) {
        EXPECT_LE(ours.max, std::ldexp(1.0, -9) + 1e-5);
      } else {
        EXPECT_LE(ours.max, 2.0 * naive.max);
        EXPECT_LE(ours.rms(), 2.0 * naive.rms());
      }
      EXPECT_LE(ours.lse, 1e-5);
    }
  }
}

}  // namespace
}  // namespace varlane::testing
