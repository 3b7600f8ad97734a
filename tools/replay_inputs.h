// What a replay feeds to attention: the tokens' identity, and Q/K/V from it.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_REPLAY_INPUTS_H_
#define VARLANE_TOOLS_REPLAY_INPUTS_H_

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tools/kv_synth.h"
#include "tools/model_presets.h"
#include "tools/trace.h"
#include "varlane/dtype.h"
#include "varlane/huge_page_allocator.h"
#include "varlane/runtime.h"
#include "varlane/scheduler.h"
#include "varlane/status.h"

namespace varlane::tools {

// The requests of a trace with their lengths scaled, and what their tokens are.
//
// A token is a function of (request, position) alone - or, where the trace says
// that prompts share blocks, of (hash_id, position) - so a request computed
// again after a preemption, or in other chunks, sees the same content.
class Workload {
 public:
  // Lengths are multiplied by `scale_lengths`, rounded up; so a hash_id stands
  // for 512 x scale_lengths tokens.
  // Errors: kInvalidArgument naming row and length when a length passes 2^30,
  //         or more than 2^31 - 1 requests and hash_ids in all.
  static Result<Workload> Create(const Trace& trace, double scale_lengths);

  int64_t size() const { return static_cast<int64_t>(requests_.size()); }
  const TraceRequest& request(int64_t id) const {
    return requests_[static_cast<size_t>(id)];
  }
  SynthToken TokenAt(int64_t id, int64_t position) const;
  // The id that stands for it in a prefix cache. Equal ids at equal positions
  // are equal tokens, and the other way round: an id says the stream, in dense
  // numbers and not by a hash, so that two never collide.
  int32_t TokenIdAt(int64_t id, int64_t position) const;
  // The ids of the request's prompt. Throws std::bad_alloc.
  std::vector<int32_t> Prompt(int64_t id) const;

  int64_t input_tokens() const;  // of all requests
  int64_t output_tokens() const;
  // Blocks that the `count` longest requests hold at their end.
  int64_t PeakBlocks(int64_t count, int64_t block_size) const;

 private:
  // Where the trace says so.
  std::optional<int64_t> HashIdAt(int64_t id, int64_t position) const;

  std::vector<TraceRequest> requests_;
  int64_t hash_block_tokens_ = kHashBlockTokens;
  // hash_id -> its number; requests' own streams are numbered behind them.
  std::unordered_map<int64_t, int32_t> hash_numbers_;
};

// Q, K, V and the outputs of one step and layer, reused. Values are bf16.
class StepBuffers {
 public:
  StepBuffers(const ModelShape& model, const Workload* workload)
      : model_(model), workload_(workload) {}

  // Bytes for `tokens` tokens, the outputs included.
  static int64_t BytesFor(const ModelShape& model, int64_t tokens);

  // Sizes the buffers and names the step's tokens. Errors: kResourceExhausted.
  Status Prepare(const Step& step);
  // Fills q, k and v of `layer` on `runtime`'s workers.
  Status Generate(int layer, Runtime* runtime);

  const std::vector<SynthToken>& tokens() const { return tokens_; }
  const BF16* q() const { return q_.data(); }  // [total_q, Hq, D]
  const BF16* k() const { return k_.data(); }  // [total_q, Hkv, D]
  const BF16* v() const { return v_.data(); }
  float* out() { return out_.data(); }  // [total_q, Hq, D]
  float* lse() { return lse_.data(); }  // [total_q, Hq]

 private:
  ModelShape model_;
  const Workload* workload_;
  std::vector<SynthToken> tokens_;  // [total_q]
  HugePageVector<BF16> q_;
  std::vector<BF16> k_;
  std::vector<BF16> v_;
  HugePageVector<float> out_;
  std::vector<float> lse_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_REPLAY_INPUTS_H_
