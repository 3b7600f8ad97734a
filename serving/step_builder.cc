// SPDX-License-Identifier: Apache-2.0

#include "serving/step_builder.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"

namespace varlane {

void ClearStep(Step* step) {
  step->entries.clear();
  step->cu_seqlens_q.assign(1, 0);
  step->seq_lens.clear();
  step->block_tables.clear();
  step->block_table_stride = 0;
  step->slot_mapping.clear();
}

Status BuildStep(const KvPool& pool, std::span<TrackedRequest* const> plan,
                 Step* step) {
  ClearStep(step);
  const int64_t block_size = pool.layout().block_size;
  int64_t total_q = 0;
  for (const TrackedRequest* request : plan) {
    const int64_t count = request->length - request->computed;
    total_q += count;
    step->entries.push_back({.request = request->request.id,
                             .sequence = request->sequence,
                             .begin = request->computed,
                             .count = count,
                             .is_prefill = request->outstanding() > 1,
                             .samples = request->samples()});
    step->cu_seqlens_q.push_back(static_cast<int32_t>(total_q));
    step->seq_lens.push_back(static_cast<int32_t>(request->length));
    step->block_table_stride = std::max(step->block_table_stride,
                                        DivCeil(request->length, block_size));
  }
  const size_t stride = static_cast<size_t>(step->block_table_stride);
  step->block_tables.assign(plan.size() * stride, -1);
  step->slot_mapping.resize(static_cast<size_t>(total_q));
  for (size_t i = 0; i < plan.size(); ++i) {
    const StepEntry& entry = step->entries[i];
    const Result<int64_t> blocks = pool.CopyBlockTable(
        entry.sequence,
        std::span<int32_t>(step->block_tables).subspan(i * stride, stride));
    VARLANE_RETURN_IF_ERROR(blocks.status());
    VARLANE_RETURN_IF_ERROR(pool.CopySlotMapping(
        entry.sequence, entry.begin,
        std::span<int64_t>(step->slot_mapping)
            .subspan(static_cast<size_t>(step->cu_seqlens_q[i]),
                     static_cast<size_t>(entry.count))));
  }
  return {};
}

}  // namespace varlane
