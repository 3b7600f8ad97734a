// SPDX-License-Identifier: Apache-2.0

#include "memory/budget_draft.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/strings.h"
#include "memory/block_memory.h"
#include "memory/budget_planner.h"

namespace varlane {
namespace {

// The limit with this index; stands in where limits were made by hand.
MemoryLimit LimitAt(const MemoryLimits& limits, int index) {
  if (index >= 0 && static_cast<size_t>(index) < limits.limits.size()) {
    MemoryLimit limit = limits.limits[static_cast<size_t>(index)];
    limit.used_bytes = std::min(limit.used_bytes, kMaxBudgetBytes);
    return limit;
  }
  return {"memory", limits.total_bytes,
          limits.total_bytes - limits.available_bytes, limits.available_bytes};
}

// The one with the least room; where reserves do not decide, the one that binds
// what is available.
MemoryLimit TightestOf(const MemoryLimits& limits) {
  MemoryLimit tightest = LimitAt(limits, limits.binding_available);
  for (const MemoryLimit& limit : limits.limits) {
    if (limit.room_bytes() < tightest.room_bytes()) tightest = limit;
  }
  tightest.used_bytes = std::min(tightest.used_bytes, kMaxBudgetBytes);
  return tightest;
}

}  // namespace

int64_t ScaleBytes(int64_t bytes, double share) {
  const double exact = static_cast<double>(bytes);
  const double scaled = exact * share;
  return scaled >= exact ? bytes : static_cast<int64_t>(scaled);
}

std::string FormatShare(double share) {
  std::array<char, 32> text{};
  for (int decimals = 2; decimals <= 6; ++decimals) {
    std::snprintf(text.data(), text.size(), "%.*f", decimals, share);
    if (std::strtod(text.data(), nullptr) == share) break;
  }
  return text.data();
}

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

BudgetDraft::BudgetDraft(const BudgetRequest& request_in,
                         const KvLayout& layout_in,
                         const MemoryLimits& limits_in)
    : request(request_in),
      layout(layout_in),
      limits(limits_in),
      block_bytes(layout_in.block_bytes()),
      total(LimitAt(limits_in, limits_in.binding_total)),
      available(TightestOf(limits_in)),
      available_bytes(available.available_bytes),
      room_bytes(available.room_bytes()),
      still_to_come(
          (request_in.weights_resident ? 0 : request_in.weights_bytes) +
          request_in.profile_peak_bytes) {
  out.policy = request_in.policy;
}

Status BudgetDraft::RequireLimits() const {
  VARLANE_REQUIRE_ARG(!limits.limits.empty(), "limits is empty, but policy ",
                      BudgetPolicyName(request.policy),
                      " needs those of MemoryLimits::Detect");
  return {};
}

std::string BudgetDraft::Describe(const MemoryLimit& limit) {
  return StrCat(limit.name, " (limit ", FormatBytes(limit.limit_bytes), ", ",
                FormatBytes(limit.used_bytes), " in use)");
}

std::string BudgetDraft::OnlyAvailable() const {
  std::string text = StrCat("only ", FormatBytes(available_bytes),
                            " is available under ", Describe(available));
  if (available.reserve_bytes > 0) {
    text += StrCat(", ", FormatBytes(available.reserve_bytes),
                   " of it kept in reserve");
  }
  return text;
}

std::string BudgetDraft::Block() const {
  return StrCat("one block of ", FormatBytes(block_bytes));
}

void BudgetDraft::Term(std::string name, int64_t bytes, std::string note) {
  out.terms.push_back({std::move(name), bytes, std::move(note)});
}

void BudgetDraft::TotalTerm() {
  Term("total", limits.total_bytes,
       StrCat(total.name, ", the smallest of ", limits.limits.size(),
              limits.limits.size() == 1 ? " limit" : " limits"));
}

void BudgetDraft::AvailableTerms() {
  Term("available", available_bytes,
       StrCat(available.name, ", limit less non-reclaimable use"));
  if (available.reserve_bytes > 0) {
    Term("reserve", -std::min(available_bytes, available.reserve_bytes),
         "kept free for all that is not planned");
  }
}

void BudgetDraft::OverheadTerms(bool subtract_resident) {
  if (request.weights_bytes > 0) {
    if (!request.weights_resident) {
      Term("weights", -request.weights_bytes, "still to be loaded");
    } else if (subtract_resident) {
      Term("weights", -request.weights_bytes, "loaded, already in use");
    }
  }
  if (request.profile_peak_bytes > 0) {
    Term("profile peak", -request.profile_peak_bytes,
         "activations and scratch");
  }
}

bool BudgetDraft::Fits(int64_t bytes) const {
  if (bytes < block_bytes) return false;
  const int64_t blocks = RoundDown(bytes, block_bytes);
  return std::max(bytes, RoundUp(blocks, SlabBytesFor(blocks))) +
             still_to_come <=
         room_bytes;
}

int64_t BudgetDraft::MostBlocks() const {
  int64_t fits = 0;
  int64_t beyond = (room_bytes - still_to_come) / block_bytes + 1;
  while (beyond - fits > 1) {
    const int64_t middle = fits + (beyond - fits) / 2;
    (Fits(middle * block_bytes) ? fits : beyond) = middle;
  }
  return fits;
}

Status BudgetDraft::Grant(int64_t bytes, const std::string& binding_limit) {
  out.granted = true;
  out.bytes = bytes;
  out.blocks = bytes / block_bytes;
  out.tokens = out.blocks * layout.block_size;
  out.binding_limit = binding_limit;
  Term("KV pool", out.blocks * block_bytes,
       StrCat(out.blocks, " blocks of ", FormatBytes(block_bytes), " = ",
              out.tokens, " tokens"));
  return {};
}

Status BudgetDraft::Refuse(int64_t bytes, const std::string& binding_limit,
                           std::string text) {
  out.bytes = std::max<int64_t>(bytes, 0);
  out.binding_limit = binding_limit;
  out.refusal = std::move(text);
  return {};
}

std::string BudgetDraft::OverheadText(bool with_resident) const {
  std::string text;
  if (request.weights_bytes > 0 &&
      (with_resident || !request.weights_resident)) {
    text += StrCat("weights ", FormatBytes(request.weights_bytes), ", ");
  }
  if (request.profile_peak_bytes > 0) {
    text +=
        StrCat("profile peak ", FormatBytes(request.profile_peak_bytes), ", ");
  }
  return text;
}

std::string BudgetDraft::ChangeTheLimit(int64_t need_total) const {
  const int64_t need_room =
      still_to_come +
      std::max(block_bytes, RoundUp(block_bytes, SlabBytesFor(block_bytes)));
  std::string text =
      StrCat("the least that is needed is ", OverheadText(true), Block(), ": ");
  const bool raise = limits.total_bytes < need_total;
  if (raise) {
    text +=
        StrCat("raise ", total.name, " to at least ", FormatBytes(need_total));
  }
  if (room_bytes < need_room) {
    text += StrCat(raise ? ", and free " : "free ",
                   FormatBytes(need_room - room_bytes), " under ",
                   available.name, " or raise its limit by as much");
  }
  return text;
}

}  // namespace varlane
