// plan --watch: one line for every change of the limits, of the pressure and of
// what a plan would grant.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_PLAN_WATCH_H_
#define VARLANE_TOOLS_PLAN_WATCH_H_

#include <string>

#include "varlane/kv_layout.h"
#include "varlane/memory_budget.h"
#include "varlane/status.h"

namespace varlane::tools {

struct PlanWatchOptions {
  std::string memory_root;     // "" = this machine
  double interval_s = 1;       // between two looks, beside those of events
  double for_s = 0;            // 0 = until SIGINT or SIGTERM
  double change_share = 0.01;  // of a limit: less counts as no change
};

// Prints until the time is up or a signal comes, both of which are ok.
Status WatchPlan(const PlanWatchOptions& options, const BudgetRequest& request,
                 const KvLayout& layout);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_PLAN_WATCH_H_
