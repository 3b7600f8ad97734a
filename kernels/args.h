// What the kernels take: plain data with shapes; no Highway, no ownership.
//
// A *row* is one (query token, query head) pair; the rows of a threadgroup are
// all tokens of a query block times all query heads of one KV head, token
// major: row = token * group + head_in_group. Those of several KV heads follow
// each other.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KERNELS_ARGS_H_
#define VARLANE_KERNELS_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "varlane/dtype.h"

namespace varlane {

// Part of the results (docs/numerics.md): changing either changes bits.
//
// Keys per softmax step, at absolute positions: a register tile of 4 rows by
// 64 scores fills 16 AVX-512 accumulators.
inline constexpr int kKeyTile = 64;
// Keys per partial state: enough that merging costs a long prefill 1-3%, few
// enough that one long sequence has work for every core.
inline constexpr int kPartition = 1024;
// Lanes of the running sum and of a padded V row; no vector is wider.
inline constexpr int kLanes = 16;

// Elements of a V row as it is held.
[[gnu::always_inline]] inline constexpr int PaddedWidth(int v_head_size) {
  return (v_head_size + kLanes - 1) / kLanes * kLanes;
}

// One partial softmax state in memory: m (log2 units), l, then acc[Dv'].
[[gnu::always_inline]] inline constexpr int64_t PartialFloats(
    int v_head_size_padded) {
  return kLanes + v_head_size_padded;  // m and l padded to one vector
}

// K/V of one (layer, kv head), seen through one sequence's block table.
struct KvPages {
  const std::byte* k = nullptr;  // of block 0
  const std::byte* v = nullptr;
  int64_t block_bytes = 0;               // from block to block
  const int32_t* block_table = nullptr;  // [ceil(context / block_size)]
  int block_size_log2 = 4;
};

// Which keys the row of query token i sees: one interval, whose ends never fall
// as i grows. Positions are absolute.
struct RowMask {
  int64_t first_position = 0;  // of token 0; negative where q_len > kv_len
  int64_t context = 0;         // keys there are
  int64_t left = 0;            // keys seen before the row's own position
  int64_t right = 0;           // and after it
  int64_t prefix = 0;          // keys seen by every row

  // "All" of a side: beyond any context, far from overflow.
  static constexpr int64_t kAll = int64_t{1} << 40;

  [[gnu::always_inline]] constexpr int64_t high(int64_t token) const {
    const int64_t own = first_position + token + 1 + right;
    const int64_t seen = own > prefix ? own : prefix;
    const int64_t cut = seen < context ? seen : context;
    return cut > 0 ? cut : 0;
  }
  [[gnu::always_inline]] constexpr int64_t low(int64_t token) const {
    const int64_t own = first_position + token - left;
    const int64_t cut = own > 0 ? own : 0;
    const int64_t end = high(token);
    return cut < end ? cut : end;
  }
};

// How all layers' K/V of a launch's contexts compare with the last-level
// caches: at most three quarters of them, all of them, or more, so that each
// layer's come from memory. Says when to ask for what, never changes a result.
enum class CacheFit : uint8_t { kFits, kFills, kExceeds };

// Rows of several KV heads are computed in one call only where they are few: at
// most so many of each and in all. More have arithmetic to hide memory behind,
// and would fill the cache with their states.
inline constexpr int kMostRowsOfHead = 32;
inline constexpr int kMostRowsTogether = 256;
constexpr bool GoTogether(int64_t rows_of_head, int kv_heads) {
  return rows_of_head <= kMostRowsOfHead &&
         rows_of_head * kv_heads <= kMostRowsTogether;
}

// Rows of one threadgroup against one sequence's context.
struct AttendArgs {
  // Query rows: q + token * q_token_stride + head * q_head_stride elements.
  const void* q = nullptr;
  DType q_dtype = DType::kF32;
  int64_t q_token_stride = 0;
  int64_t q_head_stride = 0;
  int num_tokens = 0;
  int group = 1;
  // KV heads, whose query heads follow each other. Run by run of keys each one
  // has its turn, so that what stands side by side is read in one go.
  int num_kv_heads = 1;
  int head_size = 0;
  int v_head_size = 0;
  float scale_log2 = 1;   // |scale| * log2(e), applied to fp32 dots
  bool negate_q = false;  // scale < 0

  KvPages kv;                // of the first KV head
  int64_t k_head_bytes = 0;  // from one KV head to the next
  int64_t v_head_bytes = 0;
  CacheFit cache_fit = CacheFit::kFills;
  RowMask mask;

  // Score modifiers, applied in this order; null and 0 = none.
  float softcap = 0;                    // natural units, as the scale
  const float* alibi_slopes = nullptr;  // of head 0 of the first group
  const float* sinks = nullptr;         // likewise

  // Partitions [begin, end) to walk.
  int64_t partition_begin = 0;
  int64_t partition_end = 0;

  // Either final rows ...
  void* out = nullptr;  // of token 0, head 0 of the first group
  DType out_dtype = DType::kF32;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  // Whether rows of whole lines are written past the caches, as q and out that
  // fill these would not be found there. Never changes a result.
  bool streams_out = false;
  float* lse = nullptr;  // of token 0, head 0; strides: Hq and 1. May be null.
  int64_t lse_token_stride = 0;
  // ... or, where not null, one partial state a row of the one partition.
  float* partials = nullptr;         // [rows of a KV head, PartialFloats]
  int64_t partials_head_stride = 0;  // floats from one KV head to the next

  std::byte* scratch = nullptr;  // 64-byte aligned, AttendScratchBytes

  // What this worker does next, as far as it knows: keys [next_low, next_high)
  // of `next` are the first it will read, with q of `next_tokens` tokens, whose
  // first row stands at next_q. Some of them are fetched while this work ends.
  // next.k and next_q null = nothing known. Never changes a result.
  KvPages next;
  const void* next_q = nullptr;
  int next_tokens = 0;
  int64_t next_low = 0;
  int64_t next_high = 0;
};

// Merges `num_partials` partial states a row in index order and finishes it.
struct MergeArgs {
  const float* partials = nullptr;  // [num_partials, rows, PartialFloats]
  int64_t num_partials = 0;
  int64_t partial_stride = 0;  // floats from one partition to the next
  int num_tokens = 0;
  int group = 1;
  int v_head_size = 0;
  void* out = nullptr;
  DType out_dtype = DType::kF32;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  float* lse = nullptr;
  int64_t lse_token_stride = 0;
  const float* sinks = nullptr;  // of head 0 of the group; may be null
  std::byte* scratch = nullptr;  // 64-byte aligned, PartialFloats floats
};

// Finished rows of attention over some of the keys.
struct StateRows {
  const void* out = nullptr;  // [rows, v_head_size]
  DType dtype = DType::kF32;
  int64_t stride = 0;          // elements
  const float* lse = nullptr;  // [rows], natural; -inf: the row is empty
};

// Merges rows [row_begin, row_end) of states over disjoint key sets.
struct MergeStatesArgs {
  const StateRows* states = nullptr;
  int64_t num_states = 0;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int v_head_size = 0;
  void* out = nullptr;  // of row 0, as lse
  DType out_dtype = DType::kF32;
  int64_t out_stride = 0;
  float* lse = nullptr;          // may be null
  std::byte* scratch = nullptr;  // 64-byte aligned, MergeStatesScratchBytes
};
inline constexpr size_t MergeStatesScratchBytes(int v_head_size) {
  return 2 * sizeof(float) * static_cast<size_t>(PaddedWidth(v_head_size));
}

// Writes `count` tokens of one kv head that follow each other in one block:
// rounds (to nearest even) and packs.
struct WriteArgs {
  const void* k = nullptr;  // [D] contiguous, of the first token
  const void* v = nullptr;  // [Dv] contiguous
  int64_t k_token_bytes = 0;
  int64_t v_token_bytes = 0;
  const void* next_k = nullptr;  // of as many tokens, read next; null = unknown
  const void* next_v = nullptr;
  DType k_dtype = DType::kF32;
  DType v_dtype = DType::kF32;
  int head_size = 0;
  int v_head_size = 0;
  std::byte* k_block = nullptr;  // K of (block, layer, head)
  std::byte* v_block = nullptr;
  int block_size = 16;
  int offset = 0;  // of the first token within the block
  int count = 1;
};

}  // namespace varlane

#endif  // VARLANE_KERNELS_ARGS_H_
