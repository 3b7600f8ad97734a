// BuildStep: writes a step's arrays from the requests chosen for it.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SERVING_STEP_BUILDER_H_
#define VARLANE_SERVING_STEP_BUILDER_H_

#include <span>

#include "serving/request_queue.h"
#include "varlane/kv_pool.h"
#include "varlane/scheduler.h"

namespace varlane {

// Makes `step` the empty step, keeping its memory. Throws std::bad_alloc.
void ClearStep(Step* step);

// Fills `step` with `plan`, in its order: request i brings its positions
// [computed, length), which the pool has given it room for already. Table
// entries past a sequence's blocks are -1.
// Throws std::bad_alloc; `step` is unspecified then and after an error.
Status BuildStep(const KvPool& pool, std::span<TrackedRequest* const> plan,
                 Step* step);

}  // namespace varlane

#endif  // VARLANE_SERVING_STEP_BUILDER_H_
