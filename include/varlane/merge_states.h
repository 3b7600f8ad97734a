// MergeStates: attention over the union of disjoint key sets, from attention
// over each of them.
//
// Where keys are split - a prefix shared by many requests, a context spread
// over machines, a cache of two dtypes - run attention on each part with `lse`
// wanted and merge. Layer 3.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MERGE_STATES_H_
#define VARLANE_MERGE_STATES_H_

#include <cstdint>
#include <span>

#include "varlane/dtype.h"
#include "varlane/export.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// The result of attention over some of the keys, as AttentionTensors has it; a
// row is one (query token, query head). A row whose lse is -inf is empty: its
// out is not read and changes nothing.
struct AttentionState {
  const void* out = nullptr;   // [num_rows, v_head_size]
  DType dtype = DType::kF32;   // of out: f32, bf16 or f16
  int64_t row_stride = 0;      // elements; 0 = v_head_size
  const float* lse = nullptr;  // [num_rows], natural logarithm
};

struct MergedState {
  void* out = nullptr;
  DType dtype = DType::kF32;
  int64_t row_stride = 0;
  float* lse = nullptr;  // null = not wanted
};

// Combines `states`, at least one, row by row, in index order:
//
//   lse = log sum_i exp(lse_i)      out = sum_i exp(lse_i - lse) out_i
//
// in fp32. One state that is not empty comes out as it went in (denormals count
// as zero); only empty ones give 0 and -inf. NaN surfaces: in an lse, in the
// whole row; in an out, in its element. So does an lse of +inf, as NaN. A sink
// belongs to one of the states only.
//
// `merged` may be one of the states, with the same dtype and stride; otherwise
// it must not overlap them. The same bits for any number of workers and on
// every target with FMA.
//
// Errors: kInvalidArgument naming argument and value; kNotFound for an unknown
//         RuntimeOptions::simd_target; kResourceExhausted; kAborted as Launch.
// Cost:   each state is read once, spread over the workers by rows.
// Threads: any, on different outputs.
VARLANE_EXPORT Status MergeStates(Runtime* runtime,
                                  std::span<const AttentionState> states,
                                  int64_t num_rows, int v_head_size,
                                  const MergedState& merged);

}  // namespace varlane

#endif  // VARLANE_MERGE_STATES_H_
