// SPDX-License-Identifier: Apache-2.0

#include "memory/budget_planner.h"

#include <utility>

#include "base/check.h"
#include "base/strings.h"
#include "memory/budget_draft.h"

namespace varlane {
namespace {

Status PlanInto(BudgetDraft* draft) {
  switch (draft->request.policy) {
    case BudgetPolicy::kClaim:
      return PlanClaim(draft);
    case BudgetPolicy::kCapped:
      return PlanCapped(draft);
    case BudgetPolicy::kCommitted:
      return PlanCommitted(draft);
    case BudgetPolicy::kFixed:
      return PlanFixed(draft);
  }
  return {StatusCode::kInvalidArgument,
          StrCat("policy = ", static_cast<int>(draft->request.policy),
                 ", must be claim, capped, committed or fixed")};
}

}  // namespace

Result<MemoryBudget> PlanByPolicy(const BudgetRequest& request,
                                  const KvLayout& layout,
                                  const MemoryLimits& limits) {
  BudgetDraft draft(request, layout, limits);
  VARLANE_RETURN_IF_ERROR(PlanInto(&draft));
  return std::move(draft.out);
}

}  // namespace varlane
