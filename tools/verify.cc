// Verification of attention rows against the fp64 reference.
//
// The bound. Inputs are exact in the cache's dtype (callers round them), so
// with u = 2^-24, relative to sum_t p_t |v_t| an output element is off by
//
//   P rounding   bf16 KV: P is rounded to bf16 for P.V, relative error at most
//                2^-8 each, while the sum of weights is not rounded: 2^-8.
//   exp2         with its roundings at most 3.6e-6 (bf16) or 1.2e-7 of each p;
//                once in p, once in the sum of p: taken as 2 x 4e-6 resp.
//                2 x 1e-6.
//   scores       fp32 dots in one chain of D fused adds. A score moves p by
//                its absolute error e^de - 1 ~ de, in numerator and sum: 2 de.
//                Worst-case errors grow with D, real ones with sqrt(D): Higham
//                and Mary, "A New Approach to Probabilistic Rounding Error
//                Analysis" (2019), lambda sqrt(D) u. Errors of one add have a
//                deviation of about 0.4 u of a partial sum that grows at most
//                linearly, so a chain of n has 0.4 / sqrt(3) sqrt(n) u: lambda
//                = 4 is 17 of those and leaves room for errors that are not
//                independent (equal inputs). sum |q_d k_d| <= |q| |k|, and 4 u
//                more for scaling and the subtraction of the maximum.
//   modifiers    a softcap's tanh is good to 4e-7 of itself, its argument and
//                the products around it to 6 u: 8e-7 of the capped score, which
//                is at most the cap and at most the score. It passes on no
//                more than the score's own error: its slope is at most one. An
//                ALiBi slope is rounded twice, its product's sum once, and the
//                difference to the maximum once; a sink likewise: 4 u of each.
//   P.V and sum  chains over the keys: lambda sqrt(num_keys) u each.
//   division     and the final rounding to fp32: 4 u.
//
// At head size 128 and 1000 keys with N(0, 1) data that is 4e-3 for bf16 and
// 8e-5 for f32; one missing key of 1000 moves an element by about 1e-3.
// SPDX-License-Identifier: Apache-2.0

#include "tools/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace varlane::tools {
namespace {

constexpr double kUnit = 0x1p-24;
constexpr double kLambda = 4;
// Weights below 2^-126 are flushed to zero: far below any rounding, but a row
// whose sum p |v| is zero must still be allowed nothing but this.
constexpr double kTiny = 1e-30;

// Equal where a difference would be NaN.
bool SameNonFinite(double a, double b) {
  return (std::isinf(a) && a == b) || (std::isnan(a) && std::isnan(b));
}

}  // namespace

double RowErrorFactor(const RowPrecision& precision, int64_t head_size,
                      int64_t num_keys) {
  const bool bf16 = precision.kv_dtype == DType::kBF16;
  const double rounding_of_p = bf16 ? 0x1p-8 : 0;
  const double exp2 = 2 * (bf16 ? 4e-6 : 1e-6);
  const double score =
      2 * precision.max_abs_score * kUnit *
      (kLambda * std::sqrt(static_cast<double>(head_size)) + 4);
  const double modifiers =
      2 * (8e-7 * std::min(precision.softcap, precision.max_abs_score) +
           4 * kUnit * precision.max_abs_bias);
  const double sums =
      2 * kLambda * std::sqrt(static_cast<double>(num_keys)) * kUnit;
  return rounding_of_p + exp2 + score + modifiers + sums + 4 * kUnit;
}

void VerifyResult::Merge(const VerifyResult& other) {
  rows += other.rows;
  failed_rows += other.failed_rows;
  worst_ratio = std::max(worst_ratio, other.worst_ratio);
  worst_error = std::max(worst_error, other.worst_error);
  worst_lse_error = std::max(worst_lse_error, other.worst_lse_error);
  if (first_failure.empty()) first_failure = other.first_failure;
}

void RowVerifier::Check(const ReferenceRow& row, const RowPrecision& precision,
                        std::span<const float> out, const float* lse,
                        const std::string& place) {
  expected_.resize(out.size());
  magnitude_.resize(out.size());
  const double expected_lse = ReferenceAttention(row, expected_, magnitude_);
  const double factor = RowErrorFactor(
      precision, static_cast<int64_t>(row.q.size()), row.num_keys);
  std::string failure;
  for (size_t d = 0; d < out.size(); ++d) {
    // Inputs that hold NaN or Inf: the same NaN is the right answer.
    if (std::isnan(expected_[d]) && std::isnan(out[d])) continue;
    const double error = std::abs(static_cast<double>(out[d]) - expected_[d]);
    const double bound = factor * magnitude_[d] + kTiny;
    // Not "error > bound": a NaN must fail.
    const double ratio = error <= std::numeric_limits<double>::max()
                             ? error / bound
                             : std::numeric_limits<double>::infinity();
    result_.worst_ratio = std::max(result_.worst_ratio, ratio);
    if (std::isfinite(error)) {
      result_.worst_error = std::max(result_.worst_error, error);
    }
    if (ratio > 1 && failure.empty()) {
      failure = fmt::format(
          "{}: out[{}] = {}, the reference says {} (off by {:.3g}, allowed "
          "{:.3g})",
          place, d, out[d], expected_[d], error, bound);
    }
  }
  if (lse != nullptr && !SameNonFinite(*lse, expected_lse)) {
    const double error = std::abs(static_cast<double>(*lse) - expected_lse);
    // An infinite answer has no bound: only itself is right, and that is past.
    const double bound =
        std::isfinite(expected_lse) ? 1e-4 + 1e-6 * std::abs(expected_lse) : -1;
    if (std::isfinite(error)) {
      result_.worst_lse_error = std::max(result_.worst_lse_error, error);
    }
    if (!(error <= bound) && failure.empty()) {
      failure = fmt::format("{}: lse = {}, the reference says {}", place, *lse,
                            expected_lse);
    }
  }
  ++result_.rows;
  if (failure.empty()) return;
  ++result_.failed_rows;
  if (result_.first_failure.empty()) result_.first_failure = failure;
}

float RoundTo(DType dtype, float x) {
  switch (dtype) {
    case DType::kF32:
      return x;
    case DType::kBF16:
      return ToFloat(ToBF16(x));
    case DType::kF16:
      return ToFloat(ToF16(x));
  }
  return x;
}

double Norm(std::span<const double> row) {
  double sum = 0;
  for (const double x : row) sum += x * x;
  return std::sqrt(sum);
}

}  // namespace varlane::tools
