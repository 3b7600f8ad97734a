// SPDX-License-Identifier: Apache-2.0

#include "varlane/memory_account.h"

#include <algorithm>
#include <array>
#include <list>
#include <mutex>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/strings.h"
#include "memory/budget_planner.h"

namespace varlane {
namespace {

constexpr std::array<const char*, 5> kUseNames = {
    "weights", "KV cache", "prefix cache", "scratch", "embedder"};

constexpr const char* kCapName = "the account's cap";

int64_t Promised(const MemoryClaimRequest& claim) {
  return claim.bytes - claim.resident_bytes;
}

std::string Describe(const MemoryClaimRequest& claim) {
  return StrCat(FormatBytes(claim.bytes), " of ", MemoryUseName(claim.use),
                claim.name.empty() ? "" : " ", claim.name);
}

Status Validate(const MemoryClaimRequest& claim) {
  VARLANE_REQUIRE_ARG(claim.bytes >= 0 && claim.bytes <= kMaxBudgetBytes,
                      "bytes = ", claim.bytes, ", must be in [0, ",
                      kMaxBudgetBytes, "]");
  VARLANE_REQUIRE_ARG(
      claim.resident_bytes >= 0 && claim.resident_bytes <= claim.bytes,
      "resident_bytes = ", claim.resident_bytes,
      ", must be in [0, bytes = ", claim.bytes, "]");
  return {};
}

}  // namespace

const char* MemoryUseName(MemoryUse use) {
  const auto index = static_cast<size_t>(use);
  return index < kUseNames.size() ? kUseNames[index] : "unknown";
}

// What account and claims share.
class MemoryAccount::State {
 public:
  using Claims = std::list<MemoryClaimRequest>;

  explicit State(const MemoryAccountOptions& options) : options_(options) {}

  Result<Claims::iterator> Add(const MemoryClaimRequest& request);
  Status Resize(Claims::iterator claim, int64_t bytes);
  void Erase(Claims::iterator claim) noexcept {
    const std::lock_guard lock(mutex_);
    claims_.erase(claim);
  }
  void SetResident(Claims::iterator claim, int64_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    claim->resident_bytes = std::clamp<int64_t>(bytes, 0, claim->bytes);
  }
  MemoryClaimRequest Get(Claims::iterator claim) const {
    const std::lock_guard lock(mutex_);
    return *claim;
  }
  Result<MemoryAccountReport> Report() const {
    const std::lock_guard lock(mutex_);
    return Derive();
  }

 private:
  // All below: `mutex_` is held. May throw std::bad_alloc.
  Result<MemoryAccountReport> Derive() const;
  // Whether `more` bytes, touched or not, fit beside all claims.
  Status CheckRoom(const MemoryClaimRequest& claim, int64_t more,
                   int64_t more_promised) const;
  Status CheckNode(const MemoryAccountReport& report,
                   const MemoryClaimRequest& claim,
                   int64_t more_promised) const;
  std::string Remedy(const MemoryAccountReport& report, int64_t room,
                     int64_t more) const;

  const MemoryAccountOptions options_;
  mutable std::mutex mutex_;  // guards claims_
  Claims claims_;
};

Result<MemoryAccountReport> MemoryAccount::State::Derive() const {
  Result<MemoryLimits> limits = MemoryLimits::Detect(options_.root);
  VARLANE_RETURN_IF_ERROR(limits.status());
  MemoryAccountReport report;
  for (const MemoryClaimRequest& claim : claims_) {
    report.claims.push_back(claim);
    report.claimed_bytes += claim.bytes;
    report.promised_bytes += Promised(claim);
  }
  for (const MemoryLimit& limit : limits->limits) {
    report.lines.push_back(
        {limit, report.promised_bytes,
         std::max<int64_t>(0, limit.room_bytes() - report.promised_bytes)});
  }
  if (options_.cap_bytes > 0) {
    const int64_t left =
        std::max<int64_t>(0, options_.cap_bytes - report.claimed_bytes);
    report.lines.push_back(
        {{kCapName, options_.cap_bytes, report.claimed_bytes, left, 0},
         0,
         left});
  }
  const auto tightest = std::min_element(
      report.lines.begin(), report.lines.end(),
      [](const MemoryAccountLine& a, const MemoryAccountLine& b) {
        return a.room_bytes < b.room_bytes;
      });
  report.binding = static_cast<int>(tightest - report.lines.begin());
  report.room_bytes = tightest->room_bytes;
  report.nodes = std::move(limits->nodes);
  report.warnings = std::move(limits->warnings);
  return report;
}

std::string MemoryAccount::State::Remedy(const MemoryAccountReport& report,
                                         int64_t room, int64_t more) const {
  std::string text =
      room > 0 ? StrCat("ask for at most ", FormatBytes(room)) : std::string();
  const auto largest = std::max_element(
      report.claims.begin(), report.claims.end(),
      [](const MemoryClaimRequest& a, const MemoryClaimRequest& b) {
        return a.bytes < b.bytes;
      });
  if (largest != report.claims.end() && largest->bytes > 0) {
    text += StrCat(text.empty() ? "" : ", ", "release some of the ",
                   Describe(*largest));
  }
  return StrCat(text, text.empty() ? "" : ", or ", "free ",
                FormatBytes(more - room), " or raise the limit by as much");
}

Status MemoryAccount::State::CheckNode(const MemoryAccountReport& report,
                                       const MemoryClaimRequest& claim,
                                       int64_t more_promised) const {
  if (claim.node < 0) return {};
  const auto node = std::find_if(report.nodes.begin(), report.nodes.end(),
                                 [&](const NodeMemory& n) {
                                   return n.os_index == claim.node && n.allowed;
                                 });
  VARLANE_REQUIRE_ARG(node != report.nodes.end(), "node = ", claim.node,
                      ", but this process may take no memory there");
  int64_t promised = 0;
  for (const MemoryClaimRequest& other : claims_) {
    if (other.node == claim.node) promised += Promised(other);
  }
  const int64_t room = std::max<int64_t>(0, node->available_bytes - promised);
  VARLANE_REQUIRE(more_promised <= room, StatusCode::kResourceExhausted,
                  Describe(claim), " do not fit on NUMA node ", claim.node,
                  ": of ", FormatBytes(node->available_bytes),
                  " available there ", FormatBytes(promised),
                  " are promised to others; ask for at most ",
                  FormatBytes(room), " there, or for any node");
  return {};
}

Status MemoryAccount::State::CheckRoom(const MemoryClaimRequest& claim,
                                       int64_t more,
                                       int64_t more_promised) const {
  const Result<MemoryAccountReport> report = Derive();
  VARLANE_RETURN_IF_ERROR(report.status());
  VARLANE_RETURN_IF_ERROR(CheckNode(*report, claim, more_promised));
  const MemoryAccountLine* worst = nullptr;
  int64_t worst_short = 0;
  for (const MemoryAccountLine& line : report->lines) {
    // The cap counts all that is claimed, the others what is yet to come.
    const int64_t need = line.limit.name == kCapName ? more : more_promised;
    if (need - line.room_bytes > worst_short) {
      worst = &line;
      worst_short = need - line.room_bytes;
    }
  }
  if (worst == nullptr) return {};
  const MemoryLimit& limit = worst->limit;
  return {
      StatusCode::kResourceExhausted,
      MessageCat(
          Describe(claim), " do not fit: ", limit.name, " (limit ",
          FormatBytes(limit.limit_bytes), ", ", FormatBytes(limit.used_bytes),
          " in use, ", FormatBytes(limit.reserve_bytes), " in reserve, ",
          FormatBytes(worst->promised_bytes), " promised) has ",
          FormatBytes(worst->room_bytes), " left; ",
          Remedy(*report, worst->room_bytes, worst->room_bytes + worst_short))};
}

Result<MemoryAccount::State::Claims::iterator> MemoryAccount::State::Add(
    const MemoryClaimRequest& request) {
  VARLANE_RETURN_IF_ERROR(Validate(request));
  const std::lock_guard lock(mutex_);
  VARLANE_RETURN_IF_ERROR(CheckRoom(request, request.bytes, Promised(request)));
  claims_.push_back(request);
  return std::prev(claims_.end());
}

Status MemoryAccount::State::Resize(Claims::iterator claim, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  MemoryClaimRequest wanted = *claim;
  wanted.bytes = bytes;
  wanted.resident_bytes = std::min(wanted.resident_bytes, bytes);
  VARLANE_RETURN_IF_ERROR(Validate(wanted));
  const int64_t more = bytes - claim->bytes;
  if (more > 0) {
    VARLANE_RETURN_IF_ERROR(CheckRoom(wanted, more, more));
  }
  claim->bytes = wanted.bytes;
  claim->resident_bytes = wanted.resident_bytes;
  return {};
}

// --- a claim -----------------------------------------------------------------

struct MemoryClaim::Entry {
  std::shared_ptr<MemoryAccount::State> state;
  MemoryAccount::State::Claims::iterator claim;
};

MemoryClaim::MemoryClaim() noexcept = default;
MemoryClaim::MemoryClaim(std::unique_ptr<Entry> entry) noexcept
    : entry_(std::move(entry)) {}
MemoryClaim::MemoryClaim(MemoryClaim&& other) noexcept = default;
MemoryClaim& MemoryClaim::operator=(MemoryClaim&& other) noexcept {
  if (this != &other) {
    Release();
    entry_ = std::move(other.entry_);
  }
  return *this;
}
MemoryClaim::~MemoryClaim() { Release(); }

int64_t MemoryClaim::bytes() const {
  return entry_ == nullptr ? 0 : entry_->state->Get(entry_->claim).bytes;
}

int64_t MemoryClaim::resident_bytes() const {
  return entry_ == nullptr ? 0
                           : entry_->state->Get(entry_->claim).resident_bytes;
}

Status MemoryClaim::Resize(int64_t bytes) try {
  VARLANE_REQUIRE(entry_ != nullptr, StatusCode::kFailedPrecondition,
                  "a claim of nothing cannot be resized");
  return entry_->state->Resize(entry_->claim, bytes);
} catch (const std::bad_alloc&) {
  return {StatusCode::kResourceExhausted, "no memory to resize a claim"};
}

void MemoryClaim::SetResident(int64_t bytes) noexcept {
  if (entry_ != nullptr) entry_->state->SetResident(entry_->claim, bytes);
}

void MemoryClaim::Release() noexcept {
  if (entry_ == nullptr) return;
  entry_->state->Erase(entry_->claim);
  entry_.reset();
}

// --- the account -------------------------------------------------------------

MemoryAccount::MemoryAccount(std::shared_ptr<State> state)
    : state_(std::move(state)) {}
MemoryAccount::~MemoryAccount() = default;

Result<std::unique_ptr<MemoryAccount>> MemoryAccount::Create(
    const MemoryAccountOptions& options) try {
  VARLANE_REQUIRE_ARG(
      options.cap_bytes >= 0 && options.cap_bytes <= kMaxBudgetBytes,
      "cap_bytes = ", options.cap_bytes, ", must be in [0, ", kMaxBudgetBytes,
      "]");
  auto state = std::make_shared<State>(options);
  VARLANE_RETURN_IF_ERROR(state->Report().status());
  return std::unique_ptr<MemoryAccount>(new MemoryAccount(std::move(state)));
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory for the memory account");
}

Result<MemoryClaim> MemoryAccount::Claim(
    const MemoryClaimRequest& request) try {
  auto entry = std::make_unique<MemoryClaim::Entry>();
  entry->state = state_;
  const auto claim = state_->Add(request);  // last: nothing after it may throw
  VARLANE_RETURN_IF_ERROR(claim.status());
  entry->claim = *claim;
  return MemoryClaim(std::move(entry));
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory to book a claim");
}

Result<MemoryLimits> MemoryAccount::Limits() const try {
  const Result<MemoryAccountReport> report = state_->Report();
  VARLANE_RETURN_IF_ERROR(report.status());
  MemoryLimits limits;
  for (const MemoryAccountLine& line : report->lines) {
    MemoryLimit limit = line.limit;
    limit.used_bytes += line.promised_bytes;
    limit.available_bytes =
        std::max<int64_t>(0, limit.available_bytes - line.promised_bytes);
    limits.Add(std::move(limit));
  }
  limits.nodes = report->nodes;
  limits.warnings = report->warnings;
  return limits;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory for the limits");
}

Result<MemoryAccountReport> MemoryAccount::Report() const try {
  return state_->Report();
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory for the report");
}

std::string MemoryAccountReport::ToString() const {
  std::string text = "claims\n";
  for (const MemoryClaimRequest& claim : claims) {
    text +=
        StrCat("  ", Describe(claim), ": ", FormatBytes(claim.resident_bytes),
               " touched, ", FormatBytes(Promised(claim)), " promised");
    if (claim.node >= 0) text += StrCat(", on NUMA node ", claim.node);
    text += "\n";
  }
  if (claims.empty()) text += "  none\n";
  text += "limits\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    const MemoryAccountLine& line = lines[i];
    text += StrCat(
        "  ", line.limit.name, ": ", FormatBytes(line.limit.limit_bytes), " - ",
        FormatBytes(line.limit.used_bytes), " in use - ",
        FormatBytes(line.limit.reserve_bytes), " in reserve - ",
        FormatBytes(line.promised_bytes),
        " promised = ", FormatBytes(line.room_bytes),
        static_cast<int>(i) == binding ? " left, which binds\n" : " left\n");
  }
  for (const NodeMemory& node : nodes) {
    text += StrCat("  NUMA node ", node.os_index, ": ",
                   FormatBytes(node.available_bytes), " available of ",
                   FormatBytes(node.total_bytes),
                   node.allowed ? "\n" : ", not ours\n");
  }
  return text;
}

}  // namespace varlane
