// The claim policy: a share of all memory.
//
// SPDX-License-Identifier: Apache-2.0

#include <string>

#include "base/check.h"
#include "base/strings.h"
#include "memory/budget_draft.h"

namespace varlane {
namespace {

int64_t ClaimKv(const BudgetDraft& draft, double fraction) {
  return ScaleBytes(draft.limits.total_bytes, fraction) -
         draft.request.weights_bytes - draft.request.profile_peak_bytes;
}

std::string ClaimRemedy(const BudgetDraft& draft) {
  if (draft.out.fitting_fraction > 0) {
    return StrCat("a fraction of ", FormatShare(draft.out.fitting_fraction),
                  " would fit");
  }
  const int64_t least = draft.request.weights_bytes +
                        draft.request.profile_peak_bytes + draft.block_bytes;
  if (draft.limits.total_bytes >= least && draft.Fits(draft.block_bytes)) {
    return StrCat(
        "no fraction of four decimals fits, but the fixed policy "
        "with ",
        FormatBytes(draft.block_bytes), " would");
  }
  return StrCat("no fraction fits; ", draft.ChangeTheLimit(least));
}

std::string ClaimRefusal(const BudgetDraft& draft, int64_t claim, int64_t bytes,
                         bool too_small) {
  std::string text = StrCat("claim of ", FormatShare(draft.request.fraction),
                            " x ", FormatBytes(draft.limits.total_bytes));
  if (too_small) {
    text += StrCat(" = ", FormatBytes(claim), " under ",
                   draft.Describe(draft.total));
    text += bytes <= 0 && claim > 0
                ? StrCat(" is used up by ", draft.OverheadText(true),
                         "nothing is left for KV")
                : StrCat(" leaves ", FormatBytes(bytes), " for KV, less than ",
                         draft.Block());
  } else {
    // Loaded weights are in use already; the others need room like KV does.
    if (draft.request.weights_resident && draft.request.weights_bytes > 0) {
      text += StrCat(" - weights ", FormatBytes(draft.request.weights_bytes),
                     " = ", FormatBytes(claim - draft.request.weights_bytes));
    } else {
      text += StrCat(" = ", FormatBytes(claim));
    }
    if (draft.still_to_come > 0) {
      text += StrCat(" (", draft.OverheadText(false), "KV ", FormatBytes(bytes),
                     ")");
    }
    text += StrCat(", but ", draft.OnlyAvailable());
  }
  return StrCat(text, "; ", ClaimRemedy(draft));
}

}  // namespace

Status PlanClaim(BudgetDraft* in) {
  BudgetDraft& draft = *in;
  VARLANE_RETURN_IF_ERROR(draft.RequireLimits());
  const int64_t claim =
      ScaleBytes(draft.limits.total_bytes, draft.request.fraction);
  const int64_t bytes = ClaimKv(draft, draft.request.fraction);
  draft.TotalTerm();
  draft.Term("claim", claim,
             StrCat("total x fraction ", FormatShare(draft.request.fraction)));
  draft.OverheadTerms(/*subtract_resident=*/true);
  draft.Term("KV budget", bytes, "claim less the above");
  draft.AvailableTerms();
  if (draft.Fits(bytes)) return draft.Grant(bytes, draft.total.name);

  draft.out.fitting_fraction =
      NearestFit(draft.request.fraction,
                 [&](double f) { return draft.Fits(ClaimKv(draft, f)); });
  const bool too_small = bytes < draft.block_bytes;
  return draft.Refuse(bytes,
                      too_small ? draft.total.name : draft.available.name,
                      ClaimRefusal(draft, claim, bytes, too_small));
}

}  // namespace varlane
