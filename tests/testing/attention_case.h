// One attention problem with everything around it: inputs, a paged cache packed
// by an independent scalar writer, poison everywhere else, and the oracle.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_ATTENTION_CASE_H_
#define VARLANE_TESTS_TESTING_ATTENTION_CASE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/runtime.h"

namespace varlane::testing {

struct SeqSpec {
  int q_len = 1;
  int kv_len = 1;
};

struct CaseSpec {
  std::vector<SeqSpec> seqs;
  int q_heads = 4;
  int kv_heads = 2;
  int head_size = 64;
  int v_head_size = 0;  // 0 = head_size
  int block_size = 16;
  DType kv_dtype = DType::kBF16;
  DType q_dtype = DType::kF32;
  bool round_q = true;  // to bf16 where the cache is, as the kernel does
  DType out_dtype = DType::kF32;
  bool causal = true;               // of every sequence, where masks is empty
  std::vector<SequenceMask> masks;  // [seqs], or empty
  double scale = 0;
  double softcap = 0;
  std::vector<float> alibi_slopes;  // [q_heads], or empty
  std::vector<float> sinks;         // [q_heads], or empty
  uint64_t seed = 1;                // of the inputs,
  int first_seq = 0;                // of which the first sequence is this one
  uint64_t layout_seed = 1;         // of the block tables
  int extra_blocks = 3;             // unreferenced

  int v_size() const { return v_head_size != 0 ? v_head_size : head_size; }
  int group() const { return q_heads / kv_heads; }
  int64_t total_q() const;
};

// What fills the bytes that no row may see.
enum class Poison : uint8_t { kNaN, kInf, kStale, kZero };

// Element (seq, position, head, dim) -> value. Rounded to the stored type.
using Fill = std::function<double(int seq, int pos, int head, int dim)>;

struct Output {
  std::vector<float> out;  // [total_q, Hq, Dv], widened
  std::vector<float> lse;  // [total_q, Hq]
  LaunchReport report;
};

class AttentionCase {
 public:
  // Random inputs of about unit variance unless fills are given.
  explicit AttentionCase(const CaseSpec& spec, const Fill& q = {},
                         const Fill& k = {}, const Fill& v = {},
                         Poison poison = Poison::kNaN);

  const CaseSpec& spec() const { return spec_; }
  KvView view() const;
  Batch batch() const;
  AttentionShape shape() const;
  ConstTensor q() const;

  // Plans and runs; fails the test on an error.
  Output Run(const Attention& attention, const PlanOptions& options = {}) const;

  // Elements as stored, i.e. rounded: one of q, or the first dims of K and V of
  // one token and KV head, as many as there is room for.
  double Q(int64_t token, int head, int dim) const;
  void LoadToken(int seq, int pos, int head, std::span<double> key,
                 std::span<double> value) const;

  // Keys that query token i of sequence s sees: [Begin, Limit), both >= 0.
  int64_t Begin(int seq, int i) const;
  int64_t Limit(int seq, int i) const;
  int64_t FirstToken(int seq) const;  // of the sequence, in q
  // Keys that some row of the sequence sees.
  std::pair<int64_t, int64_t> InView(int seq) const;

  // Has view() say that the blocks are those of a pool on `num_nodes` nodes:
  // each has as many, in the order of their ids.
  void SpreadOverNodes(int num_nodes);

  // Has view() shard the KV heads, as a pool on so many nodes does; NaN stands
  // between the shards.
  void ShardHeads(int num_shards);

  // Sets the table entries of blocks that no row sees to ids that are not
  // there. Returns how many.
  int HideBlocksOutOfView();

  // Compares every row with the fp64 oracle; see tolerance.h for the bounds.
  void ExpectMatchesReference(const Output& output) const;

  // Overwrites one token of one head (any slot of the sequence's blocks).
  void Poke(int seq, int pos, int kv_head, double value);

  std::vector<int32_t>& block_tables() { return block_tables_; }
  std::vector<int32_t>& seq_lens() { return seq_lens_; }
  std::vector<int32_t>& cu_seqlens_q() { return cu_seqlens_q_; }

 private:
  class RowFill;

  SequenceMask MaskOf(int seq) const;
  void LayOut();
  void FillQueries(const RowFill& q, DType precision);
  void FillCache(const RowFill& k, const RowFill& v, Poison poison);
  int64_t BlockOf(int seq, int pos) const;
  void StoreToken(int seq, int pos, int head, std::span<const double> key,
                  std::span<const double> value);

  CaseSpec spec_;
  KvLayout layout_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> block_tables_;
  int64_t stride_ = 0;
  int64_t num_blocks_ = 0;
  std::vector<std::atomic<int64_t>> node_blocks_;  // [nodes]; empty: one
  int64_t node_stride_ = 0;
  int num_shards_ = 1;
  int64_t shard_stride_ = 0;
  std::vector<std::byte> q_;  // [total_q, Hq, D] of q_dtype
  struct AlignedFree {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, AlignedFree> cache_;
};

// `value` rounded to `dtype` and back.
double Rounded(double value, DType dtype);
void StoreElement(void* base, DType dtype, int64_t index, double value);
double LoadElement(const void* base, DType dtype, int64_t index);

// Names a case by its dtype.
inline std::string DTypeParam(const ::testing::TestParamInfo<DType>& param) {
  return DTypeName(param.param);
}

// One sequence of a case, with the random inputs that it has there.
CaseSpec AloneOf(const CaseSpec& crowd, int seq);

// Rows [begin, end) of one sequence.
Output RowsOf(const AttentionCase& c, const Output& output, int seq, int begin,
              int end);

// Bitwise equality of out and lse, naming the first difference.
void ExpectSameBits(const Output& a, const Output& b, const std::string& what);

// Runs `c` by every owner pattern and partition mode, homes followed or not:
// the bits are those of `expected`, and every threadgroup with work and some
// bytes are counted by node. Requires: the nodes of its blocks are known.
void ExpectSameBitsOnNodes(const Output& expected, const AttentionCase& c,
                           const Attention& attention, const std::string& what);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_ATTENTION_CASE_H_
