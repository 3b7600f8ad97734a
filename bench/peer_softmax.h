// The GEMM peer's softmax, with AVX-512 or, in f32, AVX2.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BENCH_PEER_SOFTMAX_H_
#define VARLANE_BENCH_PEER_SOFTMAX_H_

#include <cstdint>

#include "varlane/dtype.h"

namespace varlane::bench {

// Whether this CPU can, with weights of `dtype` (f32 or bf16).
bool CanSoftmax(DType dtype);

// 2^(scale_log2 x (score - max)) of the first `visible` of `length` scores, 0
// beyond them, to `to`, which may be the scores; returns the sum.
// Requires: CanSoftmax of the weights' dtype.
float SoftmaxRow(const float* scores, int64_t visible, int64_t length,
                 float scale_log2, float* to);
float SoftmaxRow(const float* scores, int64_t visible, int64_t length,
                 float scale_log2, BF16* to);

}  // namespace varlane::bench

#endif  // VARLANE_BENCH_PEER_SOFTMAX_H_
