// PlanMemoryBudget: arguments checked, then planned by policy.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/memory_budget.h"

#include <array>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/env.h"
#include "base/strings.h"
#include "memory/budget_planner.h"

namespace varlane {
namespace {

constexpr std::array<const char*, 4> kPolicyNames = {"claim", "capped",
                                                     "committed", "fixed"};

Status CheckShare(const char* field, double value) {
  // Negated, so that NaN is refused.
  VARLANE_REQUIRE_ARG(value > 0 && value <= 1, field, " = ", value,
                      ", must be in (0, 1]");
  return {};
}

Status CheckCount(const char* field, int64_t value) {
  VARLANE_REQUIRE_ARG(value >= 0 && value <= kMaxBudgetBytes, field, " = ",
                      value, ", must be in [0, ", kMaxBudgetBytes, "]");
  return {};
}

Status Validate(const BudgetRequest& request) {
  VARLANE_RETURN_IF_ERROR(CheckShare("fraction", request.fraction));
  VARLANE_RETURN_IF_ERROR(CheckShare("utilisation", request.utilisation));
  const std::pair<const char*, int64_t> counts[] = {
      {"weights_bytes", request.weights_bytes},
      {"profile_peak_bytes", request.profile_peak_bytes},
      {"hint_bytes", request.hint_bytes},
      {"context_tokens", request.context_tokens},
      {"fixed_bytes", request.fixed_bytes},
      {"fixed_tokens", request.fixed_tokens},
  };
  for (const auto& [field, value] : counts) {
    VARLANE_RETURN_IF_ERROR(CheckCount(field, value));
  }
  return {};
}

Status Validate(const MemoryLimits& limits) {
  VARLANE_RETURN_IF_ERROR(CheckCount("limits.total_bytes", limits.total_bytes));
  return CheckCount("limits.available_bytes", limits.available_bytes);
}

}  // namespace

const char* BudgetPolicyName(BudgetPolicy policy) {
  const auto index = static_cast<size_t>(policy);
  return index < kPolicyNames.size() ? kPolicyNames[index] : "unknown";
}

std::optional<BudgetPolicy> ParseBudgetPolicy(std::string_view name) {
  for (size_t i = 0; i < kPolicyNames.size(); ++i) {
    if (name == kPolicyNames[i]) return static_cast<BudgetPolicy>(i);
  }
  return std::nullopt;
}

Result<MemoryBudget> PlanMemoryBudget(const BudgetRequest& request,
                                      const KvLayout& layout,
                                      const MemoryLimits& limits) try {
  VARLANE_RETURN_IF_ERROR(layout.Validate());
  VARLANE_RETURN_IF_ERROR(Validate(request));
  VARLANE_RETURN_IF_ERROR(Validate(limits));
  return PlanByPolicy(request, layout, limits);
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory to plan the memory budget");
}

Result<double> MemoryFractionFromEnvironment() {
  constexpr const char* kName = "VARLANE_MEMORY_FRACTION";
  const Result<std::optional<double>> value = EnvDouble(kName, 0, 1);
  VARLANE_RETURN_IF_ERROR(value.status());
  VARLANE_REQUIRE_ARG(value->value_or(1) > 0, "environment variable ", kName,
                      " = 0, expected a number in (0, 1]");
  return value->value_or(BudgetRequest().fraction);
}

}  // namespace varlane
