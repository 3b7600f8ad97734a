// Verification of attention rows against the fp64 reference, with a bound.
//
// A flat tolerance is blind at long context; the bound here is per element and
// scales with sum_t p_t |v_t|, what rounding errors of that element scale with.
// verify.cc derives it. Log-sum-exps must agree to 1e-4 + 1e-6 |lse|.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_VERIFY_H_
#define VARLANE_TOOLS_VERIFY_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "varlane/dtype.h"
#include "varlane/reference.h"

namespace varlane::tools {

// How a row was computed.
struct RowPrecision {
  DType kv_dtype = DType::kBF16;
  // max over the row's keys of |scale| |q| |k| (Euclidean norms): how large a
  // score can be, hence how much its rounding can move p.
  double max_abs_score = 0;
  double softcap = 0;       // of the scores; 0 = none
  double max_abs_bias = 0;  // the largest |ALiBi term| or |sink| of the row
};

// The factor of sum_t p_t |v_t| in the bound of a row over `num_keys` keys.
double RowErrorFactor(const RowPrecision& precision, int64_t head_size,
                      int64_t num_keys);

struct VerifyResult {
  int64_t rows = 0;
  int64_t failed_rows = 0;
  double worst_ratio = 0;      // error / bound over all elements; fails past 1
  double worst_error = 0;      // the largest absolute error
  double worst_lse_error = 0;  // absolute
  std::string first_failure;   // a sentence; empty when all passed

  bool ok() const { return failed_rows == 0; }
  void Merge(const VerifyResult& other);
};

// Compares rows, adding up. Threads: one verifier a thread.
class RowVerifier {
 public:
  // Recomputes `row` and compares. `place` names the row in a failure.
  // Shapes: out [row.v_head_size]; lse null = not compared.
  void Check(const ReferenceRow& row, const RowPrecision& precision,
             std::span<const float> out, const float* lse,
             const std::string& place);

  const VerifyResult& result() const { return result_; }

 private:
  VerifyResult result_;
  std::vector<double> expected_;
  std::vector<double> magnitude_;
};

// `x` as the KV cache stores it: rounded to nearest even.
float RoundTo(DType dtype, float x);

// The Euclidean norm of a row.
double Norm(std::span<const double> row);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_VERIFY_H_
