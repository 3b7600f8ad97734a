// Proves that a failure in any threadgroup at any point cancels the launch or
// the graph, surfaces once, and leaves the next launch right to the bit.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <vector>

#include "attention/plan.h"
#include "attention/run.h"
#include "kernels/kernel_table.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"
#include "varlane/graph.h"

namespace varlane {
namespace {

using Clock = std::chrono::steady_clock;
using testing::AttentionCase;
using testing::Engine;

enum class Fault { kThrow, kStop, kDeadline };
constexpr Fault kFaults[] = {Fault::kThrow, Fault::kStop, Fault::kDeadline};

// Decodes, chunks, a draft and a long context in one batch.
testing::CaseSpec MixedBatch() {
  testing::CaseSpec spec;
  spec.seqs = {{1, 30}, {40, 200}, {5, 5}, {1, 1300}, {3, 16}, {0, 7}};
  return spec;
}

// One plan of the mixed batch, its right output, and launches of it in which a
// threadgroup of choice fails.
class FaultyLaunch {
 public:
  FaultyLaunch(Runtime* runtime, PartitionMode mode, int kv_heads = 1)
      : runtime_(runtime),
        table_(*FindKernels("")),
        case_(MixedBatch()),
        out_(static_cast<size_t>(case_.spec().total_q() * 4 * 64)),
        lse_(static_cast<size_t>(case_.spec().total_q() * 4)) {
    view_ = case_.view();
    EXPECT_TRUE(testing::IsOk(
        MakePlan(case_.batch(), case_.shape(), view_,
                 {.partitions = mode, .kv_heads_per_threadgroup = kv_heads},
                 runtime->num_workers(), &plan_)));
    EXPECT_TRUE(testing::IsOk(Launch(-1, Fault::kThrow, false)));
    right_out_ = out_;
    right_lse_ = lse_;
  }

  int64_t num_threadgroups() const { return plan_.grid_size; }

  // Threadgroup `bad` fails before it does its work, or after; -1 = none.
  Status Launch(int64_t bad, Fault fault, bool after, bool fill_nan = false) {
    std::stop_source stop;
    LaunchOptions options;
    options.stop = stop.get_token();
    if (bad >= 0 && fault == Fault::kDeadline) {
      options.deadline = Clock::now() + std::chrono::microseconds(100);
    }
    PlanRun run;
    VARLANE_EXPECT_OK(run.Begin(table_, &plan_, view_, 0, Tensors()));
    options.scratch_bytes = run.scratch_bytes();
    const Status status = runtime_->Launch(
        run.grid(),
        [&](const Threadgroup& group) {
          if (after) run(group);
          if (group.index() == bad) Fail(fault, &stop, options.deadline);
          if (!after) run(group);
        },
        options);
    run.End(status.ok(), fill_nan, nullptr);
    return status;
  }

  // The same as a node of a graph, between two others.
  Status RunGraph(int64_t bad, Fault fault, bool after);

  // A run without faults, and its bits.
  ::testing::AssertionResult IsRight() {
    std::fill(out_.begin(), out_.end(), 7.0F);
    std::fill(lse_.begin(), lse_.end(), 7.0F);
    const Status status = Launch(-1, Fault::kThrow, false);
    if (!status.ok()) {
      return ::testing::AssertionFailure() << status.ToString();
    }
    return HasRightBits();
  }

  ::testing::AssertionResult HasRightBits() const {
    if (std::memcmp(out_.data(), right_out_.data(),
                    out_.size() * sizeof(float)) != 0 ||
        std::memcmp(lse_.data(), right_lse_.data(),
                    lse_.size() * sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "other bits than before";
    }
    return ::testing::AssertionSuccess();
  }

  const std::vector<float>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }

 private:
  class Node;

  AttentionTensors Tensors() {
    AttentionTensors tensors;
    tensors.q = case_.q();
    tensors.out = {out_.data(), DType::kF32};
    tensors.lse = lse_.data();
    return tensors;
  }

  static void Fail(Fault fault, std::stop_source* stop,
                   Clock::time_point deadline) {
    switch (fault) {
      case Fault::kThrow:
        throw std::runtime_error("injected");
      case Fault::kStop:
        stop->request_stop();
        break;
      case Fault::kDeadline:
        while (Clock::now() < deadline) {
        }
        break;
    }
  }

  Runtime* runtime_;
  const KernelTable& table_;
  AttentionCase case_;
  KvView view_;
  AttentionPlan::Impl plan_;
  std::vector<float> out_;
  std::vector<float> lse_;
  std::vector<float> right_out_;
  std::vector<float> right_lse_;
};

class FaultyLaunch::Node final : public GraphLaunch {
 public:
  Node(FaultyLaunch* launch, int64_t bad, Fault fault, bool after,
       std::stop_source* stop, Clock::time_point deadline)
      : launch_(launch),
        bad_(bad),
        fault_(fault),
        after_(after),
        stop_(stop),
        deadline_(deadline) {}

  Status Prepare(void*, GraphGrid* grid) override {
    const Status status = run_.Begin(launch_->table_, &launch_->plan_,
                                     launch_->view_, 0, launch_->Tensors());
    if (!status.ok()) return status;
    *grid = {.grid = run_.grid(), .scratch_bytes = run_.scratch_bytes()};
    return {};
  }
  void Run(const Threadgroup& group) override {
    if (after_) run_(group);
    if (group.index() == bad_) Fail(fault_, stop_, deadline_);
    if (!after_) run_(group);
  }
  void Done(bool complete) noexcept override {
    run_.End(complete, false, nullptr);
  }

 private:
  FaultyLaunch* launch_;
  int64_t bad_;
  Fault fault_;
  bool after_;
  std::stop_source* stop_;
  Clock::time_point deadline_;
  PlanRun run_;
};

Status FaultyLaunch::RunGraph(int64_t bad, Fault fault, bool after) {
  std::stop_source stop;
  LaunchOptions options;
  options.stop = stop.get_token();
  if (fault == Fault::kDeadline) {
    options.deadline = Clock::now() + std::chrono::microseconds(100);
  }
  LaunchGraph graph;
  std::vector<GraphNode> before;
  for (int i = 0; i < 3; ++i) {
    const Result<GraphNode> node = graph.AddLaunch(
        "layer",
        [&, i] {
          return std::make_unique<Node>(this, i == 1 ? bad : -1, fault, after,
                                        &stop, options.deadline);
        },
        before);
    EXPECT_TRUE(testing::IsOk(node));
    before = {*node};
  }
  EXPECT_TRUE(testing::IsOk(graph.Build()));
  return runtime_->Run(graph, nullptr, options);
}

// A stop or a deadline that nobody sees, since all work is done, is no failure.
void ExpectFailed(const Status& status, Fault fault,
                  const FaultyLaunch& launch) {
  if (fault != Fault::kThrow && status.ok()) {
    EXPECT_TRUE(launch.HasRightBits());
    return;
  }
  switch (fault) {
    case Fault::kThrow:
      EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
      EXPECT_NE(status.message().find("injected"), std::string_view::npos);
      break;
    case Fault::kStop:
      EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.ToString();
      break;
    case Fault::kDeadline:
      EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded)
          << status.ToString();
      break;
  }
}

void FailOneAfterTheOther(FaultyLaunch* launch) {
  for (int64_t bad = 0; bad < launch->num_threadgroups(); ++bad) {
    for (const Fault fault : kFaults) {
      ExpectFailed(launch->Launch(bad, fault, bad % 2 == 1), fault, *launch);
      ASSERT_TRUE(launch->IsRight()) << "after a fault in " << bad;
    }
  }
}

TEST(AttentionFailureTest, AFaultInEveryThreadgroupOfAMixedBatch) {
  for (const int threads : {1, 3}) {
    const Engine engine = testing::MakeEngine(threads);
    for (const PartitionMode mode : testing::kPartitionModes) {
      for (const int kv_heads : {1, 2}) {
        FaultyLaunch launch(engine.runtime.get(), mode, kv_heads);
        ASSERT_GT(launch.num_threadgroups(), 10 / kv_heads);
        FailOneAfterTheOther(&launch);
      }
    }
  }
}

void InjectAtRandom(int count) {
  const Engine engine = testing::MakeEngine(3);
  FaultyLaunch walk(engine.runtime.get(), PartitionMode::kWalk);
  FaultyLaunch spread(engine.runtime.get(), PartitionMode::kSpread);
  std::mt19937_64 random(20);
  for (int i = 0; i < count; ++i) {
    FaultyLaunch& launch = random() % 2 == 0 ? walk : spread;
    const auto bad = static_cast<int64_t>(
        random() % static_cast<uint64_t>(launch.num_threadgroups()));
    const Fault fault = kFaults[random() % 3];
    const bool after = random() % 2 == 0;
    const Status status = random() % 2 == 0
                              ? launch.Launch(bad, fault, after)
                              : launch.RunGraph(bad, fault, after);
    ExpectFailed(status, fault, launch);
    if (random() % 8 != 0) continue;  // failures in a row, too
    ASSERT_TRUE(launch.IsRight()) << "after injection " << i;
  }
  EXPECT_TRUE(walk.IsRight());
  EXPECT_TRUE(spread.IsRight());
}

TEST(AttentionFailureTest, RandomFaultsInLaunchesAndGraphs) {
  InjectAtRandom(500);
}

// Label `full`.
TEST(AttentionFailureTest, DISABLED_TenThousandRandomFaults) {
  InjectAtRandom(10000);
}

TEST(AttentionFailureTest, AFailedLaunchCanBeFilledWithNan) {
  const Engine engine = testing::MakeEngine(2);
  FaultyLaunch launch(engine.runtime.get(), PartitionMode::kSpread);
  EXPECT_EQ(launch.Launch(1, Fault::kThrow, true, true).code(),
            StatusCode::kAborted);
  for (const float value : launch.out()) ASSERT_TRUE(std::isnan(value));
  for (const float value : launch.lse()) ASSERT_TRUE(std::isnan(value));
  EXPECT_TRUE(launch.IsRight());
}

TEST(AttentionFailureTest, NanFillsOnlyTheRowsOfTheTensor) {
  const Engine engine = testing::MakeEngine(2);
  testing::CaseSpec spec;
  spec.seqs = {{2, 20}, {1, 5}};
  const AttentionCase c(spec);
  AttentionPlan plan;
  VARLANE_ASSERT_OK(
      engine.attention->Plan(c.batch(), c.shape(), c.view(), {}, &plan));
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // A stride of five heads for four: the fifth is somebody else's.
    const int64_t stride = 5 * 64;
    std::vector<std::byte> out(static_cast<size_t>(3 * stride) * SizeOf(dtype));
    for (int64_t i = 0; i < 3 * stride; ++i) {
      testing::StoreElement(out.data(), dtype, i, 7);
    }
    AttentionTensors tensors;
    tensors.q = c.q();
    tensors.out = {out.data(), dtype, stride, 64};
    std::stop_source stop;
    stop.request_stop();
    RunOptions options;
    options.stop = stop.get_token();
    options.fill_nan = true;
    EXPECT_EQ(
        engine.attention->Run(&plan, c.view(), 0, tensors, options).code(),
        StatusCode::kCancelled);
    for (int64_t i = 0; i < 3 * stride; ++i) {
      const double value = testing::LoadElement(out.data(), dtype, i);
      if (i % stride < 4 * 64) {
        ASSERT_TRUE(std::isnan(value)) << i;
      } else {
        ASSERT_EQ(value, 7) << i;
      }
    }
  }
}

TEST(AttentionFailureTest, APlanServesOneRunAtATime) {
  const AttentionCase c(MixedBatch());
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(MakePlan(c.batch(), c.shape(), c.view(), {}, 2, &plan));
  std::vector<float> out(static_cast<size_t>(c.spec().total_q() * 4 * 64));
  AttentionTensors tensors;
  tensors.q = c.q();
  tensors.out = {out.data(), DType::kF32};
  PlanRun first;
  PlanRun second;
  const KernelTable& table = *FindKernels("");
  VARLANE_ASSERT_OK(first.Begin(table, &plan, c.view(), 0, tensors));
  EXPECT_EQ(second.Begin(table, &plan, c.view(), 0, tensors).code(),
            StatusCode::kFailedPrecondition);
  first.End(false, false, nullptr);
  VARLANE_ASSERT_OK(second.Begin(table, &plan, c.view(), 0, tensors));
  second.End(false, false, nullptr);
}

}  // namespace
}  // namespace varlane
