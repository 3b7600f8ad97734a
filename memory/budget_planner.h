// The arithmetic and the words of the four budget policies.
//
// PlanMemoryBudget checks its arguments and then asks this. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BUDGET_PLANNER_H_
#define VARLANE_MEMORY_BUDGET_PLANNER_H_

#include <cstdint>

#include "varlane/kv_layout.h"
#include "varlane/memory_budget.h"
#include "varlane/status.h"

namespace varlane {

// Bounds every size of a request and of the limits that are reckoned with, so
// that sums of a few of them cannot overflow.
inline constexpr int64_t kMaxBudgetBytes = int64_t{1} << 60;

// Requires: layout is valid; sizes are in [0, kMaxBudgetBytes], shares in
//           (0, 1].
// Errors:   kInvalidArgument where the policy lacks a field, or limits.
Result<MemoryBudget> PlanByPolicy(const BudgetRequest& request,
                                  const KvLayout& layout,
                                  const MemoryLimits& limits);

}  // namespace varlane

#endif  // VARLANE_MEMORY_BUDGET_PLANNER_H_
