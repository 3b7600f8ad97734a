// PlanMemoryBudget: each policy's numbers by hand, and what refusals say.
//
// SPDX-License-Identifier: Apache-2.0

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "tests/testing/testing.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kGiB = 1024 * kMiB;

int64_t GiB(double gib) { return static_cast<int64_t>(gib * double{kGiB}); }

// Qwen3-0.6B: 112 KiB a token, 1.75 MiB a block.
const KvLayout kQwen{DType::kBF16, 28, 8, 128, 128, 16};
constexpr int64_t kBlock = 16 * 112 * kKiB;

MemoryLimits OneLimit(int64_t limit, int64_t used,
                      const std::string& name = "cgroup v1 memory /a/b") {
  MemoryLimits limits;
  limits.limits = {{name, limit, used, limit - used}};
  limits.total_bytes = limit;
  limits.available_bytes = limit - used;
  return limits;
}

// A container's total binds, the busy host binds what is available.
MemoryLimits HostAndCgroup() {
  MemoryLimits limits;
  limits.limits = {
      {"host RAM", 64 * kGiB, 58 * kGiB, 6 * kGiB},
      {"cgroup v2 memory.max /pod", 16 * kGiB, 1 * kGiB, 15 * kGiB}};
  limits.total_bytes = 16 * kGiB;
  limits.available_bytes = 6 * kGiB;
  limits.binding_total = 1;
  limits.binding_available = 0;
  return limits;
}

MemoryBudget Plan(const BudgetRequest& request, const MemoryLimits& limits,
                  const KvLayout& layout = kQwen) {
  Result<MemoryBudget> budget = PlanMemoryBudget(request, layout, limits);
  EXPECT_TRUE(testing::IsOk(budget));
  return budget.ok() ? *budget : MemoryBudget();
}

std::string Invalid(const BudgetRequest& request,
                    const MemoryLimits& limits = OneLimit(kGiB, 0),
                    const KvLayout& layout = kQwen) {
  const Result<MemoryBudget> budget = PlanMemoryBudget(request, layout, limits);
  EXPECT_EQ(budget.status().code(), StatusCode::kInvalidArgument);
  return std::string(budget.status().message());
}

std::string Terms(const MemoryBudget& budget) {
  std::string text;
  for (const BudgetTerm& term : budget.terms) {
    text += term.name + " " + std::to_string(term.bytes) + "; ";
  }
  return text;
}

TEST(MemoryBudgetTest, PolicyNamesRoundTrip) {
  for (const BudgetPolicy policy :
       {BudgetPolicy::kClaim, BudgetPolicy::kCapped, BudgetPolicy::kCommitted,
        BudgetPolicy::kFixed}) {
    EXPECT_EQ(ParseBudgetPolicy(BudgetPolicyName(policy)), policy);
  }
  EXPECT_STREQ(BudgetPolicyName(BudgetPolicy::kCommitted), "committed");
  EXPECT_FALSE(ParseBudgetPolicy("").has_value());
  EXPECT_FALSE(ParseBudgetPolicy("Claim").has_value());
}

// --- claim

TEST(MemoryBudgetTest, ClaimIsTotalTimesFractionLessWeightsAndPeak) {
  BudgetRequest request;
  request.fraction = 0.5;
  request.weights_bytes = 1 * kGiB;
  request.profile_peak_bytes = 512 * kMiB;
  const MemoryBudget budget = Plan(request, OneLimit(16 * kGiB, 4 * kGiB));
  EXPECT_TRUE(budget.granted) << budget.refusal;
  EXPECT_EQ(budget.refusal, "");
  EXPECT_EQ(budget.bytes, GiB(6.5));  // 16 x 0.5 - 1 - 0.5
  EXPECT_EQ(budget.blocks, 3803);     // 6656 MiB / 1.75 MiB = 3803.4
  EXPECT_EQ(budget.tokens, 3803 * 16);
  EXPECT_EQ(budget.binding_limit, "cgroup v1 memory /a/b");
  EXPECT_EQ(budget.fitting_fraction, 0);
  EXPECT_EQ(Terms(budget),
            "total 17179869184; claim 8589934592; weights -1073741824; "
            "profile peak -536870912; KV budget 6979321856; "
            "available 12884901888; KV pool " +
                std::to_string(3803 * kBlock) + "; ");
  EXPECT_EQ(budget.terms[0].note,
            "cgroup v1 memory /a/b, the smallest of 1 limit");
  EXPECT_EQ(budget.terms[1].note, "total x fraction 0.50");
  EXPECT_EQ(budget.terms.back().note, "3803 blocks of 1.75 MiB = 60848 tokens");
}

TEST(MemoryBudgetTest, RefusedClaimSaysWhatBindsAndWhichFractionFits) {
  BudgetRequest request;
  request.weights_bytes = GiB(1.2);
  request.weights_resident = true;
  const MemoryLimits limits = OneLimit(GiB(23.4), GiB(11.4));
  const MemoryBudget budget = Plan(request, limits);
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.refusal,
            "claim of 0.90 x 23.40 GiB - weights 1.20 GiB = 19.86 GiB, but "
            "only 12 GiB is available under cgroup v1 memory /a/b (limit "
            "23.40 GiB, 11.40 GiB in use); a fraction of 0.56 would fit");
  EXPECT_EQ(budget.fitting_fraction, 0.56);
  EXPECT_EQ(budget.binding_limit, "cgroup v1 memory /a/b");
  EXPECT_EQ(budget.blocks, 0);
  EXPECT_NEAR(static_cast<double>(budget.bytes), 19.86 * double{kGiB},
              double{kMiB});
}

TEST(MemoryBudgetTest, WeightsStillToBeLoadedNeedRoomToo) {
  BudgetRequest request;
  request.fraction = 0.75;
  request.weights_bytes = 4 * kGiB;
  // KV of 8 GiB alone would fit into 10; with 4 of weights it would not.
  const MemoryLimits limits = OneLimit(16 * kGiB, 6 * kGiB);
  MemoryBudget budget = Plan(request, limits);
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.refusal,
            "claim of 0.75 x 16 GiB = 12 GiB (weights 4 GiB, KV 8 GiB), but "
            "only 10 GiB is available under cgroup v1 memory /a/b (limit 16 "
            "GiB, 6 GiB in use); a fraction of 0.62 would fit");
  request.weights_resident = true;  // then they are among the 6 in use
  budget = Plan(request, limits);
  EXPECT_TRUE(budget.granted) << budget.refusal;
  EXPECT_EQ(budget.bytes, 8 * kGiB);
}

TEST(MemoryBudgetTest, TheBusyHostIsNamedWhereItBindsAndNotTheContainer) {
  const MemoryBudget budget = Plan({}, HostAndCgroup());
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.binding_limit, "host RAM");
  EXPECT_EQ(budget.refusal,
            "claim of 0.90 x 16 GiB = 14.40 GiB, but only 6 GiB is available "
            "under host RAM (limit 64 GiB, 58 GiB in use); a fraction of 0.37 "
            "would fit");
}

TEST(MemoryBudgetTest, WeightsBeyondTheClaimAreRefusedWithTheFractionToUse) {
  BudgetRequest request;
  request.fraction = 0.25;
  request.weights_bytes = 5 * kGiB;
  const MemoryBudget budget = Plan(request, OneLimit(16 * kGiB, 0));
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.bytes, 0);
  EXPECT_EQ(budget.refusal,
            "claim of 0.25 x 16 GiB = 4 GiB under cgroup v1 memory /a/b (limit "
            "16 GiB, 0 B in use) is used up by weights 5 GiB, nothing is left "
            "for KV; a fraction of 0.32 would fit");
}

TEST(MemoryBudgetTest, WeightsBeyondTheMachineAreRefusedWithTheLimitToRaise) {
  BudgetRequest request;
  request.weights_bytes = 20 * kGiB;
  const MemoryBudget budget = Plan(request, OneLimit(16 * kGiB, 1 * kGiB));
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.fitting_fraction, 0);
  EXPECT_EQ(budget.refusal,
            "claim of 0.90 x 16 GiB = 14.40 GiB under cgroup v1 memory /a/b "
            "(limit 16 GiB, 1 GiB in use) is used up by weights 20 GiB, "
            "nothing is left for KV; no fraction fits; the least that is "
            "needed is weights 20 GiB, one block of 1.75 MiB: raise cgroup v1 "
            "memory /a/b to at least 20.00 GiB, and free 5.00 GiB under cgroup "
            "v1 memory /a/b or raise its limit by as much");
}

TEST(MemoryBudgetTest, ACgroupSmallerThanOneBlockIsRefusedWithBothSizes) {
  const MemoryBudget budget = Plan({}, OneLimit(1 * kMiB, 100 * kKiB));
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.refusal,
            "claim of 0.90 x 1 MiB = 921.60 KiB under cgroup v1 memory /a/b "
            "(limit 1 MiB, 100 KiB in use) leaves 921.60 KiB for KV, less than "
            "one block of 1.75 MiB; no fraction fits; the least that is needed "
            "is one block of 1.75 MiB: raise cgroup v1 memory /a/b to at least "
            "1.75 MiB, and free 1.10 MiB under cgroup v1 memory /a/b or raise "
            "its limit by as much")
      << "a pool takes whole slabs, of 2 MiB at least";
  const MemoryBudget nothing = Plan({}, OneLimit(0, 0));
  EXPECT_FALSE(nothing.granted);
  EXPECT_NE(nothing.refusal.find("leaves 0 B for KV"), std::string::npos)
      << nothing.refusal;
}

// What a refusal advises is granted when it is asked for, at every mix of
// total, use, weights and peak; and nothing larger by a step would be.
TEST(MemoryBudgetTest, TheFittingFractionIsGrantedWhenFedBack) {
  int refused = 0;
  int fed_back = 0;
  for (const double total : {0.05, 1.0, 7.77, 23.4, 64.0, 755.3}) {
    for (const double used_share : {0.0, 0.11, 0.49, 0.87, 0.995}) {
      for (const double weights_share : {0.0, 0.013, 0.3, 0.95}) {
        for (const bool resident : {false, true}) {
          for (const double fraction : {0.01, 0.333, 0.9, 1.0}) {
            const MemoryLimits limits =
                OneLimit(GiB(total), GiB(total * used_share));
            BudgetRequest request;
            request.fraction = fraction;
            request.weights_bytes = GiB(total * weights_share);
            request.weights_resident = resident;
            request.profile_peak_bytes = 3 * kMiB;
            const MemoryBudget first = Plan(request, limits);
            if (first.granted) continue;
            ++refused;
            if (first.fitting_fraction == 0) continue;
            ++fed_back;
            request.fraction = first.fitting_fraction;
            const MemoryBudget second = Plan(request, limits);
            EXPECT_TRUE(second.granted) << first.refusal << "\n"
                                        << second.refusal;
            EXPECT_GE(second.blocks, 1);
            // The nearest: a hundredth back towards what was asked for fails.
            const bool hundredths =
                std::round(first.fitting_fraction * 100) / 100 ==
                first.fitting_fraction;
            if (!hundredths) continue;
            const double step =
                first.fitting_fraction < fraction ? 0.01 : -0.01;
            request.fraction = first.fitting_fraction + step;
            if (std::abs(request.fraction - fraction) < 0.01 ||
                request.fraction > 1) {
              continue;
            }
            EXPECT_FALSE(Plan(request, limits).granted) << first.refusal;
          }
        }
      }
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(fed_back, 50);
}

// The advice is read by people: the printed number is what is fed back.
TEST(MemoryBudgetTest, ThePrintedFractionIsTheOneThatFits) {
  // 24 GiB with 100 MiB left: two decimals are too coarse.
  const MemoryLimits limits = OneLimit(24 * kGiB, 24 * kGiB - 100 * kMiB);
  BudgetRequest request;
  const MemoryBudget budget = Plan(request, limits);
  const std::string marker = "a fraction of ";
  const size_t at = budget.refusal.find(marker);
  ASSERT_NE(at, std::string::npos) << budget.refusal;
  request.fraction =
      std::strtod(budget.refusal.c_str() + at + marker.size(), nullptr);
  EXPECT_EQ(request.fraction, 0.004);
  EXPECT_EQ(request.fraction, budget.fitting_fraction);
  EXPECT_TRUE(Plan(request, limits).granted);
}

// --- capped

TEST(MemoryBudgetTest, CapIsTwoThirdsUpTo36GiBAndThreeQuartersAbove) {
  struct Case {
    int64_t total, cap;
  };
  const Case cases[] = {
      {24 * kGiB, 16 * kGiB},         {36 * kGiB, 24 * kGiB},
      {36 * kGiB + 4, 27 * kGiB + 3}, {64 * kGiB, 48 * kGiB},
      {512 * kGiB, 384 * kGiB},
  };
  for (const Case& c : cases) {
    BudgetRequest request;
    request.policy = BudgetPolicy::kCapped;
    request.utilisation = 1.0;
    const MemoryBudget budget = Plan(request, OneLimit(c.total, kGiB));
    EXPECT_TRUE(budget.granted) << budget.refusal;
    EXPECT_EQ(budget.terms[1].bytes, c.cap);
    EXPECT_EQ(budget.bytes, c.cap - kGiB);
  }
}

TEST(MemoryBudgetTest, CappedIsTheSmallerOfHintAndCapTimesUtilisationLessUse) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kCapped;
  request.utilisation = 0.5;
  request.hint_bytes = 10 * kGiB;
  const MemoryLimits limits = OneLimit(24 * kGiB, 2 * kGiB);  // cap 16
  MemoryBudget budget = Plan(request, limits);
  EXPECT_TRUE(budget.granted) << budget.refusal;
  EXPECT_EQ(budget.bytes, 3 * kGiB);  // 10 x 0.5 - 2
  EXPECT_EQ(Terms(budget).substr(0, 113),
            "total 25769803776; cap 17179869184; hint 10737418240; usable "
            "5368709120; used -2147483648; KV budget 3221225472; ");
  request.hint_bytes = 100 * kGiB;
  EXPECT_EQ(Plan(request, limits).bytes, 6 * kGiB);  // 16 x 0.5 - 2
  request.weights_bytes = 1 * kGiB;  // to come: mistral.rs sees them as used
  EXPECT_EQ(Plan(request, limits).bytes, 5 * kGiB);
  request.weights_resident = true;  // then they are in the 2 GiB
  EXPECT_EQ(Plan(request, limits).bytes, 6 * kGiB);
}

TEST(MemoryBudgetTest, RefusedCappedAdvisesAUtilisationThatFits) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kCapped;
  const MemoryBudget budget = Plan(request, HostAndCgroup());
  EXPECT_FALSE(budget.granted);  // 10.67 x 0.9 - 1 = 8.6 of 6
  EXPECT_EQ(budget.binding_limit, "host RAM");
  EXPECT_EQ(budget.refusal,
            "capped at 10.67 GiB x 0.90 - 1 GiB in use leaves 8.60 GiB for KV, "
            "but only 6 GiB is available under host RAM (limit 64 GiB, 58 GiB "
            "in use); a utilisation of 0.65 would fit");
  request.utilisation = 0.65;
  EXPECT_TRUE(Plan(request, HostAndCgroup()).granted);
}

TEST(MemoryBudgetTest, RefusedCappedAdvisesAHintWhereThatIsWhatBinds) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kCapped;
  request.utilisation = 0.5;
  request.hint_bytes = 1 * kGiB;
  const MemoryLimits limits = OneLimit(24 * kGiB, 2 * kGiB);
  const MemoryBudget budget = Plan(request, limits);
  EXPECT_FALSE(budget.granted);
  const std::string marker = "hint_bytes of ";
  const size_t at = budget.refusal.find(marker);
  ASSERT_NE(at, std::string::npos) << budget.refusal;
  request.hint_bytes =
      std::strtoll(budget.refusal.c_str() + at + marker.size(), nullptr, 10);
  EXPECT_TRUE(Plan(request, limits).granted);
}

TEST(MemoryBudgetTest, CappedWithTooMuchInUseSaysHowMuchToRaise) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kCapped;
  const MemoryBudget budget = Plan(request, OneLimit(24 * kGiB, 20 * kGiB));
  EXPECT_FALSE(budget.granted);
  EXPECT_NE(budget.refusal.find("less than one block of 1.75 MiB"),
            std::string::npos)
      << budget.refusal;
  EXPECT_NE(budget.refusal.find("raise cgroup v1 memory /a/b to at least 30"),
            std::string::npos)
      << budget.refusal;
}

// --- committed

TEST(MemoryBudgetTest, CommittedIsTheShapeTimesTheContextWhateverIsThere) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kCommitted;
  request.context_tokens = 40960;
  // 28 layers x 2 x 8 x 128 x 40960 x 2 B = 4.375 GiB.
  const int64_t bytes = int64_t{28} * 2 * 8 * 128 * 40960 * 2;
  MemoryBudget budget = Plan(request, MemoryLimits());
  EXPECT_TRUE(budget.granted);
  EXPECT_EQ(budget.bytes, bytes);
  EXPECT_EQ(budget.tokens, 40960);
  EXPECT_EQ(budget.binding_limit, "");
  EXPECT_EQ(Terms(budget), "KV of tokens " + std::to_string(bytes) +
                               "; KV pool " + std::to_string(bytes) + "; ");

  budget = Plan(request, OneLimit(2 * kGiB, kGiB));  // granted, with a word
  EXPECT_TRUE(budget.granted);
  EXPECT_EQ(budget.bytes, bytes);
  EXPECT_NE(budget.terms.back().note.find(
                "exceeds the 1 GiB available under cgroup v1 memory /a/b"),
            std::string::npos)
      << budget.terms.back().note;
  EXPECT_EQ(budget.binding_limit, "cgroup v1 memory /a/b");
}

TEST(MemoryBudgetTest, CommittedHoldsEveryTokenOfAnOddContext) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kCommitted;
  request.context_tokens = 100;  // 6.25 blocks
  const KvLayout layout{DType::kF32, 2, 3, 64, 72, 16};
  const MemoryBudget budget = Plan(request, MemoryLimits(), layout);
  EXPECT_EQ(budget.blocks, 7);
  EXPECT_EQ(budget.tokens, 112);
  EXPECT_EQ(budget.bytes, 7 * layout.block_bytes());
  // 2 x 3 x (64 + 72) x 100 x 4 B; the rest is padding, V rows of 72 to 80.
  EXPECT_EQ(budget.terms[0].bytes, 326400);
  EXPECT_EQ(budget.terms[1].name, "padding");
  EXPECT_EQ(budget.terms[1].bytes, 112 * 2 * 3 * (64 + 80) * 4 - 326400);
}

// --- fixed

TEST(MemoryBudgetTest, FixedBytesAndTokensAreTaken) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kFixed;
  request.fixed_bytes = 10 * kBlock + 5;
  MemoryBudget budget = Plan(request, OneLimit(kGiB, 0));
  EXPECT_TRUE(budget.granted) << budget.refusal;
  EXPECT_EQ(budget.bytes, 10 * kBlock + 5);
  EXPECT_EQ(budget.blocks, 10);
  request.fixed_bytes = 0;
  request.fixed_tokens = 161;
  budget = Plan(request, OneLimit(kGiB, 0));
  EXPECT_EQ(budget.blocks, 11);
  EXPECT_EQ(budget.tokens, 176);
  // No limits known: the caller's word is enough.
  EXPECT_TRUE(Plan(request, MemoryLimits()).granted);
}

TEST(MemoryBudgetTest, RefusedFixedAdvisesASizeThatFits) {
  BudgetRequest request;
  request.policy = BudgetPolicy::kFixed;
  request.fixed_bytes = 8 * kGiB;
  request.weights_bytes = 1 * kGiB;
  const MemoryLimits limits = OneLimit(8 * kGiB, 4 * kGiB);
  const MemoryBudget budget = Plan(request, limits);
  EXPECT_FALSE(budget.granted);
  EXPECT_EQ(budget.refusal,
            "fixed KV of 8 GiB and 1 GiB of weights and peak to come, but only "
            "4 GiB is available under cgroup v1 memory /a/b (limit 8 GiB, 4 "
            "GiB in use); fixed_bytes of " +
                std::to_string(1755 * kBlock) +
                " (3.00 GiB, 28080 tokens) would fit");
  request.fixed_bytes = 1755 * kBlock;
  EXPECT_TRUE(Plan(request, limits).granted);
  request.fixed_bytes += kBlock;
  EXPECT_FALSE(Plan(request, limits).granted);

  request.fixed_bytes = 1000;
  EXPECT_EQ(Plan(request, limits).refusal,
            "fixed_bytes = 1000 is less than one block of 1.75 MiB; 1835008 "
            "would fit one");
  request.fixed_bytes = kGiB;
  EXPECT_EQ(Plan(request, OneLimit(kGiB, kGiB - kMiB)).refusal,
            "fixed KV of 1 GiB and 1 GiB of weights and peak to come, but only "
            "1 MiB is available under cgroup v1 memory /a/b (limit 1 GiB, "
            "1023 MiB in use); no size fits; the least that is needed is "
            "weights 1 GiB, one block of 1.75 MiB: free 1.00 GiB under cgroup "
            "v1 memory /a/b or raise its limit by as much");
}

// --- arguments

TEST(MemoryBudgetTest, FieldsOutOfRangeAreNamed) {
  BudgetRequest request;
  request.fraction = 0;
  EXPECT_EQ(Invalid(request), "fraction = 0, must be in (0, 1]");
  request.fraction = 1.5;
  EXPECT_EQ(Invalid(request), "fraction = 1.5, must be in (0, 1]");
  request.fraction = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(Invalid(request), "fraction = nan, must be in (0, 1]");
  request = {};
  request.utilisation = -1;
  EXPECT_EQ(Invalid(request), "utilisation = -1, must be in (0, 1]");
  request = {};
  request.weights_bytes = -5;
  EXPECT_EQ(Invalid(request),
            "weights_bytes = -5, must be in [0, 1152921504606846976]");
  request = {};
  request.profile_peak_bytes = std::numeric_limits<int64_t>::max();
  EXPECT_NE(Invalid(request).find("profile_peak_bytes = 92233720368547758"),
            std::string::npos);
  request = {};
  request.policy = static_cast<BudgetPolicy>(7);
  EXPECT_EQ(Invalid(request),
            "policy = 7, must be claim, capped, committed or fixed");
}

TEST(MemoryBudgetTest, WhatAPolicyNeedsAndLacksIsNamed) {
  BudgetRequest request;
  EXPECT_EQ(Invalid(request, MemoryLimits()),
            "limits is empty, but policy claim needs those of "
            "MemoryLimits::Detect");
  request.policy = BudgetPolicy::kCommitted;
  EXPECT_EQ(Invalid(request),
            "context_tokens = 0, must be positive for policy committed");
  request.context_tokens = int64_t{1} << 59;
  EXPECT_NE(Invalid(request).find("context_tokens = 576460752303423488 of 112 "
                                  "KiB each, must be at most "),
            std::string::npos);
  request = {};
  request.policy = BudgetPolicy::kFixed;
  EXPECT_EQ(Invalid(request),
            "fixed_bytes = 0 and fixed_tokens = 0, exactly one must be "
            "positive for policy fixed");
  request.fixed_bytes = 5;
  request.fixed_tokens = 5;
  EXPECT_NE(Invalid(request).find("exactly one"), std::string::npos);
  KvLayout layout = kQwen;
  layout.block_size = 7;
  EXPECT_EQ(Invalid({}, OneLimit(kGiB, 0), layout),
            "block_size = 7, must be a power of two in [16, 256]");
}

// The extremes that the checks let through stay inside int64 (UBSan watches).
TEST(MemoryBudgetTest, ExtremeSizesDoNotOverflow) {
  constexpr int64_t kMost = int64_t{1} << 60;
  for (const BudgetPolicy policy :
       {BudgetPolicy::kClaim, BudgetPolicy::kCapped, BudgetPolicy::kFixed}) {
    for (const int64_t used : {int64_t{0}, kMost}) {
      BudgetRequest request;
      request.policy = policy;
      request.fraction = 1;
      request.weights_bytes = kMost;
      request.profile_peak_bytes = kMost;
      request.fixed_bytes = kMost;
      const MemoryBudget budget = Plan(request, OneLimit(kMost, used));
      EXPECT_FALSE(budget.granted);
      EXPECT_NE(budget.refusal, "");
    }
  }
}

// --- the reserve

// The tightest limit is the one with the least room, not the least available.
TEST(MemoryBudgetTest, WhatALimitReservesIsNotPlanned) {
  MemoryLimits limits;
  limits.Add({"host RAM", 100 * kGiB, 90 * kGiB, 10 * kGiB,
              LimitReserveBytes(100 * kGiB)});
  limits.Add({"cgroup v2 memory.max /pod", 10 * kGiB, 500 * kMiB,
              10 * kGiB - 500 * kMiB, LimitReserveBytes(10 * kGiB)});
  EXPECT_EQ(limits.binding_available, 1);
  EXPECT_EQ(limits.binding_room, 0);
  EXPECT_EQ(limits.room_bytes, 8 * kGiB);
  BudgetRequest request;
  request.policy = BudgetPolicy::kFixed;
  request.fixed_bytes = 8 * kGiB;
  EXPECT_TRUE(Plan(request, limits).granted);
  request.fixed_bytes += kBlock;
  const MemoryBudget budget = Plan(request, limits);
  EXPECT_FALSE(budget.granted);
  EXPECT_NE(budget.refusal.find("only 10 GiB is available under host RAM "
                                "(limit 100 GiB, 90 GiB in use), 2 GiB of it "
                                "kept in reserve; fixed_bytes of "),
            std::string::npos)
      << budget.refusal;
  EXPECT_EQ(Terms(budget), "KV bytes " + std::to_string(8 * kGiB + kBlock) +
                               "; available " + std::to_string(10 * kGiB) +
                               "; reserve " + std::to_string(-2 * kGiB) + "; ");
}

// A pool takes whole slabs, so the size that a refusal advises does too.
TEST(MemoryBudgetTest, TheAdvisedSizeFitsInWholeSlabs) {
  for (const int64_t room : {3 * kMiB, 70 * kMiB, 129 * kMiB, 1000 * kMiB,
                             3001 * kMiB, 9999 * kMiB}) {
    BudgetRequest request;
    request.policy = BudgetPolicy::kFixed;
    request.fixed_bytes = 64 * kGiB;
    const MemoryLimits limits = OneLimit(16 * kGiB, 16 * kGiB - room);
    const MemoryBudget refused = Plan(request, limits);
    const std::string marker = "fixed_bytes of ";
    const size_t at = refused.refusal.find(marker);
    ASSERT_NE(at, std::string::npos) << refused.refusal;
    request.fixed_bytes =
        std::strtoll(refused.refusal.c_str() + at + marker.size(), nullptr, 10);
    EXPECT_TRUE(Plan(request, limits).granted) << refused.refusal;
    request.fixed_bytes += kBlock;
    EXPECT_FALSE(Plan(request, limits).granted) << refused.refusal;
  }
}

// --- environment

class MemoryFractionTest : public ::testing::Test {
 protected:
  static void Set(const char* value) {
    ASSERT_EQ(setenv("VARLANE_MEMORY_FRACTION", value, 1), 0);
  }
  void SetUp() override { unsetenv("VARLANE_MEMORY_FRACTION"); }
  void TearDown() override { unsetenv("VARLANE_MEMORY_FRACTION"); }
};

TEST_F(MemoryFractionTest, DefaultsToNineTenthsAndFollowsTheVariable) {
  Result<double> fraction = MemoryFractionFromEnvironment();
  VARLANE_ASSERT_OK(fraction);
  EXPECT_EQ(*fraction, 0.9);
  Set("0.56");
  fraction = MemoryFractionFromEnvironment();
  VARLANE_ASSERT_OK(fraction);
  EXPECT_EQ(*fraction, 0.56);
  Set("1");
  VARLANE_EXPECT_OK(MemoryFractionFromEnvironment());
}

TEST_F(MemoryFractionTest, WhatIsNoFractionIsRefusedByName) {
  for (const char* bad : {"0", "0.0", "-0.5", "1.01", "90%", "nan", "half"}) {
    Set(bad);
    const Result<double> fraction = MemoryFractionFromEnvironment();
    EXPECT_EQ(fraction.status().code(), StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(fraction.status().message().find("VARLANE_MEMORY_FRACTION"),
              std::string_view::npos);
  }
}

}  // namespace
}  // namespace varlane
