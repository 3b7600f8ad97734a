// AttentionPlan's inside: a batch, validated, and the grid that serves it.
//
// MakePlan is a pure function of (batch, shape, view, options, workers, nodes):
// it runs nothing and can be tested without running.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_PLAN_H_
#define VARLANE_ATTENTION_PLAN_H_

#include <algorithm>
#include <atomic>
#include <bit>
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
  int64_t owner_planned = 0;
  int64_t owner_padded = 0;
  int64_t spread_partitions = 0;
  int64_t merges = 0;
  int64_t home = 0;
  int64_t stolen = 0;
  int64_t local_bytes = 0;
  int64_t remote_bytes = 0;
  int64_t last_owner = 0;  // where its next search starts
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
  // Query blocks [0, spread_blocks), the last ones to run, are spread: each of
  // their partitions is a threadgroup's. The others walk theirs.
  int64_t spread_blocks = 0;

  // The batch. Copied: a plan outlives the step's buffers. Its sequences stand
  // in the plan's order, which is the batch's own unless there are homes
  // (homes.h) to follow.
  int64_t num_seqs = 0;
  int64_t total_q = 0;
  int64_t num_blocks_needed = 0;  // largest block id + 1
  uint64_t kv_generation = 0;     // KvView::generation
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> block_tables;
  int64_t block_table_stride = 0;
  std::vector<SequenceMask> masks;  // [N]

  // Several NUMA nodes: empty where there is one, or nothing to go by.
  std::vector<int32_t> homes;        // [N] nodes
  std::vector<int32_t> batch_index;  // [N]; empty: the plan's order
  std::vector<int32_t> first_token;  // [N] of the sequence, in q; likewise
  std::vector<int64_t> node_begin;   // [nodes + 1], for Grid
  std::vector<int32_t> batch_homes;  // [N] in the batch's order; FindHomes's
  std::vector<int64_t> node_counts;  // [nodes] likewise
  int64_t node_stride = 0;           // block ids a node
  int num_nodes = 1;                 // of the runtime

  // KV heads sharded over them (shards.h).
  int view_shards = 1;        // KvView::num_shards
  bool shards_known = false;  // shard s is of the runtime's node s
  int grid_shards = 1;        // ranges the grid is cut into by shard
  int grid_heads = 0;         // KV heads of each
  int heads_together = 1;     // of a threadgroup
  int heads_axis = 0;         // threadgroups that they make
  int64_t shard_size = 0;     // threadgroups of each, where there are several

  // K/V bytes of a key in the KV heads of a threadgroup.
  int64_t key_bytes() const {
    return int64_t{heads_together} * (layout.head_size + layout.v_head_size) *
           static_cast<int64_t>(SizeOf(layout.dtype));
  }

  // Whether a threadgroup can tell what is local to it.
  bool counts_locality() const { return !homes.empty() || shards_known; }

  // Of a sequence, in the batch as it came.
  int64_t BatchIndex(int64_t seq) const {
    return batch_index.empty() ? seq : batch_index[static_cast<size_t>(seq)];
  }
  int64_t FirstToken(int64_t seq) const {
    return (first_token.empty() ? cu_seqlens_q
                                : first_token)[static_cast<size_t>(seq)];
  }

  // Query blocks, and the grid over them that the owner pattern makes of them
  // (owner.h).
  int block_q = 1;                 // query tokens of a block, a power of two
  int64_t num_query_blocks = 0;    // total_q / BQ + N: over-provisioned
  int64_t num_partitions = 1;      // of those that are spread, at most
  int64_t grid_size = 0;           // threadgroups
  std::vector<int32_t> owner_map;  // [num_query_blocks], -1 = surplus; kMap
  // One threadgroup's work for its KV heads, heaviest first; kPlanned.
  struct Descriptor {
    int64_t cost;
    int32_t seq;
    int32_t block;            // within the sequence
    int32_t partition_begin;  // absolute: all of the block's, or one
    int32_t partition_end;
  };
  std::vector<Descriptor> descriptors;
  int64_t padded_query_blocks = 0;  // of the longest query; kPadded

  // Spread partitions: sequence i's records start at partial_base[i] records
  // of one kv head, [partition][token][head in group].
  std::vector<int64_t> partial_base;  // [N + 1], records a kv head
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int32_t>[]> arrived;  // [heads, query blocks]
  int64_t arrived_size = 0;
  bool arrived_dirty = false;  // a launch failed half-way
  std::atomic<bool> is_running = false;

  std::vector<WorkerCounters> counters;  // [workers]
  std::vector<double> worker_seconds;    // [workers]
  int64_t kv_bytes = 0;
  int64_t cache_bytes = 0;  // of all L3s; 0 where the machine shows none
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
    int64_t num_keys() const {  // that any of its rows sees
      return mask.high(num_tokens - 1) - mask.low(0);
    }
  };
  // Query block `block`, numbered over all sequences, of sequence `seq`.
  Item Locate(int64_t seq, int64_t block) const;

  bool spreads(int64_t block) const { return block < spread_blocks; }
  // Threadgroups of query blocks [0, end) a step of the heads' axis.
  int64_t SlotsOfBlocks(int64_t end) const {
    return end + std::min(end, spread_blocks) * (num_partitions - 1);
  }

  int64_t QueryLength(int64_t seq) const {
    const auto at = static_cast<size_t>(seq);
    return cu_seqlens_q[at + 1] - cu_seqlens_q[at];
  }
  int64_t NumBlocks(int64_t seq) const {
    return (QueryLength(seq) + block_q - 1) >> block_q_log2();
  }
  // Number of a sequence's first query block. Numbers of different sequences
  // never meet, but some name no block.
  int64_t FirstBlock(int64_t seq) const {
    return (cu_seqlens_q[static_cast<size_t>(seq)] >> block_q_log2()) + seq;
  }
  // Blocks are powers of two: a division would cost a surplus threadgroup as
  // much as all else.
  int block_q_log2() const {
    return std::countr_zero(static_cast<unsigned>(block_q));
  }

  // What it costs to pass `tokens` query tokens over `keys` keys. One token
  // costs a whole pass over memory; more come almost free until arithmetic
  // binds, hence the constant.
  static int64_t Cost(int64_t keys, int64_t tokens) {
    return (keys + 1) * (tokens + 2);
  }
};

// Blocks [begin, end) of sequence `seq` that some row of the step sees.
// Requires: valid lengths and masks.
struct BlockRange {
  int64_t begin = 0;
  int64_t end = 0;
};
BlockRange BlocksInView(const Batch& batch, const AttentionShape& shape,
                        int block_size, int64_t seq);

// Fills `plan`, reusing its memory. Errors: as Attention::Plan; `plan->ready`
// is then false.
Status MakePlan(const Batch& batch, const AttentionShape& shape,
                const KvView& kv, const PlanOptions& options, int num_workers,
                AttentionPlan::Impl* plan, int num_nodes = 1);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_PLAN_H_
