// Error bounds by precision family, derived, never tuned to pass.
//
// A row's output is sum_t w_t v_t with sum w = 1. Against fp64 on the same
// rounded inputs the kernel differs by
//   - rounding of p to bf16 (bf16 cache): each term by 2^-8 of |w v|
//   - exp2 with its roundings: 3.6e-6 (bf16 cache) or 1.2e-7 of each term
//   - the fp32 dot product: D roundings of 2^-24 of sum |q k| each, an absolute
//     error e in the exponent, hence e of each term
//   - fp32 accumulation over the context: a random walk, far below the above
// so |error| <= c x sum_t w_t |v_t| (+ rounding of the output itself).
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_TOLERANCE_H_
#define VARLANE_TESTS_TESTING_TOLERANCE_H_

#include <cmath>

#include "varlane/dtype.h"

namespace varlane::testing {

// c above, for |scores| of at most `largest_score` (natural units).
inline double OutputBound(DType kv_dtype, int head_size, double largest_score) {
  const double dot = 2.0 * std::sqrt(double(head_size)) * std::ldexp(1.0, -24) *
                     (largest_score + 8.0);
  const double p = kv_dtype == DType::kBF16 ? std::ldexp(1.0, -8) + 6e-6 : 4e-7;
  return p + 2.0 * dot + 1e-6;
}

// What score modifiers add to c: an absolute error of a score is one of its
// weight. The softcap's tanh is good to 1e-7 of the cap, twice that with its
// argument's rounding; a slope and a product with it are rounded once each, as
// is a sink.
inline double ModifierBound(double softcap, double alibi, double sink) {
  return 2.0 * (2e-7 * softcap +
                std::ldexp(1.0, -23) * (std::abs(alibi) + std::abs(sink)));
}

// Relative rounding of an output element.
inline double OutputRounding(DType out_dtype) {
  switch (out_dtype) {
    case DType::kF32:
      return std::ldexp(1.0, -23);
    case DType::kBF16:
      return std::ldexp(1.0, -8);
    case DType::kF16:
      return std::ldexp(1.0, -10);
  }
  return 0;
}

// Absolute rounding: f16 has denormals 2^-24 apart, the others reach far below
// anything seen; the kernels flush fp32 denormals.
inline double OutputFloor(DType out_dtype) {
  return out_dtype == DType::kF16 ? std::ldexp(1.0, -25) : 1e-30;
}

// Log-sum-exp: absolute, natural units. Dropping 16 of 8192 keys shows as 2e-3.
inline double LseBound(double lse) { return 1e-4 + 1e-6 * std::abs(lse); }

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_TOLERANCE_H_
