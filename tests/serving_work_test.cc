// The scheduler under memory pressure: preempting on demand, refusing new work.
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <vector>

#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"
#include "varlane/scheduler.h"

namespace varlane {
namespace {

using testing::IdsOf;
using testing::ServingHarness;

// Three requests of two blocks each; 1 has the highest priority, then 0, 2.
void StartThree(ServingHarness* service) {
  service->Submit({.id = 0, .prompt_tokens = 20, .max_new_tokens = 12});
  service->Submit(
      {.id = 1, .prompt_tokens = 20, .max_new_tokens = 12, .priority = 5});
  service->Submit({.id = 2, .prompt_tokens = 20, .max_new_tokens = 12});
  ASSERT_TRUE(service->RunStep());
  ASSERT_EQ(service->scheduler().stats().running, 3);
}

TEST(SchedulerPressureTest, TheLowestPriorityAndYoungestGoFirst) {
  ServingHarness service(32, {.watermark = 0});
  StartThree(&service);
  Result<int64_t> freed = service.scheduler().Preempt(1);
  VARLANE_ASSERT_OK(freed);
  EXPECT_EQ(*freed, 2);
  EXPECT_EQ(service.scheduler().stats().waiting, 1);
  EXPECT_EQ(service.pool().stats().sequences, 2);
  freed = service.scheduler().Preempt(1);
  VARLANE_ASSERT_OK(freed);
  service.scheduler().TakeWork(false);
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{1});
  service.Complete();
  service.scheduler().TakeWork(true);
  service.Drain(100);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(2).restarts, 1);
  EXPECT_EQ(service.history(0).restarts, 1);
  EXPECT_EQ(service.history(1).restarts, 0);
}

TEST(SchedulerPressureTest, TheLastRunningRequestIsNeverPreempted) {
  ServingHarness service(32, {.watermark = 0});
  StartThree(&service);
  const Result<int64_t> freed = service.scheduler().Preempt(1000);
  VARLANE_ASSERT_OK(freed);
  EXPECT_EQ(*freed, 4);
  EXPECT_EQ(service.scheduler().stats().running, 1);
  EXPECT_EQ(*service.scheduler().Preempt(1000), 0);
  EXPECT_EQ(service.scheduler().Preempt(-1).status().code(),
            StatusCode::kInvalidArgument);
  service.Drain(100);
  service.ExpectAllGone();
}

TEST(SchedulerPressureTest, BlocksOfAStepUnderWayAreNotTaken) {
  ServingHarness service(32, {.watermark = 0});
  StartThree(&service);
  service.Schedule();
  EXPECT_EQ(service.scheduler().Preempt(1).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
  service.Complete();
  service.Drain(100);
}

TEST(SchedulerPressureTest, NewWorkIsRefusedAndWaitingWorkHeldBack) {
  ServingHarness service(32, {.max_seqs = 1, .watermark = 0});
  service.Submit({.id = 0, .prompt_tokens = 4, .max_new_tokens = 3});
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 3});
  service.RunStep();
  Scheduler& scheduler = service.scheduler();
  scheduler.TakeWork(false);
  const Result<Admission> refused =
      scheduler.Submit({.id = 2, .prompt_tokens = 4, .max_new_tokens = 3});
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(refused.status().message(),
            "request 2 is refused: memory is short; try again later");
  EXPECT_EQ(scheduler.stats().refused, 1);
  EXPECT_FALSE(scheduler.stats().takes_work);
  // What was accepted is served to its end, one at a time.
  service.Drain(20);
  service.ExpectAllGone();
  EXPECT_EQ(service.history(1).generated, 3);
  scheduler.TakeWork(true);
  service.Submit({.id = 2, .prompt_tokens = 4, .max_new_tokens = 3});
  service.Drain(20);
  service.ExpectAllGone();
}

TEST(SchedulerPressureTest, StartsAreHeldWhileSomebodyRuns) {
  ServingHarness service(32, {.watermark = 0});
  service.Submit({.id = 0, .prompt_tokens = 4, .max_new_tokens = 3});
  service.RunStep();
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 3});
  service.scheduler().TakeWork(false);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{0});
    service.Complete();
  }
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{1});
  service.Complete();
  service.Drain(20);
}

TEST(SchedulerPressureTest, LeastBlocksAreThoseOfTheLongestAcceptedRequest) {
  ServingHarness service(32, {.max_seqs = 1, .watermark = 0});
  EXPECT_EQ(service.scheduler().LeastBlocks(), 0);
  service.Submit({.id = 0, .prompt_tokens = 16, .max_new_tokens = 1});
  service.Submit({.id = 1, .prompt_tokens = 100, .max_new_tokens = 30});
  EXPECT_EQ(service.scheduler().LeastBlocks(), 9);  // 130 of 16
  service.Drain(100);
  EXPECT_EQ(service.scheduler().LeastBlocks(), 0);
}

}  // namespace
}  // namespace varlane
