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
  int64_t num_keys = 0;       // keys the row sees: [0, num_keys)
  int64_t v_head_size = 0;
  double scale = 1;
};

// Computes softmax(scale q k^T) v in double precision.
//
// out    [Dv]: the row; 0 where num_keys == 0.
// bound  [Dv] or empty: sum_t p_t |v_t|, the scale of rounding errors in out.
// Returns the log-sum-exp (natural); -inf where num_keys == 0.
VARLANE_EXPORT double ReferenceAttention(const ReferenceRow& row,
                                         std::span<double> out,
                                         std::span<double> bound = {});

}  // namespace varlane

#endif  // VARLANE_REFERENCE_H_
