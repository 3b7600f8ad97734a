// PaddedAttention: what a padded [B, H, T, D] cache costs. For comparison only.
//
// The baseline that Varlane is measured against, never a part of it: K and V of
// every sequence stand contiguous and padded to the longest, and the whole
// rectangle is computed, padding included. It is no straw man: tiled over keys
// with an online softmax, each K/V tile used by all rows of a group, register
// tiles, on the same pinned workers. fp32.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BENCH_PADDED_BASELINE_H_
#define VARLANE_BENCH_PADDED_BASELINE_H_

#include <cstdint>
#include <span>

#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::bench {

struct PaddedShape {
  int64_t batch = 0;   // B
  int q_heads = 0;     // Hq, a multiple of kv_heads, at most 64 a KV head
  int kv_heads = 0;    // Hkv
  int head_size = 64;  // D, a multiple of 64
  int64_t q_len = 0;   // Tq: query rows of every sequence, padding included
  int64_t kv_len = 0;  // T: keys of every sequence, padding included

  int group() const { return q_heads / kv_heads; }
};

// Sequence b has lens[b] >= 1 keys; its query rows, the real ones first, stand
// at positions first_position[b] + i and see keys up to their own.
struct PaddedTensors {
  const float* q = nullptr;                 // [B, Hq, Tq, D]
  const float* k = nullptr;                 // [B, Hkv, T, D]
  const float* v = nullptr;                 // [B, Hkv, T, D]
  std::span<const int64_t> lens;            // [B]
  std::span<const int64_t> first_position;  // [B]
  float* out = nullptr;                     // [B, Hq, Tq, D]
};

// Computes all B x Hq x Tq rows over the keys that the longest sequence's row
// of the same index sees; keys past a sequence's own are computed and masked.
// Errors: kInvalidArgument for a shape it does not take; those of Launch.
Status PaddedAttention(Runtime* runtime, const PaddedShape& shape,
                       const PaddedTensors& tensors);

}  // namespace varlane::bench

#endif  // VARLANE_BENCH_PADDED_BASELINE_H_
