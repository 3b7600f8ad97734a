// ReferenceAttention: the fp64 oracle, three nested loops and no cleverness.
//
// Shares no code with the kernels. Slow on purpose; for checks only. Layer 0.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_REFERENCE_H_
#define VARLANE_REFERENCE_H_

#include <cstdint>
#include <span>

#include "varlane/export.h"

namespace varlane {

// One query row against contiguous K/V of one kv head.
struct ReferenceRow {
  std::span<const double> q;  // [D]
  const double* k = nullptr;  // [num_keys, D]
  const double* v = nullptr;  // [num_keys, Dv]
  int64_t num_keys = 0;       // keys the row sees: [first_key, num_keys)
  int64_t v_head_size = 0;
  double scale = 1;
  int64_t first_key = 0;         // at most num_keys
  double softcap = 0;            // cap x tanh(score / cap); 0 = none
  double alibi_slope = 0;        // adds slope x (key - position) after the cap
  int64_t position = 0;          // of the row, where there is a slope
  const double* sink = nullptr;  // one more logit without a value, or null
};

// Computes softmax(scale q k^T) v in double precision.
//
// out    [Dv]: the row; 0 where it sees no key.
// bound  [Dv] or empty: sum_t p_t |v_t|, the scale of rounding errors in out.
// Returns the log-sum-exp (natural), the sink included; -inf where there is
// neither a key nor a sink.
VARLANE_EXPORT double ReferenceAttention(const ReferenceRow& row,
                                         std::span<double> out,
                                         std::span<double> bound = {});

}  // namespace varlane

#endif  // VARLANE_REFERENCE_H_
