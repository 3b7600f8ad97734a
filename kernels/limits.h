// What this CPU can do at most: plain reads, and multiplies in registers.
//
// The yardsticks that kernels are held against; no Highway here.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KERNELS_LIMITS_H_
#define VARLANE_KERNELS_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace varlane {

// Chunks of one size to read whole, each at its own place.
struct ReadArgs {
  const std::byte* const* chunks = nullptr;  // [num_chunks], 64-byte aligned
  int64_t num_chunks = 0;
  int64_t chunk_bytes = 0;  // a multiple of 64
  int streams = 1;          // chunks read side by side: 1, 2, 4 or 8
  int prefetch = 0;         // fetch the chunks `streams` further on meanwhile
                            // into L1 or L2; 0 = do not
};

struct LimitKernels {
  // Reads every byte; the result depends on all of them.
  uint32_t (*read)(const ReadArgs& args);
  // `steps` rounds of fused multiply-adds with all operands in registers;
  // returns the flops done (2 a multiply-add), adds something to *sink.
  int64_t (*multiply_f32)(int64_t steps, float* sink);
  int64_t (*multiply_bf16)(int64_t steps, float* sink);  // two products a lane
  // The same of a register tile, whose steps load what they multiply from L1;
  // after every `weigh_steps`, 0 = never, an exponential of each sum.
  int64_t (*fed_f32)(int64_t steps, int64_t weigh_steps, float* sink);
  int64_t (*fed_bf16)(int64_t steps, int64_t weigh_steps, float* sink);
  int bf16_pack;  // products of a row and a key in one step of fed_bf16
};

}  // namespace varlane

#endif  // VARLANE_KERNELS_LIMITS_H_
