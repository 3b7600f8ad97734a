// MemoryBudget: how many bytes the KV pool may take, and why.
//
// `total` is the smallest of host RAM, every cgroup ancestor's limit (v1, v2,
// hybrid, nested), the NUMA nodes that a cpuset allows, RLIMIT_AS and
// RLIMIT_DATA; `available` counts reclaimable page cache once. Under a memory
// cgroup, populating past the limit returns no error, the kernel kills the
// process: so the budget is decided before a byte is touched. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BUDGET_H_
#define VARLANE_MEMORY_BUDGET_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "varlane/export.h"
#include "varlane/kv_layout.h"
#include "varlane/status.h"

namespace varlane {

// One bound on this process's memory.
struct MemoryLimit {
  std::string name;  // "host RAM", "cgroup v1 memory /a/b", "RLIMIT_AS", ...
  int64_t limit_bytes = 0;
  int64_t used_bytes = 0;       // non-reclaimable use counted against it
  int64_t available_bytes = 0;  // what can still be taken
  // Of this, what KV must leave untouched for all that is not planned: the
  // heap, thread stacks, page tables, neighbours. See LimitReserveBytes.
  int64_t reserve_bytes = 0;

  int64_t room_bytes() const {
    return available_bytes > reserve_bytes ? available_bytes - reserve_bytes
                                           : 0;
  }
};

// The reserve of a limit: 2% of it, at least 64 MiB, but never more than an
// eighth of it. A plan leaves all of it free. A pool that grows refuses only in
// its lower half, so that what was planned can be had even though the process
// has taken some more meanwhile.
VARLANE_EXPORT int64_t LimitReserveBytes(int64_t limit_bytes) noexcept;

// One NUMA node's memory, as /sys/devices/system/node tells it.
struct NodeMemory {
  int os_index = 0;
  bool allowed = true;  // cpuset: Mems_allowed_list
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  int64_t available_bytes = 0;  // free, and page cache that can be dropped
};

// Everything that bounds us, read once. A value.
struct VARLANE_EXPORT MemoryLimits {
  std::vector<MemoryLimit> limits;  // host first; unlimited ones are left out
  int64_t total_bytes = 0;          // smallest limit
  int64_t available_bytes = 0;      // smallest available
  int binding_total = 0;            // index into limits
  int binding_available = 0;
  int64_t room_bytes = 0;  // smallest available less its reserve
  int binding_room = 0;
  std::vector<NodeMemory> nodes;      // empty where the kernel shows none
  std::vector<std::string> warnings;  // files that could not be read

  // Adds a limit of the caller's own (a user's cap) and says anew which binds.
  void Add(MemoryLimit limit);

  // Reads /proc and /sys under `root` ("" = the real ones; tests pass
  // fixtures).
  // Errors: kUnavailable when not even host RAM can be read;
  //         kResourceExhausted when no file descriptor is left to look with.
  static Result<MemoryLimits> Detect(const std::string& root = "");
};

enum class BudgetPolicy : uint8_t {
  kClaim,      // total x fraction - weights - profile_peak; refuses if more
               // than is available (vLLM, vllm-metal)
  kCapped,     // min(hint, cap) x utilisation - used, cap = total x 2/3 up to
               // 36 GB, x 3/4 above (mistral.rs)
  kCommitted,  // layers x 2 x Hkv x D x n_ctx x sizeof(dtype), no look at the
               // system (llama.cpp)
  kFixed,      // bytes or tokens from the user
};

// "claim", "capped", "committed", "fixed".
VARLANE_EXPORT const char* BudgetPolicyName(BudgetPolicy policy);
VARLANE_EXPORT std::optional<BudgetPolicy> ParseBudgetPolicy(
    std::string_view name);

struct BudgetRequest {
  BudgetPolicy policy = BudgetPolicy::kClaim;
  double fraction = 0.9;           // claim: of total, (0, 1]
  int64_t weights_bytes = 0;       // what the model itself takes
  bool weights_resident = false;   // loaded, so among the limits' use already;
                                   // else KV has to leave room for them too
  int64_t profile_peak_bytes = 0;  // activations and scratch at their peak
  int64_t hint_bytes = 0;          // capped: wanted; 0 = the cap
  double utilisation = 0.9;        // capped
  int64_t context_tokens = 0;      // committed: n_ctx, sequences x context
  int64_t fixed_bytes = 0;         // fixed: either this
  int64_t fixed_tokens = 0;        //        or that
};

// One line of the printed derivation: a signed term or a (sub)total.
struct BudgetTerm {
  std::string name;
  int64_t bytes = 0;
  std::string note;  // where it comes from
};

// The answer, with its derivation. `granted` is false for a refusal: then
// `refusal` names the binding limit, what is available, and the fraction (or
// size) that would fit; `bytes` is what was asked for.
struct MemoryBudget {
  BudgetPolicy policy = BudgetPolicy::kClaim;
  bool granted = false;
  int64_t bytes = 0;   // for KV, before rounding down to blocks
  int64_t blocks = 0;  // bytes / layout.block_bytes()
  int64_t tokens = 0;  // blocks x block_size
  std::vector<BudgetTerm> terms;
  std::string binding_limit;    // the MemoryLimit's name
  std::string refusal;          // empty when granted
  double fitting_fraction = 0;  // claim, refused: what would fit; 0 = none
};

// Plans the KV pool; touches no memory. A refusal is a value, not an error.
//
// Errors: kInvalidArgument for a field out of range (fraction 0, negative
//         weights ...) or an invalid layout.
VARLANE_EXPORT Result<MemoryBudget> PlanMemoryBudget(
    const BudgetRequest& request, const KvLayout& layout,
    const MemoryLimits& limits);

// The default fraction: 0.9, or VARLANE_MEMORY_FRACTION.
// Errors: kInvalidArgument when the variable does not parse.
VARLANE_EXPORT Result<double> MemoryFractionFromEnvironment();

}  // namespace varlane

#endif  // VARLANE_MEMORY_BUDGET_H_
