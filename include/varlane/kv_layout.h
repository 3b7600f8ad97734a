// KvLayout: the shape of the paged KV cache and where every element stands.
//
// One block holds `block_size` tokens of all layers, contiguous, so a block can
// be copied, moved or swapped as one range of bytes:
//
//   block  | layer 0                         | layer 1 ...
//          | K: head 0 | head 1 .. | V: head 0 | head 1 ..
//
//   K of one (block, layer, head):  [D/x][block_size][x]     tokens in lanes
//   V of one (block, layer, head):  [block_size/y][Dv'][y]   dims in lanes
//
// x and y are what one SIMD dot product eats: f32 and f16 1, bf16 2. Dv' is Dv
// rounded up to 16 so that a vector never straddles two rows; the padding may
// hold anything and never reaches an output. Packing happens once, at the
// write.
//
// A view may shard the KV heads over NUMA nodes. Then a block is cut into equal
// parts, each laid out like a block that has its share of the heads only, and
// the parts of one shard stand together:
//
//   shard 0 (heads 0, 1)              | shard 1 (heads 2, 3)
//   part of block 0 | of block 1 | .. | part of block 0 | of block 1 | ..
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KV_LAYOUT_H_
#define VARLANE_KV_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "varlane/dtype.h"
#include "varlane/export.h"
#include "varlane/status.h"

namespace varlane {

inline constexpr int kMinBlockSize = 16;
inline constexpr int kMaxBlockSize = 256;  // and a power of two
inline constexpr int kMinHeadSize = 8;
inline constexpr int kMaxHeadSize = 576;  // and a multiple of 8

struct VARLANE_EXPORT KvLayout {
  DType dtype = DType::kBF16;
  int num_layers = 1;
  int num_kv_heads = 1;
  int head_size = 128;    // D: K (and Q)
  int v_head_size = 128;  // Dv: V (and out)
  int block_size = 16;    // tokens

  // Checks every field. Errors: kInvalidArgument naming field, value, limit.
  Status Validate() const;

  // x of K and y of V: elements of one lane.
  int pack() const { return dtype == DType::kBF16 ? 2 : 1; }
  int v_head_size_padded() const { return (v_head_size + 15) / 16 * 16; }

  // All in bytes. Multiples of 64, so every (block, layer, head) is aligned.
  int64_t k_head_bytes() const {
    return int64_t{head_size} * block_size * int64_t(SizeOf(dtype));
  }
  int64_t v_head_bytes() const {
    return int64_t{v_head_size_padded()} * block_size * int64_t(SizeOf(dtype));
  }
  int64_t layer_bytes() const {
    return num_kv_heads * (k_head_bytes() + v_head_bytes());
  }
  int64_t block_bytes() const { return num_layers * layer_bytes(); }
  int64_t token_bytes() const { return block_bytes() / block_size; }

  // Element offsets (not bytes) inside K resp. V of one (block, layer, head).
  // t in [0, block_size), d in [0, head_size) resp. [0, v_head_size).
  int64_t k_offset(int t, int d) const {
    const int x = pack();
    return (int64_t{d / x} * block_size + t) * x + d % x;
  }
  int64_t v_offset(int t, int d) const {
    const int y = pack();
    return (int64_t{t / y} * v_head_size_padded() + d) * y + t % y;
  }

  friend bool operator==(const KvLayout&, const KvLayout&) = default;
};

// Memory laid out by a KvLayout: a KvPool's, or the embedder's own.
//
// Lifetime: borrowed; `base` must stay mapped while a launch uses it.
struct KvView {
  std::byte* base = nullptr;  // block 0; 64-byte aligned
  int64_t num_blocks = 0;     // ids in [0, num_blocks) may be touched, but for
                              // the holes that node_blocks tells of
  KvLayout layout;
  // A pool on several NUMA nodes: node n's ids are [n * node_stride, n *
  // node_stride + node_blocks[n]), as they are at the moment of asking. Null:
  // no holes.
  const std::atomic<int64_t>* node_blocks = nullptr;
  int64_t node_stride = 0;
  // Sharded heads: the part of block b with KV heads [s, s + 1) x num_kv_heads
  // / num_shards is at base + s * shard_stride + b * part_bytes(). Without
  // node_blocks.
  int num_shards = 1;        // divides num_kv_heads; 1 = blocks are whole
  int64_t shard_stride = 0;  // bytes, a multiple of 64
  // How often the pool moved blocks or took some away: what named blocks before
  // may name others now. A plan holds for one generation.
  uint64_t generation = 0;

  bool contains(int64_t block) const {
    if (block < 0 || block >= num_blocks) return false;
    return node_blocks == nullptr ||
           block % node_stride <
               node_blocks[block / node_stride].load(std::memory_order_acquire);
  }
  // One behind the last id of the block's node. Requires: node_blocks.
  int64_t node_end(int64_t block) const {
    const int64_t node = block / node_stride;
    return node * node_stride +
           node_blocks[node].load(std::memory_order_acquire);
  }

  int shard_heads() const { return layout.num_kv_heads / num_shards; }
  // What one shard has of a block, and from block to block in it.
  int64_t part_bytes() const { return layout.block_bytes() / num_shards; }
  std::byte* part(int64_t block, int shard) const {
    return base + shard * shard_stride + block * part_bytes();
  }

  std::byte* k(int64_t block, int layer, int head) const {
    if (num_shards > 1) {
      const int heads = shard_heads();
      return part(block, head / heads) +
             layer * (layout.layer_bytes() / num_shards) +
             head % heads * layout.k_head_bytes();
    }
    return base + block * layout.block_bytes() + layer * layout.layer_bytes() +
           head * layout.k_head_bytes();
  }
  std::byte* v(int64_t block, int layer, int head) const {
    if (num_shards > 1) {
      const int heads = shard_heads();
      return part(block, head / heads) +
             layer * (layout.layer_bytes() / num_shards) +
             heads * layout.k_head_bytes() +
             head % heads * layout.v_head_bytes();
    }
    return base + block * layout.block_bytes() + layer * layout.layer_bytes() +
           layout.num_kv_heads * layout.k_head_bytes() +
           head * layout.v_head_bytes();
  }
};

}  // namespace varlane

#endif  // VARLANE_KV_LAYOUT_H_
