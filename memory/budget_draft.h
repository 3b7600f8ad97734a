// BudgetDraft: a memory budget being derived, and what its policies share.
//
// The policies stand in budget_claim.cc, budget_capped.cc and budget_sized.cc.
// Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BUDGET_DRAFT_H_
#define VARLANE_MEMORY_BUDGET_DRAFT_H_

#include <cstdint>
#include <functional>
#include <string>

#include "varlane/memory_budget.h"
#include "varlane/status.h"

namespace varlane {

// bytes x share, share in (0, 1]; rounded down.
int64_t ScaleBytes(int64_t bytes, double share);
// As a person wrote it, with at least two decimals: "0.90", "0.125".
std::string FormatShare(double share);
// The share nearest to `wanted` with which `fits` holds: to two decimals, or
// to three or four where two are too coarse. 0 where none fits.
double NearestFit(double wanted, const std::function<bool(double)>& fits);

// Every member may throw std::bad_alloc.
struct BudgetDraft {
  BudgetDraft(const BudgetRequest& request_in, const KvLayout& layout_in,
              const MemoryLimits& limits_in);

  const BudgetRequest& request;
  const KvLayout& layout;
  const MemoryLimits& limits;
  const int64_t block_bytes;
  const MemoryLimit total;        // the limit that binds total
  const MemoryLimit available;    // and the one with the least room
  const int64_t available_bytes;  // what it has available
  const int64_t room_bytes;       // of this, less its reserve
  const int64_t still_to_come;    // bytes that KV must leave room for
  MemoryBudget out;

  Status RequireLimits() const;

  void Term(std::string name, int64_t bytes, std::string note);
  void TotalTerm();
  void AvailableTerms();  // and its reserve
  // Weights and peak, as the policy subtracts them.
  void OverheadTerms(bool subtract_resident);

  // Whether a pool of `bytes` holds a block and leaves room for what is to
  // come. The pool takes whole slabs.
  bool Fits(int64_t bytes) const;
  // The largest whole number of blocks that fits; 0 = none.
  int64_t MostBlocks() const;

  // Both return ok: a refusal is a value.
  Status Grant(int64_t bytes, const std::string& binding_limit);
  Status Refuse(int64_t bytes, const std::string& binding_limit,
                std::string text);

  // "host RAM (limit 64 GiB, 58 GiB in use)"
  static std::string Describe(const MemoryLimit& limit);
  // "only 6 GiB is available under host RAM (...), 64 MiB of it in reserve"
  std::string OnlyAvailable() const;
  std::string Block() const;  // "one block of 1.75 MiB"
  // "weights 1.20 GiB, peak 12 MiB, ", of those that are subtracted.
  std::string OverheadText(bool with_resident) const;
  // What to change where no setting of the policy helps: the machine.
  // `need_total` is the least that the policy can do with.
  std::string ChangeTheLimit(int64_t need_total) const;
};

Status PlanClaim(BudgetDraft* draft);
Status PlanCapped(BudgetDraft* draft);
Status PlanCommitted(BudgetDraft* draft);
Status PlanFixed(BudgetDraft* draft);

}  // namespace varlane

#endif  // VARLANE_MEMORY_BUDGET_DRAFT_H_
