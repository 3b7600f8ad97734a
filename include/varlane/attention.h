// Attention: one launch for any ragged batch over a paged KV cache.
//
// Prefill chunks, decode steps and draft verification are one thing: sequence i
// brings q_len = cu_seqlens_q[i+1] - cu_seqlens_q[i] query tokens at absolute
// positions [seq_len - q_len, seq_len), whose K/V are in the cache already.
// A plan is made - and everything validated - once a step, run once a layer.
//
// Bits: for given dtypes a row's output is bit-identical whatever else is in
// the batch, wherever chunk boundaries fall, however many workers run,
// whichever owner pattern, partition mode, block size, block table or (FMA)
// instruction set: docs/numerics.md says why. Layer 3.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_H_
#define VARLANE_ATTENTION_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "varlane/dtype.h"
#include "varlane/export.h"
#include "varlane/graph.h"
#include "varlane/kv_layout.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// Which keys a row at absolute position p of one sequence sees: [low, high)
// with
//   high = p + 1 where causal, else p + 1 + window_right (all where that is
//   -1),
//          but at least prefix_len, and at most seq_len
//   low  = p - window_left (0 where that is -1)
// A sliding window of W tokens, the row's own included, is window_left = W - 1.
struct SequenceMask {
  bool causal = true;
  int32_t window_left = -1;   // tokens before the row; -1 = all
  int32_t window_right = -1;  // tokens after it, where not causal; -1 = all
  int32_t prefix_len = 0;     // prefix-LM: seen by every row

  friend bool operator==(const SequenceMask&, const SequenceMask&) = default;
};

// One step's ragged batch. Borrowed during Plan only.
struct Batch {
  std::span<const int32_t> cu_seqlens_q;  // [N+1], exclusive prefix sum
  std::span<const int32_t> seq_lens;      // [N], context incl. this step
  std::span<const int32_t> block_tables;  // [N, block_table_stride]
  int64_t block_table_stride = 0;         // entries a row
  // [N], or empty: AttentionShape::mask for every sequence. Table entries of
  // blocks that no row of the step sees are not read and may hold anything.
  std::span<const SequenceMask> masks = {};

  int64_t num_seqs() const { return static_cast<int64_t>(seq_lens.size()); }
};

// The same for every layer of a plan.
struct AttentionShape {
  int num_q_heads = 0;     // any multiple of layout.num_kv_heads
  double scale = 0;        // of q.k; 0 = 1/sqrt(head_size)
  double softcap = 0;      // scores become cap x tanh(score / cap); 0 = none
  SequenceMask mask = {};  // where Batch::masks is empty
};

// How a threadgroup finds whose work it holds. Results do not depend on it.
enum class OwnerPattern : uint8_t {
  kSearch,  // every threadgroup searches cu_seqlens_q: <= ceil(log2(N+1)) loads
  kMap,     // a query-block -> sequence map made by Plan
  kPlanned,  // Plan lists the work exactly, heaviest first: no surplus at all
  kPadded,   // the grid's axes are head, sequence, query block of the longest
             // query and partition of the longest context: in a ragged batch
             // most threadgroups are surplus
};
enum class PartitionMode : uint8_t {
  kAuto,    // spread when the launch would underfill the workers, or part KV
            // heads that few rows read faster together; of a few long
            // threadgroups the last ones
  kSpread,  // context partitions are threadgroups; the last arriver merges
  kWalk,    // one threadgroup walks its partitions in order
};
VARLANE_EXPORT const char* OwnerPatternName(OwnerPattern pattern);
VARLANE_EXPORT const char* PartitionModeName(PartitionMode mode);

struct PlanOptions {
  OwnerPattern owner = OwnerPattern::kSearch;
  PartitionMode partitions = PartitionMode::kAuto;
  // On several NUMA nodes: each sequence's threadgroups are for the workers of
  // its home, the node that holds most of the blocks it reads, or, where KV
  // heads are sharded over the nodes, each head's for those of its shard's
  // node; others steal (Grid). Off: whichever worker comes first. Results do
  // not depend on it.
  bool follow_homes = true;
  // KV heads that a threadgroup computes. A block of the pool holds all of them
  // side by side; where rows are few (decode, verification), reading them in
  // one go is faster. 0 = up to 8, where most K/V is read by few rows and every
  // worker still has enough to do; else the largest number up to this one that
  // divides the KV heads (of a shard). Results do not depend on it.
  int kv_heads_per_threadgroup = 0;
};

// A tensor [tokens, heads, head_size] whose innermost axis is contiguous.
// Strides are in elements; any alignment of the element type will do.
template <typename Pointer>
struct TensorView {
  Pointer data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_stride = 0;  // 0 = heads x head_size
  int64_t head_stride = 0;   // 0 = head_size
};
using ConstTensor = TensorView<const void*>;
using MutableTensor = TensorView<void*>;

struct AttentionTensors {
  ConstTensor q;  // [total_q, Hq, D]   f32, bf16 or f16
  // [total_q, Hq, Dv] f32, bf16 or f16. Where q and out fill the L3s together,
  // rows of whole 64-byte lines are written past the caches.
  MutableTensor out;
  // [total_q, Hq] natural log; null = not wanted. A row that sees no key has an
  // out of 0 and an lse of -inf, or of its sink where there is one.
  float* lse = nullptr;
  // Per query head [Hq] f32, or null. ALiBi adds slope x (key position - query
  // position) to a score; a sink is one more logit, unscaled, without a value,
  // that counts in the LSE.
  const float* alibi_slopes = nullptr;
  const float* sinks = nullptr;
};

// What a launch did. Counted, not estimated.
struct LaunchReport {
  int64_t threadgroups = 0;          // of the grid
  int64_t surplus_threadgroups = 0;  // that returned at once
  int64_t owner_searches = 0;        // threadgroups that searched cu_seqlens_q
  int64_t owner_lookups = 0;         // threadgroups that read the map
  int64_t owner_planned = 0;         // threadgroups that read a descriptor
  int64_t owner_padded = 0;          // threadgroups that are their coordinates
  int64_t spread_partitions = 0;     // partials written for a later merge
  int64_t merges = 0;                // last arrivers that merged
  int64_t kv_bytes = 0;              // K/V bytes the batch has to read once
  int64_t flops = 0;                 // 2 x (D + Dv) per visible (row, key)
  // Where work and memory met, by the nodes that block ids name, or that
  // sharded heads are on. With one node everything is at home, and local_bytes
  // are kv_bytes; with several bytes are counted by threadgroup, K/V that
  // several read several times. All 0 where the nodes of the view's blocks are
  // not known, or not the runtime's.
  int64_t home_threadgroups = 0;    // run on their sequence's home, or shard's
  int64_t stolen_threadgroups = 0;  // run on another node
  int64_t local_bytes = 0;          // K/V read on the node that holds them
  int64_t remote_bytes = 0;         // K/V read across nodes
  double seconds = 0;               // wall time of the launch
  // What its workers (no more than threadgroups) spent in it.
  double mean_worker_seconds = 0;
  double longest_worker_seconds = 0;

  // 1 = all workers were busy to the end; 2 = half of their time was spent
  // waiting for the last one. 0 = nothing ran.
  double imbalance() const {
    return mean_worker_seconds > 0
               ? longest_worker_seconds / mean_worker_seconds
               : 0;
  }
};

// Of several launches: everything is a sum.
VARLANE_EXPORT LaunchReport& operator+=(LaunchReport& to,
                                        const LaunchReport& other) noexcept;

struct RunOptions {
  LaunchReport* report = nullptr;  // filled when the launch succeeds
  std::stop_token stop = {};
  std::chrono::steady_clock::time_point deadline =
      std::chrono::steady_clock::time_point::max();
  // Sets out and lse to NaN when the launch has begun and failed, so that what
  // is unspecified cannot be mistaken for a result.
  bool fill_nan = false;
  int priority = 0;  // LaunchOptions'
};

class VARLANE_EXPORT AttentionPlan {
 public:
  AttentionPlan();
  ~AttentionPlan();
  AttentionPlan(AttentionPlan&&) noexcept;
  AttentionPlan& operator=(AttentionPlan&&) noexcept;

  bool spreads_partitions() const noexcept;       // some of them at least
  int kv_heads_per_threadgroup() const noexcept;  // 0 for an empty plan
  int64_t num_threadgroups() const noexcept;
  int64_t total_q() const noexcept;
  int64_t workspace_bytes() const noexcept;
  // One line per decision; for people.
  std::string ToString() const;

  struct Impl;  // private to the library

 private:
  friend class Attention;
  std::unique_ptr<Impl> impl_;
};

// What an attention node of a graph does in one run: as Attention::Run.
struct AttentionNodeArgs {
  AttentionPlan* plan = nullptr;
  KvView kv = {};
  int layer = 0;
  AttentionTensors tensors = {};
  LaunchReport* report = nullptr;
  bool fill_nan = false;
};

// What a cache write of a graph does in one run: as Attention::WriteKv.
// `slot_mapping` must stay valid until the node is done.
struct WriteKvNodeArgs {
  KvView kv = {};
  int layer = 0;
  ConstTensor k = {};
  ConstTensor v = {};
  std::span<const int64_t> slot_mapping = {};
};

// The operation on one runtime with one kernel table.
//
// Threads: const members are safe from any thread, with different plans. One
//          plan serves one Run at a time.
class VARLANE_EXPORT Attention {
 public:
  // The table is RuntimeOptions::simd_target's, resolved here once.
  // Errors: kNotFound for an unknown or unsupported target, listing those
  //         there are.
  // Lifetime: `runtime` must outlive it.
  static Result<std::unique_ptr<Attention>> Create(Runtime* runtime);
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  const char* simd_target() const noexcept;

  // Validates `batch` against `kv` and fills `plan`, reusing its memory.
  //
  // Errors: kInvalidArgument naming place, value and limit, e.g.
  //         "block_tables[3][17] = 90210, but the pool has 4096 blocks";
  //         kResourceExhausted when the workspace cannot be had. `plan` is
  //         then empty, and running it is kFailedPrecondition.
  // Cost:   O(N + table entries in use), for kPlanned also O(w log w) in its w
  //         descriptors; no allocation once warm.
  Status Plan(const Batch& batch, const AttentionShape& shape, const KvView& kv,
              const PlanOptions& options, AttentionPlan* plan) const;

  // Computes softmax(scale q k^T + mask) v of one layer; blocks until done.
  //
  // Requires: `kv` has the layout the plan was made for, and at least its
  //           blocks; tensors as AttentionTensors says.
  // Errors:   kInvalidArgument, kFailedPrecondition (plan); kCancelled;
  //           kDeadlineExceeded; kAborted; kResourceExhausted (scratch). `out`
  //           and `lse` are unspecified after the last four, or NaN with
  //           RunOptions::fill_nan; the next Run is right.
  Status Run(AttentionPlan* plan, const KvView& kv, int layer,
             const AttentionTensors& tensors, const RunOptions& options) const;
  Status Run(AttentionPlan* plan, const KvView& kv, int layer,
             const AttentionTensors& tensors, LaunchReport* report = nullptr,
             std::stop_token stop = {}) const;

  // Writes K/V of this step's tokens to their slots, packing and rounding (to
  // nearest even) to the cache's dtype. `slot_mapping` [num_tokens]: slot =
  // block x block_size + offset; negative slots are skipped.
  //
  // Shapes: k [num_tokens, Hkv, D], v [num_tokens, Hkv, Dv].
  // Errors: kInvalidArgument naming the slot and the limit; nothing is written.
  Status WriteKv(const KvView& kv, int layer, const ConstTensor& k,
                 const ConstTensor& v,
                 std::span<const int64_t> slot_mapping) const;

  // Add Run or WriteKv to a graph. `bind` is called in every run, when the
  // nodes before are done, with the run's `args`: plan, tensors and layer may
  // be others each time, and a plan may be made by a host function before.
  // Nodes that use one plan need a dependency between them; two that run it at
  // once fail with kFailedPrecondition. This object must outlive the graph.
  //
  // Errors: as LaunchGraph::AddLaunch; when run, as Run and WriteKv.
  Result<GraphNode> AddRun(LaunchGraph* graph, std::string name,
                           std::function<AttentionNodeArgs(void* args)> bind,
                           LaunchGraph::After after = {}) const;
  Result<GraphNode> AddWriteKv(LaunchGraph* graph, std::string name,
                               std::function<WriteKvNodeArgs(void* args)> bind,
                               LaunchGraph::After after = {}) const;

 private:
  class Impl;
  explicit Attention(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The kernel tables compiled in that this CPU can run, best first; but last,
// for comparison, what other CPUs take. Of AMD's with avx512_bf16 those are
// AVX3_ZEN5 and AVX3_BF16 (Zen 4's, on Zen 5 the second best): any CPU with
// avx512_bf16 can run both, though for Intel's it is the slower way to
// multiply. Others with AVX-512 run the f32 and f16 kernels of the latter,
// AVX3_ZEN4.
VARLANE_EXPORT std::vector<std::string> SupportedSimdTargets();

}  // namespace varlane

#endif  // VARLANE_ATTENTION_H_
