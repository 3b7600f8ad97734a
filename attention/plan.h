// AttentionPlan's inside: a batch, validated, and the grid that serves it.
//
// MakePlan is a pure function of (batch, shape, layout, options, workers): it
// runs nothing and can be tested without running.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_PLAN_H_
#define VARLANE_ATTENTION_PLAN_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/args.h"
#include "varlane/attention.h"

namespace varlane {

// What one worker counts during a launch; own cache line, no atomics.
struct alignas(64) WorkerCounters {
  int64_t surplus = 0;
  int64_t owner_searches = 0;
  int64_t owner_lookups = 0;
  int64_t spread_partitions = 0;
  int64_t merges = 0;
};

struct AttentionPlan::Impl {
  bool ready = false;  // false: empty, or the last Plan failed

  // Geometry.
  KvLayout layout;
  int num_q_heads = 0;
  int group = 1;
  float scale_log2 = 1;  // |scale| x log2(e); just |scale| under a softcap
  bool negate_q = false;
  float softcap = 0;
  OwnerPattern owner = OwnerPattern::kSearch;
  bool spread = false;

  // The batch. Copied: a plan outlives the step's buffers.
  int64_t num_seqs = 0;
  int64_t total_q = 0;
  int64_t num_blocks_needed = 0;  // largest block id + 1
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> block_tables;
  int64_t block_table_stride = 0;
  std::vector<SequenceMask> masks;  // [N]

  // The grid: heads x query blocks x partitions, partitions innermost.
  int block_q = 1;                 // query tokens of a block (BQ)
  int64_t num_query_blocks = 0;    // total_q / BQ + N: over-provisioned
  int64_t num_partitions = 1;      // 1 when walking
  std::vector<int32_t> owner_map;  // [num_query_blocks], -1 = surplus; kMap

  // Spread partitions: sequence i's records start at partial_base[i] records
  // of one kv head, [partition][token][head in group].
  std::vector<int64_t> partial_base;  // [N + 1], records a kv head
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int32_t>[]> arrived;  // [heads, query blocks]
  int64_t arrived_size = 0;
  bool arrived_dirty = false;  // a launch failed half-way

  std::vector<WorkerCounters> counters;  // [workers]
  int64_t kv_bytes = 0;
  int64_t flops = 0;

  // A threadgroup's work: query tokens [first_token, first_token + num_tokens)
  // of one sequence, and the context partitions that any of them sees.
  struct Item {
    int64_t seq = 0;
    int64_t q_len = 0;
    int64_t first_token = 0;  // within the sequence's query tokens
    int64_t num_tokens = 0;   // <= 0: past the sequence's rows
    RowMask mask;             // of first_token on
    int64_t partition_begin = 0;
    int64_t partition_end = 1;  // never empty: a row that sees nothing is
                                // still written
    int64_t num_partitions() const { return partition_end - partition_begin; }
  };
  // Query block `block` (of the grid) of sequence `seq`.
  Item Locate(int64_t seq, int64_t block) const;

  int64_t num_threadgroups() const {
    return layout.num_kv_heads * num_query_blocks * num_partitions;
  }
};

// Fills `plan`, reusing its memory. Errors: as Attention::Plan; `plan->ready`
// is then false.
Status MakePlan(const Batch& batch, const AttentionShape& shape,
                const KvLayout& layout, int64_t num_blocks,
                const PlanOptions& options, int num_workers,
                AttentionPlan::Impl* plan);

// The sequence that owns query block `block`: the largest i with
// cu_seqlens_q[i] / BQ + i <= block. Each sequence has len / BQ full blocks and
// at most one ragged tail, so block ranges of the transformed array never
// overlap. Requires: num_seqs > 0. Cost: ceil(log2(N + 1)) dependent loads.
// Source: vLLM's unified attention kernel, find_seq_idx.
int64_t FindOwner(const int32_t* cu_seqlens_q, int64_t num_seqs, int block_q,
                  int64_t block);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_PLAN_H_
