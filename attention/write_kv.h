// Writing a step's K/V into the cache by slot mapping.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_WRITE_KV_H_
#define VARLANE_ATTENTION_WRITE_KV_H_

#include <array>
#include <cstdint>
#include <span>

#include "kernels/kernel_table.h"
#include "varlane/attention.h"
#include "varlane/runtime.h"

namespace varlane {

// One write: Begin, then the body for each threadgroup. Where the view's heads
// are sharded each shard has threadgroups of its own, for the node's workers
// where the shards are those of the runtime's `num_nodes` nodes.
class KvWrite {
 public:
  // Errors: as Attention::WriteKv. `slot_mapping` stays the caller's.
  Status Begin(const KernelTable& table, int num_nodes, const KvView& kv,
               int layer, const ConstTensor& k, const ConstTensor& v,
               std::span<const int64_t> slot_mapping);
  // Valid while this object lives and does not Begin anew.
  Grid grid() const noexcept;
  void operator()(const Threadgroup& group) const;

 private:
  // More nodes than this do not get ranges of their own.
  static constexpr int kMostNodes = 64;

  // As many tokens from `token` on as have slots that follow each other in one
  // block, but before `end`; one that has none is its own.
  int RunOf(int64_t token, int64_t end) const;
  // Of heads [head_begin, head_end).
  void WriteRun(int64_t token, int count, int head_begin, int head_end) const;

  const KvKernels* kernels_ = nullptr;
  KvView kv_;
  int layer_ = 0;
  ConstTensor k_;
  ConstTensor v_;
  std::span<const int64_t> slot_mapping_;
  int64_t shard_size_ = 0;  // threadgroups of a shard
  int num_cuts_ = 0;        // entries of node_begin_ in use
  std::array<int64_t, kMostNodes + 1> node_begin_ = {};
};

// Errors: as Attention::WriteKv.
Status WriteKvTokens(Runtime* runtime, const KernelTable& table,
                     const KvView& kv, int layer, const ConstTensor& k,
                     const ConstTensor& v,
                     std::span<const int64_t> slot_mapping);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_WRITE_KV_H_
