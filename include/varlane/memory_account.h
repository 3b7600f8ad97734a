// MemoryAccount: who in this process may take how much memory, in one place.
//
// Weights, KV, scratch, the prefix cache and the embedder's own buffers claim
// their bytes here before they touch them. A claim is granted while every limit
// of the process has room for it beside what is in use and what others were
// promised but have not touched yet. It decides and remembers; it takes no
// memory itself. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_ACCOUNT_H_
#define VARLANE_MEMORY_ACCOUNT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "varlane/export.h"
#include "varlane/memory_budget.h"
#include "varlane/status.h"

namespace varlane {

enum class MemoryUse : uint8_t {
  kWeights,
  kKvCache,
  kPrefixCache,
  kScratch,
  kEmbedder,  // the service's own
};
VARLANE_EXPORT const char* MemoryUseName(MemoryUse use);

struct MemoryAccountOptions {
  std::string root = {};  // where /proc and /sys are; "" = this machine's
  int64_t cap_bytes = 0;  // for all claims together, whatever else would
                          // allow; 0 = none
};

struct MemoryClaimRequest {
  MemoryUse use = MemoryUse::kEmbedder;
  std::string name = {};  // for reports: "Qwen3-0.6B", "HTTP buffers"
  int64_t bytes = 0;
  int64_t resident_bytes = 0;  // of these, touched already: among the limits'
                               // use, so not to be counted twice
  int node = -1;               // must come from this NUMA node (OS index);
                               // -1 = wherever there is room
};

// How one limit stands, as Report derives it.
struct MemoryAccountLine {
  MemoryLimit limit;
  int64_t promised_bytes = 0;  // claimed and not yet touched
  int64_t room_bytes = 0;      // available - reserve - promised, not below 0
};

// The derivation: every term, and which limit binds.
struct VARLANE_EXPORT MemoryAccountReport {
  std::vector<MemoryClaimRequest> claims;  // in the order they were made
  std::vector<MemoryAccountLine> lines;    // host first, the user's cap last
  std::vector<NodeMemory> nodes;
  std::vector<std::string> warnings;
  int binding = 0;  // index into lines
  int64_t claimed_bytes = 0;
  int64_t promised_bytes = 0;
  int64_t room_bytes = 0;  // what a claim could still get

  // A table of claims and one of limits, for people.
  std::string ToString() const;
};

// A granted claim; gives the bytes back when it goes. May outlive its account.
//
// Threads: a value of one thread at a time; different claims are independent.
class VARLANE_EXPORT MemoryClaim {
 public:
  MemoryClaim() noexcept;  // of nothing
  MemoryClaim(MemoryClaim&& other) noexcept;
  MemoryClaim& operator=(MemoryClaim&& other) noexcept;
  ~MemoryClaim();

  int64_t bytes() const;
  int64_t resident_bytes() const;
  // Grows or shrinks. Errors: as MemoryAccount::Claim; nothing changes then.
  Status Resize(int64_t bytes);
  // Tells that so many of its bytes are touched by now; clamped to [0, bytes].
  void SetResident(int64_t bytes) noexcept;
  void Release() noexcept;

 private:
  friend class MemoryAccount;
  struct Entry;
  explicit MemoryClaim(std::unique_ptr<Entry> entry) noexcept;
  std::unique_ptr<Entry> entry_;
};

// Threads: every member is safe from any thread; two claims that fit only one
//          at a time are never both granted.
class VARLANE_EXPORT MemoryAccount {
 public:
  // Errors: those of MemoryLimits::Detect; kInvalidArgument (cap_bytes).
  static Result<std::unique_ptr<MemoryAccount>> Create(
      const MemoryAccountOptions& options);
  ~MemoryAccount();
  MemoryAccount(const MemoryAccount&) = delete;
  MemoryAccount& operator=(const MemoryAccount&) = delete;

  // Reads the limits anew and grants or refuses.
  //
  // Errors: kResourceExhausted naming the limit that binds, every term of it,
  //         and what to change and to what; kInvalidArgument (negative bytes,
  //         no such node); those of MemoryLimits::Detect. Nothing changes then.
  Result<MemoryClaim> Claim(const MemoryClaimRequest& request);

  // The limits as they are now, with the user's cap, for PlanMemoryBudget: what
  // is promised to others counts as used.
  Result<MemoryLimits> Limits() const;
  Result<MemoryAccountReport> Report() const;

 private:
  friend class MemoryClaim;
  class State;
  explicit MemoryAccount(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_ACCOUNT_H_
