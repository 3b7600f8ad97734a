// SPDX-License-Identifier: Apache-2.0

#include "memory/budget_planner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/strings.h"

namespace varlane {
namespace {

// Where the cap of the capped policy changes from 2/3 to 3/4 of total. The "36
// GB" are binary: mistral.rs compares MiB with 36 * 1024
// (mistralrs-core/src/utils/memory_usage.rs).
constexpr int64_t kSmallMachineBytes = int64_t{36} << 30;

// bytes x share, share in (0, 1]; rounded down.
int64_t Scale(int64_t bytes, double share) {
  const double exact = static_cast<double>(bytes);
  const double scaled = exact * share;
  return scaled >= exact ? bytes : static_cast<int64_t>(scaled);
}

// As a person wrote it, with at least two decimals: "0.90", "0.125".
std::string FormatShare(double share) {
  std::array<char, 32> text{};
  for (int decimals = 2; decimals <= 6; ++decimals) {
    std::snprintf(text.data(), text.size(), "%.*f", decimals, share);
    if (std::strtod(text.data(), nullptr) == share) break;
  }
  return text.data();
}

// The share nearest to `wanted` with which `fits` holds: to two decimals, or
// to three or four where two are too coarse. 0 where none fits.
double NearestFit(double wanted, const std::function<bool(double)>& fits) {
  for (const int steps : {100, 1000, 10000}) {
    double best = 0;
    for (int i = 1; i <= steps; ++i) {
      const double share = static_cast<double>(i) / steps;
      const bool nearer =
          best == 0 || std::abs(share - wanted) < std::abs(best - wanted);
      if (nearer && fits(share)) best = share;
    }
    if (best > 0) return best;
  }
  return 0;
}

class Planner {
 public:
  Planner(const BudgetRequest& request, const KvLayout& layout,
          const MemoryLimits& limits)
      : request_(request),
        block_bytes_(layout.block_bytes()),
        layout_(layout),
        limits_(limits),
        total_(Limit(limits.binding_total)),
        available_(Limit(limits.binding_available)),
        still_to_come_((request.weights_resident ? 0 : request.weights_bytes) +
                       request.profile_peak_bytes) {
    out_.policy = request.policy;
  }

  Status Run() {
    switch (request_.policy) {
      case BudgetPolicy::kClaim:
        return PlanClaim();
      case BudgetPolicy::kCapped:
        return PlanCapped();
      case BudgetPolicy::kCommitted:
        return PlanCommitted();
      case BudgetPolicy::kFixed:
        return PlanFixed();
    }
    return {StatusCode::kInvalidArgument,
            StrCat("policy = ", static_cast<int>(request_.policy),
                   ", must be claim, capped, committed or fixed")};
  }

  MemoryBudget Take() { return std::move(out_); }

 private:
  // The limit with this index; stands in where limits were made by hand.
  MemoryLimit Limit(int index) const {
    if (index >= 0 && static_cast<size_t>(index) < limits_.limits.size()) {
      MemoryLimit limit = limits_.limits[static_cast<size_t>(index)];
      limit.used_bytes = std::min(limit.used_bytes, kMaxBudgetBytes);
      return limit;
    }
    return {"memory", limits_.total_bytes,
            limits_.total_bytes - limits_.available_bytes,
            limits_.available_bytes};
  }

  Status RequireLimits() const {
    VARLANE_REQUIRE_ARG(!limits_.limits.empty(), "limits is empty, but policy ",
                        BudgetPolicyName(request_.policy),
                        " needs those of MemoryLimits::Detect");
    return {};
  }

  static std::string Describe(const MemoryLimit& limit) {
    return StrCat(limit.name, " (limit ", FormatBytes(limit.limit_bytes), ", ",
                  FormatBytes(limit.used_bytes), " in use)");
  }

  std::string Block() const {
    return StrCat("one block of ", FormatBytes(block_bytes_));
  }

  void Term(std::string name, int64_t bytes, std::string note) {
    out_.terms.push_back({std::move(name), bytes, std::move(note)});
  }

  void TotalTerm() {
    Term("total", limits_.total_bytes,
         StrCat(total_.name, ", the smallest of ", limits_.limits.size(),
                limits_.limits.size() == 1 ? " limit" : " limits"));
  }

  void AvailableTerm() {
    Term("available", limits_.available_bytes,
         StrCat(available_.name, ", limit less non-reclaimable use"));
  }

  // Weights and peak, as the policy subtracts them.
  void OverheadTerms(bool subtract_resident) {
    if (request_.weights_bytes > 0) {
      if (!request_.weights_resident) {
        Term("weights", -request_.weights_bytes, "still to be loaded");
      } else if (subtract_resident) {
        Term("weights", -request_.weights_bytes, "loaded, already in use");
      }
    }
    if (request_.profile_peak_bytes > 0) {
      Term("profile peak", -request_.profile_peak_bytes,
           "activations and scratch");
    }
  }

  // Whether KV of `bytes` holds a block and leaves room for what is to come.
  bool Fits(int64_t bytes) const {
    return bytes >= block_bytes_ &&
           bytes + still_to_come_ <= limits_.available_bytes;
  }

  Status Grant(int64_t bytes, const std::string& binding_limit) {
    out_.granted = true;
    out_.bytes = bytes;
    out_.blocks = bytes / block_bytes_;
    out_.tokens = out_.blocks * layout_.block_size;
    out_.binding_limit = binding_limit;
    Term("KV pool", out_.blocks * block_bytes_,
         StrCat(out_.blocks, " blocks of ", FormatBytes(block_bytes_), " = ",
                out_.tokens, " tokens"));
    return {};
  }

  Status Refuse(int64_t bytes, const std::string& binding_limit,
                std::string text) {
    out_.bytes = std::max<int64_t>(bytes, 0);
    out_.binding_limit = binding_limit;
    out_.refusal = std::move(text);
    return {};
  }

  // "weights 1.20 GiB, peak 12 MiB, ", of those that are subtracted.
  std::string OverheadText(bool with_resident) const {
    std::string text;
    if (request_.weights_bytes > 0 &&
        (with_resident || !request_.weights_resident)) {
      text += StrCat("weights ", FormatBytes(request_.weights_bytes), ", ");
    }
    if (request_.profile_peak_bytes > 0) {
      text += StrCat("profile peak ", FormatBytes(request_.profile_peak_bytes),
                     ", ");
    }
    return text;
  }

  // What to change where no setting of the policy helps: the machine.
  // `need_total` is the least that the policy can do with.
  std::string ChangeTheLimit(int64_t need_total) const {
    const int64_t need_available = still_to_come_ + block_bytes_;
    std::string text = StrCat("the least that is needed is ",
                              OverheadText(true), Block(), ": ");
    const bool raise = limits_.total_bytes < need_total;
    if (raise) {
      text += StrCat("raise ", total_.name, " to at least ",
                     FormatBytes(need_total));
    }
    if (limits_.available_bytes < need_available) {
      text +=
          StrCat(raise ? ", and free " : "free ",
                 FormatBytes(need_available - limits_.available_bytes),
                 " under ", available_.name, " or raise its limit by as much");
    }
    return text;
  }

  int64_t ClaimKv(double fraction) const {
    return Scale(limits_.total_bytes, fraction) - request_.weights_bytes -
           request_.profile_peak_bytes;
  }

  Status PlanClaim() {
    VARLANE_RETURN_IF_ERROR(RequireLimits());
    const int64_t claim = Scale(limits_.total_bytes, request_.fraction);
    const int64_t bytes = ClaimKv(request_.fraction);
    TotalTerm();
    Term("claim", claim,
         StrCat("total x fraction ", FormatShare(request_.fraction)));
    OverheadTerms(/*subtract_resident=*/true);
    Term("KV budget", bytes, "claim less the above");
    AvailableTerm();
    if (Fits(bytes)) return Grant(bytes, total_.name);

    out_.fitting_fraction = NearestFit(
        request_.fraction, [&](double f) { return Fits(ClaimKv(f)); });
    const bool too_small = bytes < block_bytes_;
    return Refuse(bytes, too_small ? total_.name : available_.name,
                  ClaimRefusal(claim, bytes, too_small));
  }

  std::string ClaimRefusal(int64_t claim, int64_t bytes, bool too_small) const {
    std::string text = StrCat("claim of ", FormatShare(request_.fraction),
                              " x ", FormatBytes(limits_.total_bytes));
    if (too_small) {
      text += StrCat(" = ", FormatBytes(claim), " under ", Describe(total_));
      text += bytes <= 0 && claim > 0
                  ? StrCat(" is used up by ", OverheadText(true),
                           "nothing is left for KV")
                  : StrCat(" leaves ", FormatBytes(bytes),
                           " for KV, less than ", Block());
    } else {
      // Loaded weights are in use already; the others need room like KV does.
      if (request_.weights_resident && request_.weights_bytes > 0) {
        text += StrCat(" - weights ", FormatBytes(request_.weights_bytes),
                       " = ", FormatBytes(claim - request_.weights_bytes));
      } else {
        text += StrCat(" = ", FormatBytes(claim));
      }
      if (still_to_come_ > 0) {
        text +=
            StrCat(" (", OverheadText(false), "KV ", FormatBytes(bytes), ")");
      }
      text += StrCat(", but only ", FormatBytes(limits_.available_bytes),
                     " is available under ", Describe(available_));
    }
    return StrCat(text, "; ", ClaimRemedy());
  }

  std::string ClaimRemedy() const {
    if (out_.fitting_fraction > 0) {
      return StrCat("a fraction of ", FormatShare(out_.fitting_fraction),
                    " would fit");
    }
    const int64_t least =
        request_.weights_bytes + request_.profile_peak_bytes + block_bytes_;
    if (limits_.total_bytes >= least && Fits(block_bytes_)) {
      return StrCat(
          "no fraction of four decimals fits, but the fixed policy "
          "with ",
          FormatBytes(block_bytes_), " would");
    }
    return StrCat("no fraction fits; ", ChangeTheLimit(least));
  }

  int64_t Cap() const {
    const int64_t total = limits_.total_bytes;
    return total <= kSmallMachineBytes ? total * 2 / 3
                                       : total / 4 * 3 + total % 4 * 3 / 4;
  }

  int64_t CappedKv(int64_t wanted, double utilisation) const {
    return Scale(std::min(wanted, Cap()), utilisation) - total_.used_bytes -
           still_to_come_;
  }

  // `used` is what is in use once the model is loaded, as mistral.rs counts it:
  // today's use, and the weights and peak that are still to come.
  Status PlanCapped() {
    VARLANE_RETURN_IF_ERROR(RequireLimits());
    const int64_t cap = Cap();
    const int64_t wanted = request_.hint_bytes > 0 ? request_.hint_bytes : cap;
    const int64_t bytes = CappedKv(wanted, request_.utilisation);
    TotalTerm();
    Term("cap", cap,
         limits_.total_bytes <= kSmallMachineBytes
             ? "total x 2/3, for up to 36 GiB"
             : "total x 3/4, for more than 36 GiB");
    if (request_.hint_bytes > 0) {
      Term("hint", wanted,
           wanted <= cap ? "wanted" : "wanted, but the cap is less");
    }
    Term("usable", Scale(std::min(wanted, cap), request_.utilisation),
         StrCat("x utilisation ", FormatShare(request_.utilisation)));
    Term("used", -total_.used_bytes, StrCat("in use under ", total_.name));
    OverheadTerms(/*subtract_resident=*/false);
    Term("KV budget", bytes, "usable less the above");
    AvailableTerm();
    if (Fits(bytes)) return Grant(bytes, total_.name);

    const bool too_small = bytes < block_bytes_;
    std::string text = StrCat(
        "capped at ", FormatBytes(std::min(wanted, cap)), " x ",
        FormatShare(request_.utilisation), " - ",
        FormatBytes(total_.used_bytes), " in use",
        still_to_come_ > 0 ? " - " : "",
        still_to_come_ > 0 ? FormatBytes(still_to_come_) + " still to come"
                           : "",
        " leaves ", FormatBytes(bytes), " for KV");
    if (too_small) {
      text += StrCat(", less than ", Block(), ", under ", Describe(total_));
    } else {
      text += StrCat(", but only ", FormatBytes(limits_.available_bytes),
                     " is available under ", Describe(available_));
    }
    return Refuse(bytes, too_small ? total_.name : available_.name,
                  StrCat(text, "; ", CappedRemedy(wanted)));
  }

  std::string CappedRemedy(int64_t wanted) const {
    const double share = NearestFit(request_.utilisation, [&](double u) {
      return Fits(CappedKv(wanted, u));
    });
    if (share > 0) {
      return StrCat("a utilisation of ", FormatShare(share), " would fit");
    }
    const int64_t least = total_.used_bytes + still_to_come_ + block_bytes_;
    const double hint =
        std::ceil(static_cast<double>(least) / request_.utilisation) + 1;
    if (hint <= static_cast<double>(Cap()) &&
        Fits(CappedKv(static_cast<int64_t>(hint), request_.utilisation))) {
      return StrCat("hint_bytes of ", static_cast<int64_t>(hint), " (",
                    FormatBytes(static_cast<int64_t>(hint)), ") would fit");
    }
    // Nobody gets the full total here: 2/3 of it have to hold the least.
    return StrCat("no utilisation fits; ", ChangeTheLimit(least / 2 * 3 + 3));
  }

  // KV of `tokens`, in whole blocks, with its terms.
  Result<int64_t> BytesOfTokens(const char* field, int64_t tokens) {
    const int64_t token_bytes = layout_.token_bytes();
    const int64_t most = (kMaxBudgetBytes - block_bytes_) / token_bytes;
    VARLANE_REQUIRE_ARG(tokens <= most, field, " = ", tokens, " of ",
                        FormatBytes(token_bytes), " each, must be at most ",
                        most);
    const int64_t plain = int64_t{layout_.num_layers} * layout_.num_kv_heads *
                          (layout_.head_size + layout_.v_head_size) *
                          static_cast<int64_t>(SizeOf(layout_.dtype)) * tokens;
    const int64_t bytes =
        DivCeil<int64_t>(tokens, layout_.block_size) * block_bytes_;
    Term("KV of tokens", plain,
         StrCat(layout_.num_layers, " layers x ", layout_.num_kv_heads,
                " KV heads x (", layout_.head_size, " + ", layout_.v_head_size,
                ") x ", tokens, " tokens x ", SizeOf(layout_.dtype), " B"));
    if (bytes > plain) {
      Term("padding", bytes - plain,
           StrCat("to whole blocks of ", layout_.block_size,
                  " tokens and V rows of ", layout_.v_head_size_padded()));
    }
    return bytes;
  }

  Status PlanCommitted() {
    VARLANE_REQUIRE_ARG(request_.context_tokens > 0,
                        "context_tokens = ", request_.context_tokens,
                        ", must be positive for policy committed");
    const Result<int64_t> bytes =
        BytesOfTokens("context_tokens", request_.context_tokens);
    VARLANE_RETURN_IF_ERROR(bytes.status());
    VARLANE_RETURN_IF_ERROR(Grant(*bytes, ""));
    if (!limits_.limits.empty() && !Fits(*bytes)) {
      // Granted all the same: this policy commits without a look. Say so.
      out_.binding_limit = available_.name;
      out_.terms.back().note +=
          StrCat("; exceeds the ", FormatBytes(limits_.available_bytes),
                 " available under ", Describe(available_));
      if (still_to_come_ > 0) {
        out_.terms.back().note +=
            StrCat(", of which ", FormatBytes(still_to_come_),
                   " go to weights and peak");
      }
    }
    return {};
  }

  Status PlanFixed() {
    VARLANE_REQUIRE_ARG(
        (request_.fixed_bytes > 0) != (request_.fixed_tokens > 0),
        "fixed_bytes = ", request_.fixed_bytes,
        " and fixed_tokens = ", request_.fixed_tokens,
        ", exactly one must be positive for policy fixed");
    int64_t bytes = request_.fixed_bytes;
    if (bytes > 0) {
      Term("KV bytes", bytes, "fixed by the caller");
    } else {
      const Result<int64_t> of_tokens =
          BytesOfTokens("fixed_tokens", request_.fixed_tokens);
      VARLANE_RETURN_IF_ERROR(of_tokens.status());
      bytes = *of_tokens;
    }
    if (bytes < block_bytes_) {
      return Refuse(bytes, "fixed_bytes",
                    StrCat("fixed_bytes = ", bytes, " is less than ", Block(),
                           "; ", block_bytes_, " would fit one"));
    }
    // An embedder that has no limits to give is taken by his word.
    if (limits_.limits.empty()) return Grant(bytes, "");
    AvailableTerm();
    if (Fits(bytes)) return Grant(bytes, available_.name);

    const int64_t blocks =
        (limits_.available_bytes - still_to_come_) / block_bytes_;
    std::string text =
        StrCat("fixed KV of ", FormatBytes(bytes),
               still_to_come_ > 0 ? StrCat(" and ", FormatBytes(still_to_come_),
                                           " of weights and peak to come")
                                  : std::string(),
               ", but only ", FormatBytes(limits_.available_bytes),
               " is available under ", Describe(available_), "; ");
    text += blocks > 0
                ? StrCat("fixed_bytes of ", blocks * block_bytes_, " (",
                         FormatBytes(blocks * block_bytes_), ", ",
                         blocks * layout_.block_size, " tokens) would fit")
                : StrCat("no size fits; ", ChangeTheLimit(0));
    return Refuse(bytes, available_.name, std::move(text));
  }

  const BudgetRequest& request_;
  const int64_t block_bytes_;
  const KvLayout& layout_;
  const MemoryLimits& limits_;
  const MemoryLimit total_;      // the limit that binds total
  const MemoryLimit available_;  // and the one that binds available
  const int64_t still_to_come_;  // bytes that KV must leave room for
  MemoryBudget out_;
};

}  // namespace

Result<MemoryBudget> PlanByPolicy(const BudgetRequest& request,
                                  const KvLayout& layout,
                                  const MemoryLimits& limits) {
  Planner planner(request, layout, limits);
  VARLANE_RETURN_IF_ERROR(planner.Run());
  return planner.Take();
}

}  // namespace varlane
