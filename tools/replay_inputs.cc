// What a replay feeds to attention.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/replay_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <span>

#include "tools/status_util.h"

namespace varlane::tools {

Result<Workload> Workload::Create(const Trace& trace, double scale_lengths) {
  Workload workload;
  workload.requests_ = trace.requests;
  for (size_t i = 0; i < workload.requests_.size(); ++i) {
    TraceRequest& request = workload.requests_[i];
    for (int64_t* length : {&request.input_tokens, &request.output_tokens}) {
      const double scaled =
          std::ceil(static_cast<double>(*length) * scale_lengths);
      if (scaled > static_cast<double>(kMaxTraceTokens)) {
        return BadArgument("request {}: {} tokens x {} is more than {}", i,
                           *length, scale_lengths, kMaxTraceTokens);
      }
      *length = std::max<int64_t>(1, static_cast<int64_t>(scaled));
    }
  }
  workload.hash_block_tokens_ = std::max<int64_t>(
      1, std::llround(static_cast<double>(kHashBlockTokens) * scale_lengths));
  for (const TraceRequest& request : workload.requests_) {
    for (const int64_t hash_id : request.hash_ids) {
      workload.hash_numbers_.try_emplace(
          hash_id, static_cast<int32_t>(workload.hash_numbers_.size()));
    }
  }
  const auto streams = static_cast<int64_t>(workload.hash_numbers_.size()) +
                       std::ssize(workload.requests_);
  if (streams > std::numeric_limits<int32_t>::max()) {
    return BadArgument(
        "{} requests and hash_ids are more than token ids can "
        "tell apart",
        streams);
  }
  return workload;
}

std::optional<int64_t> Workload::HashIdAt(int64_t id, int64_t position) const {
  const TraceRequest& r = request(id);
  if (position >= r.input_tokens || r.hash_ids.empty()) return std::nullopt;
  const int64_t last = static_cast<int64_t>(r.hash_ids.size()) - 1;
  const int64_t block = std::min(position / hash_block_tokens_, last);
  return r.hash_ids[static_cast<size_t>(block)];
}

SynthToken Workload::TokenAt(int64_t id, int64_t position) const {
  const std::optional<int64_t> hash_id = HashIdAt(id, position);
  return {hash_id ? HashIdStream(*hash_id) : RequestStream(id), position};
}

int32_t Workload::TokenIdAt(int64_t id, int64_t position) const {
  const std::optional<int64_t> hash_id = HashIdAt(id, position);
  if (hash_id) return hash_numbers_.at(*hash_id);
  return static_cast<int32_t>(static_cast<int64_t>(hash_numbers_.size()) + id);
}

std::vector<int32_t> Workload::Prompt(int64_t id) const {
  std::vector<int32_t> prompt;
  prompt.reserve(static_cast<size_t>(request(id).input_tokens));
  for (int64_t p = 0; p < request(id).input_tokens; ++p) {
    prompt.push_back(TokenIdAt(id, p));
  }
  return prompt;
}

int64_t Workload::input_tokens() const {
  int64_t sum = 0;
  for (const TraceRequest& r : requests_) sum += r.input_tokens;
  return sum;
}

int64_t Workload::output_tokens() const {
  int64_t sum = 0;
  for (const TraceRequest& r : requests_) sum += r.output_tokens;
  return sum;
}

int64_t Workload::PeakBlocks(int64_t count, int64_t block_size) const {
  std::vector<int64_t> blocks;
  for (const TraceRequest& r : requests_) {
    blocks.push_back((r.input_tokens + r.output_tokens + block_size - 1) /
                     block_size);
  }
  std::sort(blocks.rbegin(), blocks.rend());
  blocks.resize(std::min(blocks.size(), static_cast<size_t>(count)));
  int64_t sum = 0;
  for (const int64_t b : blocks) sum += b;
  return sum;
}

int64_t StepBuffers::BytesFor(const ModelShape& model, int64_t tokens) {
  const int64_t q = int64_t{model.num_q_heads} * model.head_size;
  const int64_t kv = int64_t{model.num_kv_heads} * model.head_size;
  const int64_t bf16_bytes = (q + 2 * kv) * int64_t{sizeof(BF16)};
  const int64_t f32_bytes = (q + model.num_q_heads) * int64_t{sizeof(float)};
  return tokens * (bf16_bytes + f32_bytes + int64_t{sizeof(SynthToken)});
}

Status StepBuffers::Prepare(const Step& step) {
  const auto total = static_cast<size_t>(step.total_q());
  const auto q_heads = static_cast<size_t>(model_.num_q_heads);
  const auto kv_heads = static_cast<size_t>(model_.num_kv_heads);
  const auto head_size = static_cast<size_t>(model_.head_size);
  try {
    tokens_.clear();
    tokens_.reserve(total);
    q_.resize(total * q_heads * head_size);
    k_.resize(total * kv_heads * head_size);
    v_.resize(total * kv_heads * head_size);
    out_.resize(total * q_heads * head_size);
    lse_.resize(total * q_heads);
  } catch (const std::bad_alloc&) {
    return Fail(StatusCode::kResourceExhausted,
                "no memory for the activations of {} tokens", total);
  }
  for (const StepEntry& entry : step.entries) {
    for (int64_t i = 0; i < entry.count; ++i) {
      tokens_.push_back(workload_->TokenAt(entry.request, entry.begin + i));
    }
  }
  return {};
}

namespace {

// Fills all heads of one token.
void FillHeads(SynthToken token, int layer, SynthKind kind, int heads,
               int head_size, BF16* to) {
  for (int head = 0; head < heads; ++head) {
    FillSynthRow(token, layer, kind, head,
                 std::span<BF16>(to + int64_t{head} * head_size,
                                 static_cast<size_t>(head_size)));
  }
}

}  // namespace

Status StepBuffers::Generate(int layer, Runtime* runtime) {
  constexpr int64_t kTokens = 16;  // of a threadgroup: some 50 us
  const auto total = static_cast<int64_t>(tokens_.size());
  const int64_t q_stride = int64_t{model_.num_q_heads} * model_.head_size;
  const int64_t kv_stride = int64_t{model_.num_kv_heads} * model_.head_size;
  const Grid grid{(total + kTokens - 1) / kTokens};
  const auto body = [&](const Threadgroup& group) {
    const int64_t begin = group.index() * kTokens;
    for (int64_t t = begin; t < std::min(begin + kTokens, total); ++t) {
      const SynthToken token = tokens_[static_cast<size_t>(t)];
      FillHeads(token, layer, SynthKind::kQuery, model_.num_q_heads,
                model_.head_size, q_.data() + t * q_stride);
      FillHeads(token, layer, SynthKind::kKey, model_.num_kv_heads,
                model_.head_size, k_.data() + t * kv_stride);
      FillHeads(token, layer, SynthKind::kValue, model_.num_kv_heads,
                model_.head_size, v_.data() + t * kv_stride);
    }
  };
  return runtime->Launch(grid, body, {.name = "make inputs"});
}

}  // namespace varlane::tools
