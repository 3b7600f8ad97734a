// Running a plan: threadgroups over the runtime, kernels over the pool.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_RUN_H_
#define VARLANE_ATTENTION_RUN_H_

#include <stop_token>

#include "attention/plan.h"
#include "kernels/kernel_table.h"
#include "varlane/attention.h"
#include "varlane/runtime.h"

namespace varlane {

// Errors: as Attention::Run.
Status RunPlan(Runtime* runtime, const KernelTable& table,
               AttentionPlan::Impl* plan, const KvView& kv, int layer,
               const AttentionTensors& tensors, LaunchReport* report,
               std::stop_token stop);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_RUN_H_
