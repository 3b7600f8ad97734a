// Quotas of tenants: who waits, who is preempted, and that others go on.
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"
#include "varlane/scheduler.h"

namespace varlane {
namespace {

using testing::FindEntry;
using testing::IdsOf;
using testing::ServingHarness;
using Ids = std::vector<RequestId>;

TEST(QuotaTest, ARequestBeyondItsTenantsQuotaNeverFits) {
  ServingHarness service(16, {.watermark = 0});
  VARLANE_ASSERT_OK(service.pool().SetTenantQuota(7, 3));
  const Admission refused = service.Submit(
      {.id = 1, .prompt_tokens = 40, .max_new_tokens = 9, .tenant = 7});
  EXPECT_EQ(refused.kind, Admission::Kind::kNeverFits);
  EXPECT_EQ(refused.limit, Admission::Limit::kQuota);
  EXPECT_EQ(refused.needed_blocks, 4);
  EXPECT_EQ(refused.capacity_blocks, 3);
  EXPECT_TRUE(
      service
          .Submit(
              {.id = 1, .prompt_tokens = 40, .max_new_tokens = 8, .tenant = 7})
          .admitted());
  service.Drain(20);
  service.ExpectAllGone();
}

TEST(QuotaTest, AFullTenantHoldsUpItselfOnly) {
  ServingHarness service(16, {.watermark = 0});
  VARLANE_ASSERT_OK(service.pool().SetTenantQuota(7, 4));
  const auto submit = [&](RequestId id, int64_t prompt, TenantId tenant) {
    service.Submit({.id = id,
                    .prompt_tokens = prompt,
                    .max_new_tokens = 4,
                    .tenant = tenant});
  };
  submit(1, 40, 7);  // 3 blocks
  submit(2, 20, 7);  // 2: waits for 1
  submit(3, 4, 7);   // would fit, but does not overtake
  submit(4, 40, 8);
  EXPECT_EQ(IdsOf(service.Schedule()), (Ids{1, 4}));
  service.Complete();
  service.Drain(40);
  service.ExpectAllGone();
  EXPECT_LE(service.history(2).first_step, service.history(3).first_step);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
}

TEST(QuotaTest, TheVictimIsOfTheSameTenant) {
  ServingHarness service(32, {.watermark = 0});
  VARLANE_ASSERT_OK(service.pool().SetTenantQuota(7, 4));
  const auto submit = [&](RequestId id, TenantId tenant) {
    service.Submit({.id = id,
                    .prompt_tokens = 16,
                    .max_new_tokens = 40,
                    .tenant = tenant});
  };
  submit(1, 7);
  submit(2, 7);
  submit(3, 8);  // the youngest of all
  service.Drain(200);
  service.ExpectAllGone();
  EXPECT_GT(service.scheduler().stats().preemptions, 0);
  EXPECT_EQ(service.history(1).restarts, 0);
  EXPECT_GT(service.history(2).restarts, 0);
  EXPECT_EQ(service.history(3).restarts, 0);
  EXPECT_EQ(service.history(3).generated, 40);
}

// Others' sequences hold what the tenant may have: its requests wait, and where
// there is nobody else the error says so.
TEST(QuotaTest, ForeignSequencesOfTheTenantAreWaitedFor) {
  ServingHarness service(16, {.watermark = 0});
  KvPool& pool = service.pool();
  VARLANE_ASSERT_OK(pool.SetTenantQuota(7, 4));
  const SeqId foreign = pool.CreateSequence({.tenant = 7});
  VARLANE_ASSERT_OK(pool.Append(foreign, 48));
  service.Submit(
      {.id = 1, .prompt_tokens = 8, .max_new_tokens = 20, .tenant = 7});
  service.Submit(
      {.id = 2, .prompt_tokens = 8, .max_new_tokens = 30, .tenant = 8});
  // One block is left to tenant 7: request 1 outgrows it and goes back.
  Step step;
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(service.RunStep());
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_EQ(service.history(2).generated, 30);
  EXPECT_FALSE(service.history(1).ended);
  const Status stuck = service.scheduler().Schedule(&step);
  EXPECT_EQ(stuck.ToString(),
            "RESOURCE_EXHAUSTED: request 1 cannot go on: sequences that are "
            "not the scheduler's hold 3 of the 4 blocks that tenant 7 may "
            "have");
  EXPECT_TRUE(step.empty());
  VARLANE_ASSERT_OK(pool.Free(foreign));
  service.Drain(60);
  EXPECT_EQ(service.history(1).generated, 20);
  service.ExpectAllGone();
}

TEST(QuotaTest, RandomTenantsAllEndAndNobodyHasMoreThanItMay) {
  int64_t preemptions = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const auto draw = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const int64_t num_blocks = draw(6, 24);
    ServingHarness service(num_blocks, {.token_budget = draw(4, 80),
                                        .max_seqs = draw(2, 12),
                                        .watermark = double(draw(0, 2)) / 10});
    int64_t quotas[3];
    for (TenantId tenant = 0; tenant < 3; ++tenant) {
      quotas[tenant] = draw(3, num_blocks);
      VARLANE_ASSERT_OK(service.pool().SetTenantQuota(tenant, quotas[tenant]));
    }
    std::vector<RequestId> accepted;
    for (RequestId id = 0; id < 40 || !service.scheduler().idle();) {
      for (int64_t i = draw(0, 2); i > 0 && id < 40; --i, ++id) {
        const TenantId tenant = TenantId(draw(0, 2));
        const int64_t most = quotas[tenant] * testing::kTestBlockSize;
        const Admission admission =
            service.Submit({.id = id,
                            .prompt_tokens = draw(1, most / 2),
                            .max_new_tokens = draw(1, most / 2),
                            .priority = int(draw(0, 1)),
                            .tenant = tenant});
        if (admission.kind != Admission::Kind::kNeverFits) {
          accepted.push_back(id);
        }
      }
      service.RunStep();
      for (TenantId tenant = 0; tenant < 3; ++tenant) {
        ASSERT_LE(service.pool().tenant_stats(tenant).used_blocks,
                  quotas[tenant]);
      }
      ASSERT_LT(service.steps(), 20'000) << "no end in sight";
      if (HasFailure()) return;
    }
    service.ExpectAllGone();
    for (const RequestId id : accepted) {
      EXPECT_EQ(service.history(id).generated,
                service.history(id).request.max_new_tokens);
    }
    preemptions += service.scheduler().stats().preemptions;
  }
  EXPECT_GT(preemptions, 100);
}

}  // namespace
}  // namespace varlane
