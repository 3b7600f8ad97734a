// StepVerifier: recomputes a share of a step's output rows from scratch.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/replay_verify.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "tools/kv_synth.h"
#include "tools/status_util.h"

namespace varlane::tools {

StepVerifier::StepVerifier(const ModelShape& model, DType kv_dtype,
                           double share, const Workload* workload,
                           Runtime* runtime)
    : model_(model),
      kv_dtype_(kv_dtype),
      share_(share),
      workload_(workload),
      runtime_(runtime),
      scratch_(static_cast<size_t>(runtime->num_workers())) {}

int64_t StepVerifier::ScratchBytes(const ModelShape& model,
                                   int64_t max_context) {
  // K, V and the reference's weights, in double precision.
  return max_context * (2 * int64_t{model.head_size} + 1) *
         int64_t{sizeof(double)};
}

void StepVerifier::Sample(const StepEntry& entry, int64_t first_token,
                          int layer, int kv_head, const StepBuffers& buffers,
                          std::vector<Row>* rows) const {
  rows->clear();
  const int group = model_.num_q_heads / model_.num_kv_heads;
  for (int64_t i = 0; i < entry.count; ++i) {
    const int64_t token = first_token + i;
    const SynthToken& identity = buffers.tokens()[static_cast<size_t>(token)];
    for (int g = 0; g < group; ++g) {
      const int head = kv_head * group + g;
      if (SynthUniform(identity, layer, head) < share_) {
        rows->push_back({token, entry.begin + i, head});
      }
    }
  }
}

double StepVerifier::MakeKeys(int64_t request, int64_t num_keys, int layer,
                              int kv_head, Scratch* scratch) const {
  const auto d = static_cast<size_t>(model_.head_size);
  scratch->k.resize(static_cast<size_t>(num_keys) * d);
  scratch->v.resize(static_cast<size_t>(num_keys) * d);
  double norm = 0;
  for (int64_t p = 0; p < num_keys; ++p) {
    const SynthToken token = workload_->TokenAt(request, p);
    const size_t at = static_cast<size_t>(p) * d;
    const std::span<double> k = std::span(scratch->k).subspan(at, d);
    FillSynthRow(token, layer, SynthKind::kKey, kv_head, k);
    FillSynthRow(token, layer, SynthKind::kValue, kv_head,
                 std::span(scratch->v).subspan(at, d));
    norm = std::max(norm, Norm(k));
  }
  return norm;
}

void StepVerifier::CheckRows(const StepEntry& entry, int layer, int kv_head,
                             StepBuffers* buffers, Scratch* scratch) const {
  // Rows are in order of position: the last sees the most.
  const int64_t num_keys = scratch->rows.back().position + 1;
  const double norm =
      MakeKeys(entry.request, num_keys, layer, kv_head, scratch);
  const auto d = static_cast<size_t>(model_.head_size);
  scratch->q.resize(d);
  for (const Row& row : scratch->rows) {
    FillSynthRow(buffers->tokens()[static_cast<size_t>(row.token)], layer,
                 SynthKind::kQuery, row.head, std::span(scratch->q));
    ReferenceRow reference;
    reference.q = scratch->q;
    reference.k = scratch->k.data();
    reference.v = scratch->v.data();
    reference.num_keys = row.position + 1;
    reference.v_head_size = model_.head_size;
    reference.scale = 1.0 / std::sqrt(static_cast<double>(model_.head_size));
    const RowPrecision precision{kv_dtype_,
                                 reference.scale * Norm(scratch->q) * norm};
    const int64_t index = row.token * model_.num_q_heads + row.head;
    scratch->verifier.Check(
        reference, precision,
        std::span<const float>(buffers->out() + index * model_.head_size, d),
        buffers->lse() + index,
        fmt::format("request {}, position {}, layer {}, head {}", entry.request,
                    row.position, layer, row.head));
  }
}

Status StepVerifier::CheckLayer(const Step& step, int layer,
                                StepBuffers* buffers) {
  const int64_t kv_heads = model_.num_kv_heads;
  const Grid grid{static_cast<int64_t>(step.entries.size()) * kv_heads};
  return runtime_->Launch(grid, [&](const Threadgroup& group) {
    const auto index = static_cast<size_t>(group.index() / kv_heads);
    const auto kv_head = static_cast<int>(group.index() % kv_heads);
    const StepEntry& entry = step.entries[index];
    Scratch& scratch = scratch_[static_cast<size_t>(group.worker())];
    Sample(entry, step.cu_seqlens_q[index], layer, kv_head, *buffers,
           &scratch.rows);
    if (scratch.rows.empty()) return;
    CheckRows(entry, layer, kv_head, buffers, &scratch);
  });
}

VerifyResult StepVerifier::result() const {
  VerifyResult total;
  for (const Scratch& scratch : scratch_) {
    total.Merge(scratch.verifier.result());
  }
  return total;
}

}  // namespace varlane::tools
