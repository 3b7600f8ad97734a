// The committed and the fixed policy: a size from the caller.
//
// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/strings.h"
#include "memory/budget_draft.h"
#include "memory/budget_planner.h"

namespace varlane {
namespace {

// KV of `tokens`, in whole blocks, with its terms.
Result<int64_t> BytesOfTokens(BudgetDraft* in, const char* field,
                              int64_t tokens) {
  BudgetDraft& draft = *in;
  const int64_t token_bytes = draft.layout.token_bytes();
  const int64_t most = (kMaxBudgetBytes - draft.block_bytes) / token_bytes;
  VARLANE_REQUIRE_ARG(tokens <= most, field, " = ", tokens, " of ",
                      FormatBytes(token_bytes), " each, must be at most ",
                      most);
  const int64_t plain =
      int64_t{draft.layout.num_layers} * draft.layout.num_kv_heads *
      (draft.layout.head_size + draft.layout.v_head_size) *
      static_cast<int64_t>(SizeOf(draft.layout.dtype)) * tokens;
  const int64_t bytes =
      DivCeil<int64_t>(tokens, draft.layout.block_size) * draft.block_bytes;
  draft.Term(
      "KV of tokens", plain,
      StrCat(draft.layout.num_layers, " layers x ", draft.layout.num_kv_heads,
             " KV heads x (", draft.layout.head_size, " + ",
             draft.layout.v_head_size, ") x ", tokens, " tokens x ",
             SizeOf(draft.layout.dtype), " B"));
  if (bytes > plain) {
    draft.Term(
        "padding", bytes - plain,
        StrCat("to whole blocks of ", draft.layout.block_size,
               " tokens and V rows of ", draft.layout.v_head_size_padded()));
  }
  return bytes;
}

}  // namespace

Status PlanCommitted(BudgetDraft* in) {
  BudgetDraft& draft = *in;
  VARLANE_REQUIRE_ARG(draft.request.context_tokens > 0,
                      "context_tokens = ", draft.request.context_tokens,
                      ", must be positive for policy committed");
  const Result<int64_t> bytes =
      BytesOfTokens(&draft, "context_tokens", draft.request.context_tokens);
  VARLANE_RETURN_IF_ERROR(bytes.status());
  VARLANE_RETURN_IF_ERROR(draft.Grant(*bytes, ""));
  if (!draft.limits.limits.empty() && !draft.Fits(*bytes)) {
    // Granted all the same: this policy commits without a look. Say so.
    draft.out.binding_limit = draft.available.name;
    draft.out.terms.back().note +=
        StrCat("; exceeds the ", FormatBytes(draft.room_bytes),
               " available under ", draft.Describe(draft.available));
    if (draft.still_to_come > 0) {
      draft.out.terms.back().note +=
          StrCat(", of which ", FormatBytes(draft.still_to_come),
                 " go to weights and peak");
    }
  }
  return {};
}

Status PlanFixed(BudgetDraft* in) {
  BudgetDraft& draft = *in;
  VARLANE_REQUIRE_ARG(
      (draft.request.fixed_bytes > 0) != (draft.request.fixed_tokens > 0),
      "fixed_bytes = ", draft.request.fixed_bytes,
      " and fixed_tokens = ", draft.request.fixed_tokens,
      ", exactly one must be positive for policy fixed");
  int64_t bytes = draft.request.fixed_bytes;
  if (bytes > 0) {
    draft.Term("KV bytes", bytes, "fixed by the caller");
  } else {
    const Result<int64_t> of_tokens =
        BytesOfTokens(&draft, "fixed_tokens", draft.request.fixed_tokens);
    VARLANE_RETURN_IF_ERROR(of_tokens.status());
    bytes = *of_tokens;
  }
  if (bytes < draft.block_bytes) {
    return draft.Refuse(
        bytes, "fixed_bytes",
        StrCat("fixed_bytes = ", bytes, " is less than ", draft.Block(), "; ",
               draft.block_bytes, " would fit one"));
  }
  // An embedder that has no limits to give is taken by his word.
  if (draft.limits.limits.empty()) return draft.Grant(bytes, "");
  draft.AvailableTerms();
  if (draft.Fits(bytes)) return draft.Grant(bytes, draft.available.name);

  const int64_t blocks = draft.MostBlocks();
  std::string text =
      StrCat("fixed KV of ", FormatBytes(bytes),
             draft.still_to_come > 0
                 ? StrCat(" and ", FormatBytes(draft.still_to_come),
                          " of weights and peak to come")
                 : std::string(),
             ", but ", draft.OnlyAvailable(), "; ");
  text += blocks > 0
              ? StrCat("fixed_bytes of ", blocks * draft.block_bytes, " (",
                       FormatBytes(blocks * draft.block_bytes), ", ",
                       blocks * draft.layout.block_size, " tokens) would fit")
              : StrCat("no size fits; ", draft.ChangeTheLimit(0));
  return draft.Refuse(bytes, draft.available.name, std::move(text));
}

}  // namespace varlane
