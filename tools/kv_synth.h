// Synthetic Q, K and V: a pure function of what a token is and where it stands.
//
// Element d of a row is a counter-based hash of (stream, position, layer, kind,
// head, d): any row can be made again at any time, by any thread, which is what
// recomputation after a preemption and verification need. Each value is
// (2 (a + b + c) - 93) / 32 with a, b, c uniform in [0, 31]: mean 0, variance
// 3 x (32^2 - 1) / 12 / 16^2 = 0.999, close to N(0, 1) (an Irwin-Hall sum of
// three), an odd multiple of 1/32 below 3. Seven significant bits: exact in
// bf16, f16 and f32 alike, so a reference needs no rounding of inputs.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_KV_SYNTH_H_
#define VARLANE_TOOLS_KV_SYNTH_H_

#include <cstdint>
#include <span>

#include "varlane/dtype.h"

namespace varlane::tools {

enum class SynthKind : uint8_t { kQuery, kKey, kValue };

// Who a token is. Equal streams mean equal content at equal positions.
struct SynthToken {
  uint64_t stream = 0;
  int64_t position = 0;
};

// Streams of requests and of shared prefix blocks never meet.
uint64_t RequestStream(int64_t request);
uint64_t HashIdStream(int64_t hash_id);

// Fills one head of one token. Cost: under a nanosecond an element.
void FillSynthRow(SynthToken token, int layer, SynthKind kind, int head,
                  std::span<BF16> row);
void FillSynthRow(SynthToken token, int layer, SynthKind kind, int head,
                  std::span<float> row);
void FillSynthRow(SynthToken token, int layer, SynthKind kind, int head,
                  std::span<double> row);

// A uniform number in [0, 1) from the same counters: choosing rows to verify
// must not depend on batch or order.
double SynthUniform(SynthToken token, int layer, int head);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_KV_SYNTH_H_
