// KvOps: moving K/V about within a cache, and out of it.
//
// Layer 3.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KV_OPS_H_
#define VARLANE_KV_OPS_H_

#include <cstdint>
#include <span>

#include "varlane/attention.h"
#include "varlane/export.h"
#include "varlane/kv_layout.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// One block to copy.
struct BlockCopy {
  int64_t from = 0;
  int64_t to = 0;
};

// Copies whole blocks, all layers, byte for byte, on the runtime's workers.
//
// A block may be copied from any number of times, but written once, and not
// copied from as well: the order of `copies` then means nothing, and nothing is
// read half-written. A chain a -> b -> c is two calls, c first.
//
// Errors: kInvalidArgument naming the pair and the limit or the other pair;
//         nothing is copied then. kResourceExhausted; kAborted as Launch.
// Cost:   the bytes, spread over the workers; O(n log n) to validate.
// Threads: nobody else may write the sources, or use the destinations.
VARLANE_EXPORT Status CopyBlocks(Runtime* runtime, const KvView& kv,
                                 std::span<const BlockCopy> copies);

// Positions [begin, end) of one sequence in one layer.
struct KvRange {
  std::span<const int32_t> block_table;  // of the sequence, from position 0
  int layer = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Unpacks keys and values to contiguous rows: what WriteKv was given, rounded
// to the cache's dtype. Table entries of blocks outside the range are not read.
//
// k [end - begin, Hkv, D] and v [end - begin, Hkv, Dv], each of f32 or the
// cache's dtype; strides as TensorView says. Either may have null data: it is
// left out.
//
// Errors: kInvalidArgument naming argument, value and limit, e.g.
//         "block_table[17] = 90210, but the view has 4096 blocks"; kAborted as
//         Launch.
// Cost:   the bytes, read with a stride; spread over the workers by block.
VARLANE_EXPORT Status GatherKv(Runtime* runtime, const KvView& kv,
                               const KvRange& range, const MutableTensor& k,
                               const MutableTensor& v);

}  // namespace varlane

#endif  // VARLANE_KV_OPS_H_
