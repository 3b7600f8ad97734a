// What the scheduler promises, one promise a test. The harness checks every
// step besides: arrays, budget, order, positions and the cache's contents.
// SPDX-License-Identifier: Apache-2.0

#include "varlane/scheduler.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using testing::IdsOf;
using testing::ServingHarness;

// The message names what is wrong.
void ExpectNames(const Status& status, StatusCode code, const char* what) {
  EXPECT_EQ(status.code(), code);
  EXPECT_NE(status.message().find(what), std::string_view::npos)
      << status.ToString();
}

// --- the batch ---------------------------------------------------------------

TEST(SchedulerTest, EmitsTheRaggedBatchOfAMixedStep) {
  ServingHarness service(16, {.token_budget = 64});
  service.Submit({.id = 1, .prompt_tokens = 20, .max_new_tokens = 3});
  ASSERT_TRUE(service.RunStep());
  service.Submit({.id = 2, .prompt_tokens = 5, .max_new_tokens = 1});
  const Step& step = service.Schedule();

  EXPECT_EQ(IdsOf(step), (std::vector<RequestId>{1, 2}));
  EXPECT_EQ(step.cu_seqlens_q, (std::vector<int32_t>{0, 1, 6}));
  EXPECT_EQ(step.seq_lens, (std::vector<int32_t>{21, 5}));
  EXPECT_EQ(step.block_table_stride, 2);
  EXPECT_EQ(step.total_q(), 6);
  EXPECT_FALSE(step.entries[0].is_prefill);
  EXPECT_TRUE(step.entries[1].is_prefill);
  EXPECT_TRUE(step.entries[0].samples);
  EXPECT_TRUE(step.entries[1].samples);
  std::vector<int32_t> table(2);
  VARLANE_ASSERT_OK(
      service.pool().CopyBlockTable(step.entries[0].sequence, table));
  EXPECT_EQ(step.block_tables[0], table[0]);
  EXPECT_EQ(step.block_tables[1], table[1]);
  EXPECT_EQ(step.block_tables[3], -1);
  EXPECT_EQ(step.slot_mapping[0], table[1] * 16 + 4);
  EXPECT_EQ(step.slot_mapping[1], step.block_tables[2] * 16);
  EXPECT_EQ(step.batch().num_seqs(), 2);
  service.Complete();
}

TEST(SchedulerTest, EmptyStepIsAValidBatchAndMayBeCompletedOrNot) {
  ServingHarness service(4, {});
  const Step& step = service.Schedule();
  EXPECT_TRUE(step.empty());
  EXPECT_EQ(step.cu_seqlens_q, std::vector<int32_t>{0});
  VARLANE_EXPECT_OK(service.scheduler().Complete(step, {}));
  EXPECT_TRUE(service.Schedule().empty());
  EXPECT_TRUE(service.Schedule().empty());
  EXPECT_EQ(service.scheduler().stats().steps, 0);
}

TEST(SchedulerTest, TokenBudgetIsFilledAndNeverExceeded) {
  ServingHarness service(64, {.token_budget = 7});
  for (RequestId id = 0; id < 9; ++id) {
    service.Submit({.id = id, .prompt_tokens = 11, .max_new_tokens = 5});
  }
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(service.Schedule().total_q(), 7);
    service.Complete();
  }
  service.Drain(200);
  service.ExpectAllGone();
  // Nothing was computed twice, and no last token was computed for nothing.
  const SchedulerStats stats = service.scheduler().stats();
  EXPECT_EQ(stats.prefill_tokens + stats.decode_tokens, 9 * (11 + 4));
  EXPECT_EQ(stats.finished, 9);
}

TEST(SchedulerTest, LongPromptIsChunkedWhileDecodesGoOn) {
  ServingHarness service(64, {.token_budget = 100, .max_chunk = 32});
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 50});
  ASSERT_TRUE(service.RunStep());
  service.Submit({.id = 2, .prompt_tokens = 200, .max_new_tokens = 1});
  for (int64_t begin = 0; begin < 200; begin += 32) {
    const Step& step = service.Schedule();
    ASSERT_EQ(IdsOf(step), (std::vector<RequestId>{1, 2}));
    EXPECT_TRUE(step.entries[0].samples);
    EXPECT_EQ(step.entries[1].begin, begin);
    EXPECT_EQ(step.entries[1].samples, begin + 32 >= 200);
    service.Complete();
  }
  EXPECT_EQ(service.history(2).chunks,
            (std::vector<int64_t>{32, 32, 32, 32, 32, 32, 8}));
  EXPECT_TRUE(service.history(2).ended);
  EXPECT_EQ(service.history(1).generated, 8);
}

TEST(SchedulerTest, NoMoreStartThanTheBudgetServesEveryStep) {
  ServingHarness service(64, {.token_budget = 3});
  for (RequestId id = 0; id < 9; ++id) {
    service.Submit({.id = id, .prompt_tokens = 1, .max_new_tokens = 6});
  }
  for (RequestId first = 0; first < 9; first += 3) {
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(IdsOf(service.Schedule()),
                (std::vector<RequestId>{first, first + 1, first + 2}));
      service.Complete();
    }
  }
  service.ExpectAllGone();
}

TEST(SchedulerTest, MaxSeqsBoundsThoseRunning) {
  ServingHarness service(64, {.max_seqs = 2});
  for (RequestId id = 0; id < 5; ++id) {
    service.Submit({.id = id, .prompt_tokens = 8, .max_new_tokens = 3});
  }
  EXPECT_EQ(IdsOf(service.Schedule()), (std::vector<RequestId>{0, 1}));
  EXPECT_EQ(service.scheduler().stats().running, 2);
  EXPECT_EQ(service.scheduler().stats().waiting, 3);
  service.Complete();
  service.Drain(20);
  service.ExpectAllGone();
}

// --- ends ----------------------------------------------------------------

TEST(SchedulerTest, EosFreesTheBlocksAtOnce) {
  ServingHarness service(8, {});
  service.Submit({.id = 1, .prompt_tokens = 40, .max_new_tokens = 50},
                 /*eos_after=*/3);
  service.Submit({.id = 2, .prompt_tokens = 40, .max_new_tokens = 50});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(service.Schedule().entries.size(), 2u);
    EXPECT_EQ(service.pool().free_blocks(), 2);
    service.Complete();
  }
  EXPECT_EQ(service.pool().free_blocks(), 5);
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{2});
  service.Complete();
  EXPECT_EQ(service.scheduler().stats().finished, 1);
}

TEST(SchedulerTest, LastTokenFreesTheBlocksAtOnce) {
  ServingHarness service(8, {});
  service.Submit({.id = 1, .prompt_tokens = 40, .max_new_tokens = 2});
  ASSERT_TRUE(service.RunStep());
  ASSERT_TRUE(service.RunStep());  // the harness compares `ended`
  EXPECT_EQ(service.pool().free_blocks(), 8);
  service.ExpectAllGone();
  // Its id is free again.
  service.Submit({.id = 1, .prompt_tokens = 4});
  service.Drain(5);
}

TEST(SchedulerTest, CancelWhileWaitingForgetsTheRequest) {
  ServingHarness service(8, {.max_seqs = 1});
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 3});
  service.Submit({.id = 2, .prompt_tokens = 4});
  ASSERT_TRUE(service.RunStep());
  service.Cancel(2);
  EXPECT_EQ(service.scheduler().Cancel(2).code(), StatusCode::kNotFound);
  EXPECT_EQ(service.scheduler().stats().waiting, 0);
  service.Drain(5);
  EXPECT_EQ(service.history(2).first_step, -1);
  service.ExpectAllGone();
}

TEST(SchedulerTest, CancelBetweenStepsFreesTheBlocksAtOnce) {
  ServingHarness service(8, {.max_chunk = 16});
  service.Submit({.id = 1, .prompt_tokens = 60, .max_new_tokens = 3});
  ASSERT_TRUE(service.RunStep());
  EXPECT_EQ(service.pool().free_blocks(), 7);
  service.Cancel(1);
  EXPECT_EQ(service.pool().free_blocks(), 8);
  EXPECT_FALSE(service.RunStep());
  service.ExpectAllGone();
}

TEST(SchedulerTest, CancelInsideAStepKeepsTheBlocksUntilItIsComplete) {
  ServingHarness service(8, {});
  service.Submit({.id = 1, .prompt_tokens = 60, .max_new_tokens = 3});
  service.Submit({.id = 2, .prompt_tokens = 20, .max_new_tokens = 3});
  ASSERT_EQ(service.Schedule().entries.size(), 2u);
  service.Cancel(1);
  EXPECT_EQ(service.scheduler().Cancel(1).code(), StatusCode::kNotFound);
  EXPECT_EQ(service.pool().free_blocks(), 2);
  service.Complete();
  EXPECT_EQ(service.pool().free_blocks(), 6);
  EXPECT_EQ(IdsOf(service.Schedule()), std::vector<RequestId>{2});
  service.Complete();
  service.Drain(5);
  service.ExpectAllGone();
  EXPECT_EQ(service.scheduler().stats().cancelled, 1);
  EXPECT_EQ(service.scheduler().stats().finished, 1);
}

TEST(SchedulerTest, EosOfARequestCancelledMeanwhileIsNoError) {
  ServingHarness service(8, {});
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 3});
  const Step& step = service.Schedule();
  service.Cancel(1);
  const std::vector<RequestId> finished = {1};
  std::vector<RequestId> ended;
  VARLANE_EXPECT_OK(service.scheduler().Complete(step, finished, &ended));
  EXPECT_TRUE(ended.empty());
  EXPECT_EQ(service.scheduler().stats().finished, 0);
  service.ExpectAllGone();
}

TEST(SchedulerTest, DestructorGivesEveryBlockBack) {
  ServingHarness service(8, {});
  {
    auto scheduler = Scheduler::Create({}, &service.pool());
    VARLANE_ASSERT_OK(scheduler);
    VARLANE_ASSERT_OK((*scheduler)->Submit({.id = 1, .prompt_tokens = 60}));
    Step step;
    VARLANE_ASSERT_OK((*scheduler)->Schedule(&step));
    EXPECT_EQ(service.pool().free_blocks(), 4);
  }
  EXPECT_EQ(service.pool().free_blocks(), 8);
  EXPECT_EQ(service.pool().stats().sequences, 0);
}

// --- errors --------------------------------------------------------------

TEST(SchedulerTest, BadOptionsAreRefusedByName) {
  ServingHarness service(2, {});
  const auto expect = [&](const SchedulerOptions& options, const char* what) {
    ExpectNames(Scheduler::Create(options, &service.pool()).status(),
                StatusCode::kInvalidArgument, what);
  };
  expect({.token_budget = 0}, "token_budget = 0");
  expect({.token_budget = int64_t{1} << 31}, "token_budget = 2147483648");
  expect({.max_seqs = 0}, "max_seqs = 0");
  expect({.max_chunk = -1}, "max_chunk = -1");
  expect({.watermark = 1}, "watermark = 1");
  expect({.watermark = std::numeric_limits<double>::quiet_NaN()},
         "watermark = nan");
  EXPECT_EQ(Scheduler::Create({}, nullptr).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(SchedulerTest, BadRequestsAreRefusedByName) {
  ServingHarness service(8, {});
  const auto expect = [&](const Request& request, const char* what) {
    ExpectNames(service.scheduler().Submit(request).status(),
                StatusCode::kInvalidArgument, what);
  };
  expect({.id = 7, .prompt_tokens = 0}, "request 7: prompt_tokens = 0");
  expect({.id = 7, .prompt_tokens = 1, .max_new_tokens = 0},
         "request 7: max_new_tokens = 0");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  expect({.prompt_tokens = kHuge}, "prompt_tokens");
  expect({.prompt_tokens = 2, .max_new_tokens = kHuge}, "max_new_tokens");
  EXPECT_TRUE(service.scheduler().idle());

  service.Submit({.id = 7, .prompt_tokens = 4});
  EXPECT_EQ(
      service.scheduler().Submit({.id = 7, .prompt_tokens = 4}).status().code(),
      StatusCode::kAlreadyExists);
  service.Drain(5);
}

TEST(SchedulerTest, ScheduleAndCompleteMustAlternate) {
  ServingHarness service(8, {});
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 9});
  Scheduler& scheduler = service.scheduler();
  EXPECT_EQ(scheduler.Complete(Step{}, {}).code(),
            StatusCode::kFailedPrecondition);
  const Step step = service.Schedule();
  Step other;
  EXPECT_EQ(scheduler.Schedule(&other).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(scheduler.Complete(other, {}).code(),
            StatusCode::kFailedPrecondition)
      << "an empty step passed for the outstanding one";
  service.Complete();
  EXPECT_EQ(scheduler.Complete(step, {}).code(),
            StatusCode::kFailedPrecondition);
}

TEST(SchedulerTest, RefusedCompletionChangesNothing) {
  ServingHarness service(8, {.max_chunk = 16});
  service.Submit({.id = 1, .prompt_tokens = 4, .max_new_tokens = 2});
  service.Submit({.id = 2, .prompt_tokens = 40, .max_new_tokens = 2});
  const Step& step = service.Schedule();
  const std::vector<RequestId> unknown = {1, 99};
  EXPECT_EQ(service.scheduler().Complete(step, unknown).code(),
            StatusCode::kNotFound);
  const std::vector<RequestId> half_read = {1, 2};  // 2 produced nothing yet
  EXPECT_EQ(service.scheduler().Complete(step, half_read).code(),
            StatusCode::kNotFound);
  service.Complete();
  service.Drain(10);
  EXPECT_EQ(service.history(1).generated, 2);
  service.ExpectAllGone();
}

TEST(SchedulerTest, BlocksHeldByOthersAreNamedAndTheServiceGoesOn) {
  ServingHarness service(4, {.watermark = 0});
  KvPool& pool = service.pool();
  const SeqId foreign = pool.CreateSequence();
  VARLANE_ASSERT_OK(pool.Append(foreign, 40));
  // Nothing runs: it cannot start.
  EXPECT_EQ(
      service.Submit({.id = 1, .prompt_tokens = 30, .max_new_tokens = 30}).kind,
      Admission::Kind::kWait);
  Step step;
  Status status = service.scheduler().Schedule(&step);
  ExpectNames(status, StatusCode::kResourceExhausted, "3 of 4 blocks are held");
  EXPECT_TRUE(step.empty());
  // It runs alone and cannot grow.
  VARLANE_ASSERT_OK(pool.Truncate(foreign, 20));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(service.RunStep());
  status = service.scheduler().Schedule(&step);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  VARLANE_EXPECT_OK(pool.CheckInvariants());
  VARLANE_ASSERT_OK(pool.Free(foreign));
  service.Drain(40);
  EXPECT_EQ(service.history(1).generated, 30);
  service.ExpectAllGone();
}

TEST(SchedulerTest, FailedStepTakesItsTokensBack) {
  ServingHarness service(8, {});
  service.Submit({.id = 1, .prompt_tokens = 16, .max_new_tokens = 9});
  service.Submit({.id = 2, .prompt_tokens = 16, .max_new_tokens = 9});
  ASSERT_TRUE(service.RunStep());
  // Somebody frees what is not theirs: 1 is planned before 2 fails.
  const SeqId kept = service.step().entries[0].sequence;
  VARLANE_ASSERT_OK(service.pool().Free(service.step().entries[1].sequence));
  Step step;
  EXPECT_EQ(service.scheduler().Schedule(&step).code(), StatusCode::kNotFound);
  EXPECT_TRUE(step.empty());
  EXPECT_EQ(*service.pool().Length(kept), 16);
  service.Cancel(2);
  service.Drain(20);
  EXPECT_EQ(service.history(1).generated, 9);
  service.ExpectAllGone();
}

}  // namespace
}  // namespace varlane
