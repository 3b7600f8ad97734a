// AttentionCase: one ragged batch with contiguous Q, K, V, from a file or made.
//
// The file's contract (`varlane attend --help`): tensors q [total_q, Hq, D],
// k [total_kv, Hkv, D], v [total_kv, Hkv, Dv] in F32, BF16 or F16, packed by
// sequence; cu_seqlens_q, cu_seqlens_k I32 [N+1]; optional alibi_slopes, sinks
// F32 [Hq]; metadata scale, causal, window, softcap. docs/attend.md says what
// each means. What we do not know is refused by name, never ignored.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_ATTENTION_CASE_H_
#define VARLANE_TOOLS_ATTENTION_CASE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/batch_spec.h"
#include "varlane/dtype.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::tools {

// [tokens, heads, head_size], contiguous.
struct CaseTensor {
  DType dtype = DType::kF32;
  int64_t tokens = 0;
  int heads = 0;
  int head_size = 0;
  std::vector<std::byte> bytes;

  int64_t Offset(int64_t token, int head) const {
    return (token * heads + head) * head_size;  // elements
  }
  // Cold path: one element as fp32.
  float Get(int64_t element) const;
};

struct AttentionCase {
  std::string source;
  CaseTensor q;
  CaseTensor k;
  CaseTensor v;
  std::vector<int32_t> cu_seqlens_q;  // [N+1]
  std::vector<int32_t> cu_seqlens_k;  // [N+1]
  double scale = 0;                   // never 0 once loaded
  bool causal = true;
  int32_t window = 0;               // tokens, the row's own included; 0 = none
  double softcap = 0;               // 0 = none
  std::vector<float> alibi_slopes;  // [Hq], or empty
  std::vector<float> sinks;         // [Hq], or empty

  int64_t num_seqs() const {
    return static_cast<int64_t>(cu_seqlens_q.size()) - 1;
  }
  int32_t q_len(int64_t i) const;
  int32_t kv_len(int64_t i) const;
};

// Errors: those of SafetensorsFile; kInvalidArgument naming tensor or metadata
//         key, value and what was expected; kUnimplemented for a scale of zero.
Result<AttentionCase> LoadAttentionCase(const std::string& path);

struct RandomCaseShape {
  int num_q_heads = 16;
  int num_kv_heads = 4;
  int head_size = 128;
  uint64_t seed = 0;
};

// Fills a case with synthetic bf16 values (kv_synth.h), on `runtime`'s workers.
// Errors: kInvalidArgument (shape), kResourceExhausted.
Result<AttentionCase> MakeRandomCase(const BatchSpec& spec,
                                     const RandomCaseShape& shape,
                                     Runtime* runtime);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_ATTENTION_CASE_H_
