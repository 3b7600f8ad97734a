// Who is preempted when the pool runs dry, and what becomes of it.
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <vector>

#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"
#include "varlane/scheduler.h"

namespace varlane {
namespace {

using testing::FindEntry;
using testing::IdsOf;
using testing::ServingHarness;

// Steps until something was preempted; the step that did it is outstanding.
void ScheduleUntilPreemption(ServingHarness* service) {
  for (int i = 0; i < 200; ++i) {
    service->Schedule();
    if (service->scheduler().stats().preemptions > 0) return;
    service->Complete();
  }
  FAIL() << "nothing was preempted";
}

TEST(PreemptionTest, PreemptedRequestRecomputesAndGeneratesAsManyTokens) {
  ServingHarness service(4, {.watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 40});
  service.Submit({.id = 2, .prompt_tokens = 16, .max_new_tokens = 20});
  // Both hold two full blocks when 1 needs a third.
  ScheduleUntilPreemption(&service);
  EXPECT_EQ(IdsOf(service.step()), std::vector<RequestId>{1});
  EXPECT_EQ(service.history(2).generated, 17);
  EXPECT_EQ(service.pool().stats().sequences, 1);
  EXPECT_EQ(service.scheduler().stats().waiting, 1);
  do {
    service.Complete();
    ASSERT_LT(service.steps(), 60);
  } while (FindEntry(service.Schedule(), 2) == nullptr);
  // It feeds its prompt and what it generated again, as one prefill, and its
  // last row yields the next token.
  const StepEntry entry = *FindEntry(service.step(), 2);
  EXPECT_EQ(entry.begin, 0);
  EXPECT_EQ(entry.count, 16 + 17);
  EXPECT_TRUE(entry.is_prefill);
  EXPECT_TRUE(entry.samples);
  service.Complete();
  service.Drain(60);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(1).generated, 40);
  EXPECT_EQ(service.history(1).restarts, 0);
  EXPECT_EQ(service.history(2).generated, 20);
  EXPECT_EQ(service.history(2).restarts, 1);
  const SchedulerStats stats = service.scheduler().stats();
  EXPECT_EQ(stats.preemptions, 1);
  EXPECT_EQ(stats.recomputed_tokens, 32);
  EXPECT_EQ(stats.prefill_tokens, 16 + 16 + 33);
  EXPECT_EQ(stats.decode_tokens, 39 + 16 + 2);
}

TEST(PreemptionTest, RecomputingIsChunkedLikeAnyPrefill) {
  ServingHarness service(4, {.max_chunk = 10, .watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 40});
  service.Submit({.id = 2, .prompt_tokens = 16, .max_new_tokens = 20});
  service.Drain(200);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(2).chunks,
            (std::vector<int64_t>{10, 6, 10, 10, 10, 3}));
  EXPECT_EQ(service.history(2).generated, 20);
}

TEST(PreemptionTest, YoungestOfTheLowestPriorityIsTheVictim) {
  ServingHarness service(6, {.watermark = 0});
  service.Submit(
      {.id = 1, .prompt_tokens = 16, .max_new_tokens = 40, .priority = 0});
  service.Submit(
      {.id = 2, .prompt_tokens = 16, .max_new_tokens = 40, .priority = 0});
  service.Submit(
      {.id = 3, .prompt_tokens = 16, .max_new_tokens = 40, .priority = 5});
  ScheduleUntilPreemption(&service);
  EXPECT_EQ(IdsOf(service.step()), (std::vector<RequestId>{3, 1}));
  service.Complete();
  service.Drain(400);
  service.ExpectAllGone();
  EXPECT_GT(service.history(2).restarts, 0);
  EXPECT_EQ(service.history(3).restarts, 0);
}

TEST(PreemptionTest, AgeDoesNotSaveALowerPriority) {
  ServingHarness service(4, {.watermark = 0});
  service.Submit(
      {.id = 1, .prompt_tokens = 16, .max_new_tokens = 40, .priority = 0});
  service.Submit(
      {.id = 2, .prompt_tokens = 16, .max_new_tokens = 40, .priority = 1});
  service.Drain(400);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(1).restarts, 1);
  EXPECT_EQ(service.history(2).restarts, 0);
}

TEST(PreemptionTest, VictimStandsInFrontOfItsPriorityClass) {
  ServingHarness service(4, {.max_seqs = 2, .watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 40});
  service.Submit({.id = 2, .prompt_tokens = 16, .max_new_tokens = 20});
  service.Submit({.id = 3, .prompt_tokens = 4, .max_new_tokens = 1});
  service.Submit({.id = 4, .prompt_tokens = 4, .max_new_tokens = 1});
  ScheduleUntilPreemption(&service);
  service.Submit(
      {.id = 5, .prompt_tokens = 4, .max_new_tokens = 1, .priority = 1});
  std::vector<RequestId> order;  // of those that start from here on
  do {
    service.Complete();
    for (const StepEntry& entry : service.Schedule().entries) {
      if (entry.begin == 0) order.push_back(entry.request);
    }
    ASSERT_LT(service.steps(), 100);
  } while (!service.step().empty());
  EXPECT_EQ(order, (std::vector<RequestId>{5, 2, 3, 4}));
  service.ExpectAllGone();
}

TEST(PreemptionTest, NothingStartsInAStepThatPreempted) {
  ServingHarness service(4, {.watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 40});
  service.Submit({.id = 2, .prompt_tokens = 16, .max_new_tokens = 40});
  for (int i = 0; i < 17; ++i) ASSERT_TRUE(service.RunStep());
  ASSERT_EQ(service.pool().free_blocks(), 0);
  service.Submit({.id = 3, .prompt_tokens = 4, .priority = 1});
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{1});
  EXPECT_EQ(service.scheduler().stats().preemptions, 1);
  EXPECT_EQ(service.pool().free_blocks(), 1) << "3 would have fitted";
  service.Complete();
  EXPECT_EQ(IdsOf(service.Schedule()), (std::vector<RequestId>{1, 3}));
  service.Complete();
  service.Drain(400);
  service.ExpectAllGone();
}

TEST(PreemptionTest, PlannedDecodeGivesWayToABetterRequestsPrefill) {
  ServingHarness service(4, {.max_chunk = 2, .watermark = 0});
  service.Submit(
      {.id = 1, .prompt_tokens = 47, .max_new_tokens = 1, .priority = 1});
  service.Submit({.id = 2, .prompt_tokens = 1, .max_new_tokens = 40});
  // In step 16 the decode takes the last block before 1 needs its third.
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(service.RunStep());
  ASSERT_EQ(service.pool().free_blocks(), 1);
  const Step& step = service.Schedule();
  ASSERT_EQ(IdsOf(step), std::vector<RequestId>{1});
  EXPECT_EQ(step.entries[0].begin, 32);
  EXPECT_EQ(service.scheduler().stats().preemptions, 1);
  EXPECT_EQ(service.history(2).generated, 16);
  service.Complete();
  service.Drain(100);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(2).generated, 40);
  EXPECT_EQ(service.history(2).restarts, 1);
}

TEST(PreemptionTest, BudgetOfAPlannedVictimGoesToTheOneItMadeRoomFor) {
  ServingHarness service(6,
                         {.token_budget = 4, .max_chunk = 2, .watermark = 0});
  service.Submit({.id = 3, .prompt_tokens = 1, .max_new_tokens = 40});
  ASSERT_TRUE(service.RunStep());
  service.Submit(
      {.id = 1, .prompt_tokens = 47, .max_new_tokens = 1, .priority = 2});
  service.Submit(
      {.id = 2, .prompt_tokens = 30, .max_new_tokens = 1, .priority = 1});
  const Step& step = service.Schedule();
  EXPECT_EQ(IdsOf(step), (std::vector<RequestId>{3, 1, 2}));
  EXPECT_EQ(step.entries[2].count, 1);  // 4 - 1 - 2
  service.Complete();
  // In one step 3 decodes, 1 takes the last block, and 2 needs its second.
  ScheduleUntilPreemption(&service);
  ASSERT_EQ(IdsOf(step), (std::vector<RequestId>{1, 2}));
  EXPECT_EQ(step.entries[1].begin, 16);
  EXPECT_EQ(step.entries[1].count, 2);
  service.Complete();
  service.Drain(200);
  service.ExpectAllGone();
}

TEST(PreemptionTest, ShorterChunkIsPreferredToAPreemption) {
  ServingHarness service(5, {.max_chunk = 32, .watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 2});
  service.Submit({.id = 2, .prompt_tokens = 60, .max_new_tokens = 1});
  ASSERT_TRUE(service.RunStep());  // 1 + 2 blocks; 2 more are promised to 2
  const Step& step = service.Schedule();  // but the decode takes one of them
  ASSERT_EQ(IdsOf(step), (std::vector<RequestId>{1, 2}));
  EXPECT_EQ(step.entries[1].begin, 32);
  EXPECT_EQ(step.entries[1].count, 16);
  service.Complete();
  service.Drain(10);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
  service.ExpectAllGone();
}

TEST(PreemptionTest, CancelledWhilePreemptedIsForgotten) {
  ServingHarness service(4, {.watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 40});
  service.Submit({.id = 2, .prompt_tokens = 16, .max_new_tokens = 20});
  ScheduleUntilPreemption(&service);
  service.Cancel(2);
  EXPECT_EQ(service.scheduler().stats().waiting, 0);
  service.Complete();
  service.Drain(60);
  service.ExpectAllGone();
}

TEST(PreemptionTest, AloneRequestOfTheWholePoolIsNeverPreempted) {
  ServingHarness service(3, {.token_budget = 5, .watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 30, .max_new_tokens = 18});
  service.Drain(100);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(1).generated, 18);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
}

}  // namespace
}  // namespace varlane
