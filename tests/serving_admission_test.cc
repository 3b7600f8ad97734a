// Who may start, and what Submit answers.
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

using Kind = Admission::Kind;

constexpr SchedulerOptions kNoWatermark = {.watermark = 0};

TEST(AdmissionTest, RequestLargerThanThePoolNeverFitsAndIsNotQueued) {
  ServingHarness service(10, {});
  const Admission never =
      service.Submit({.id = 1, .prompt_tokens = 150, .max_new_tokens = 11});
  EXPECT_EQ(never.kind, Kind::kNeverFits);
  EXPECT_EQ(never.needed_blocks, 11);
  EXPECT_EQ(never.capacity_blocks, 10);
  EXPECT_TRUE(service.scheduler().idle());
  EXPECT_EQ(service.scheduler().Cancel(1).code(), StatusCode::kNotFound);

  const Admission fits =
      service.Submit({.id = 1, .prompt_tokens = 150, .max_new_tokens = 10});
  EXPECT_EQ(fits.kind, Kind::kAdmitted);
  service.Drain(20);
  service.ExpectAllGone();
}

TEST(AdmissionTest, SubmitSaysWaitWhileThePoolIsTooFullToStart) {
  ServingHarness service(10, kNoWatermark);
  EXPECT_TRUE(service.Submit({.id = 1, .prompt_tokens = 96}).admitted());
  // Not started yet, but what goes before counts: 6 + 5 > 10.
  const Admission wait = service.Submit({.id = 2, .prompt_tokens = 80});
  EXPECT_EQ(wait.kind, Kind::kWait);
  EXPECT_EQ(wait.needed_blocks, 11);
  EXPECT_EQ(wait.free_blocks, 10);
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{1});
  EXPECT_EQ(service.pool().stats().sequences, 1) << "a waiting one holds some";
  service.Complete();
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{2});
  service.Complete();
  service.ExpectAllGone();
}

TEST(AdmissionTest, SmallRequestDoesNotOvertakeOneThatWaitsForBlocks) {
  ServingHarness service(10, kNoWatermark);
  service.Submit({.id = 1, .prompt_tokens = 96, .max_new_tokens = 4});
  ASSERT_TRUE(service.RunStep());
  service.Submit({.id = 2, .prompt_tokens = 80});
  service.Submit({.id = 3, .prompt_tokens = 1});
  service.Drain(20);
  EXPECT_GT(service.history(2).first_step, service.history(1).last_step);
  EXPECT_GE(service.history(3).first_step, service.history(2).first_step);
}

TEST(AdmissionTest, StartingRequestLeavesTheWatermarkFree) {
  ServingHarness service(10, {.watermark = 0.3});
  service.Submit({.id = 1, .prompt_tokens = 80, .max_new_tokens = 3});
  ASSERT_TRUE(service.RunStep());
  // 5 blocks are free and 3 must stay so.
  const Admission wait = service.Submit({.id = 2, .prompt_tokens = 33});
  EXPECT_EQ(wait.kind, Kind::kWait);
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{1});
  service.Complete();
  service.Cancel(2);
  service.Submit({.id = 3, .prompt_tokens = 16});
  EXPECT_EQ(IdsOf(service.Schedule()), (std::vector<RequestId>{1, 3}));
  service.Complete();
  service.ExpectAllGone();
}

TEST(AdmissionTest, WatermarkBindsNeitherALoneStarterNorGrowth) {
  ServingHarness service(10, {.watermark = 0.9});
  EXPECT_TRUE(
      service.Submit({.id = 1, .prompt_tokens = 100, .max_new_tokens = 60})
          .admitted());
  EXPECT_EQ(service.Drain(100), 60);
  EXPECT_EQ(service.history(1).restarts, 0);
  service.ExpectAllGone();
}

TEST(AdmissionTest, StarterLeavesTheBlocksAHalfReadPromptStillNeeds) {
  ServingHarness service(10, {.max_chunk = 16, .watermark = 0});
  service.Submit({.id = 1, .prompt_tokens = 112});
  service.Submit({.id = 2, .prompt_tokens = 64});  // 4 of 9 free, 6 promised
  for (int i = 0; i < 2; ++i) {                    // starting with it, or later
    EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{1});
    service.Complete();
  }
  service.Drain(50);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
  service.ExpectAllGone();
}

TEST(AdmissionTest, HigherPriorityStartsFirstThenArrival) {
  ServingHarness service(16, {.max_seqs = 1});
  service.Submit({.id = 1, .prompt_tokens = 4, .priority = 0});
  service.Submit({.id = 2, .prompt_tokens = 4, .priority = 2});
  service.Submit({.id = 3, .prompt_tokens = 4, .priority = -1});
  service.Submit({.id = 4, .prompt_tokens = 4, .priority = 2});
  service.Submit({.id = 5, .prompt_tokens = 4, .priority = 0});
  for (const RequestId id : {2, 4, 1, 5, 3}) {
    EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{id});
    service.Complete();
  }
  service.ExpectAllGone();
}

}  // namespace
}  // namespace varlane
