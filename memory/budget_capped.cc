// The capped policy: a share of what is left below a cap.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/strings.h"
#include "memory/budget_draft.h"

namespace varlane {
namespace {

// Where the cap changes from 2/3 to 3/4 of total. The "36 GB" are binary:
// mistral.rs compares MiB with 36 * 1024
// (mistralrs-core/src/utils/memory_usage.rs).
constexpr int64_t kSmallMachineBytes = int64_t{36} << 30;

int64_t Cap(const BudgetDraft& draft) {
  const int64_t total = draft.limits.total_bytes;
  return total <= kSmallMachineBytes ? total * 2 / 3
                                     : total / 4 * 3 + total % 4 * 3 / 4;
}

int64_t CappedKv(const BudgetDraft& draft, int64_t wanted, double utilisation) {
  return ScaleBytes(std::min(wanted, Cap(draft)), utilisation) -
         draft.total.used_bytes - draft.still_to_come;
}

std::string CappedRemedy(const BudgetDraft& draft, int64_t wanted) {
  const double share = NearestFit(draft.request.utilisation, [&](double u) {
    return draft.Fits(CappedKv(draft, wanted, u));
  });
  if (share > 0) {
    return StrCat("a utilisation of ", FormatShare(share), " would fit");
  }
  const int64_t least =
      draft.total.used_bytes + draft.still_to_come + draft.block_bytes;
  const double hint =
      std::ceil(static_cast<double>(least) / draft.request.utilisation) + 1;
  if (hint <= static_cast<double>(Cap(draft)) &&
      draft.Fits(CappedKv(draft, static_cast<int64_t>(hint),
                          draft.request.utilisation))) {
    return StrCat("hint_bytes of ", static_cast<int64_t>(hint), " (",
                  FormatBytes(static_cast<int64_t>(hint)), ") would fit");
  }
  // Nobody gets the full total here: 2/3 of it have to hold the least.
  return StrCat("no utilisation fits; ",
                draft.ChangeTheLimit(least / 2 * 3 + 3));
}

}  // namespace

// `used` is what is in use once the model is loaded, as mistral.rs counts it:
// today's use, and the weights and peak that are still to come.
Status PlanCapped(BudgetDraft* in) {
  BudgetDraft& draft = *in;
  VARLANE_RETURN_IF_ERROR(draft.RequireLimits());
  const int64_t cap = Cap(draft);
  const int64_t wanted =
      draft.request.hint_bytes > 0 ? draft.request.hint_bytes : cap;
  const int64_t bytes = CappedKv(draft, wanted, draft.request.utilisation);
  draft.TotalTerm();
  draft.Term("cap", cap,
             draft.limits.total_bytes <= kSmallMachineBytes
                 ? "total x 2/3, for up to 36 GiB"
                 : "total x 3/4, for more than 36 GiB");
  if (draft.request.hint_bytes > 0) {
    draft.Term("hint", wanted,
               wanted <= cap ? "wanted" : "wanted, but the cap is less");
  }
  draft.Term("usable",
             ScaleBytes(std::min(wanted, cap), draft.request.utilisation),
             StrCat("x utilisation ", FormatShare(draft.request.utilisation)));
  draft.Term("used", -draft.total.used_bytes,
             StrCat("in use under ", draft.total.name));
  draft.OverheadTerms(/*subtract_resident=*/false);
  draft.Term("KV budget", bytes, "usable less the above");
  draft.AvailableTerms();
  if (draft.Fits(bytes)) return draft.Grant(bytes, draft.total.name);

  const bool too_small = bytes < draft.block_bytes;
  std::string text =
      StrCat("capped at ", FormatBytes(std::min(wanted, cap)), " x ",
             FormatShare(draft.request.utilisation), " - ",
             FormatBytes(draft.total.used_bytes), " in use",
             draft.still_to_come > 0 ? " - " : "",
             draft.still_to_come > 0
                 ? FormatBytes(draft.still_to_come) + " still to come"
                 : "",
             " leaves ", FormatBytes(bytes), " for KV");
  if (too_small) {
    text += StrCat(", less than ", draft.Block(), ", under ",
                   draft.Describe(draft.total));
  } else {
    text += StrCat(", but ", draft.OnlyAvailable());
  }
  return draft.Refuse(bytes,
                      too_small ? draft.total.name : draft.available.name,
                      StrCat(text, "; ", CappedRemedy(draft, wanted)));
}

}  // namespace varlane
