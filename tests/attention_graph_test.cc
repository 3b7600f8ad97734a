// Proves that a step of a model runs as one graph, bit for bit as launch by
// launch, with other arguments each time, and after failures too.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/graph.h"

namespace varlane {
namespace {

using testing::Engine;
using testing::RandomValue;

constexpr int kLayers = 5;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadSize = 64;
constexpr int kBlockSize = 16;

// A model of layers that only attend: a layer's output is the next one's query,
// and its keys and values are made of its query. Runs steps over a cache.
class Model {
 public:
  explicit Model(const Engine& engine) : engine_(engine) {
    kv_.layout.dtype = DType::kBF16;
    kv_.layout.num_layers = kLayers;
    kv_.layout.num_kv_heads = kKvHeads;
    kv_.layout.head_size = kHeadSize;
    kv_.layout.v_head_size = kHeadSize;
    kv_.layout.block_size = kBlockSize;
    kv_.num_blocks = 64;
    const auto bytes = static_cast<size_t>(kv_.layout.block_bytes() * 64);
    cache_.resize(bytes / 64 + 1);
    kv_.base = reinterpret_cast<std::byte*>(cache_.data());
  }

  // Plans a step in which sequence i gets q_lens[i] more tokens.
  void Plan(const std::vector<int>& q_lens, PartitionMode mode) {
    cu_seqlens_q_ = {0};
    slots_.clear();
    seq_lens_.resize(q_lens.size());
    const int stride = kv_.num_blocks / static_cast<int>(q_lens.size());
    std::vector<int32_t> tables(q_lens.size() * static_cast<size_t>(stride));
    for (size_t i = 0; i < tables.size(); ++i) {
      tables[i] = static_cast<int32_t>((i * 37) % 64);
    }
    for (size_t i = 0; i < q_lens.size(); ++i) {
      for (int t = 0; t < q_lens[i]; ++t) {
        const int at = seq_lens_[i]++;
        slots_.push_back(int64_t{tables[i * static_cast<size_t>(stride) +
                                        static_cast<size_t>(at / kBlockSize)]} *
                             kBlockSize +
                         at % kBlockSize);
      }
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + q_lens[i]);
    }
    AttentionShape shape;
    shape.num_q_heads = kHeads;
    VARLANE_ASSERT_OK(
        engine_.attention->Plan({cu_seqlens_q_, seq_lens_, tables, stride},
                                shape, kv_, {.partitions = mode}, &plan));
    const auto size = static_cast<size_t>(plan.total_q() * kHeads * kHeadSize);
    states.assign(kLayers + 1, std::vector<float>(size, 7));
    for (size_t i = 0; i < size; ++i) {
      states[0][i] = static_cast<float>(RandomValue(3, slots_.size(), i, 0, 0));
    }
  }

  WriteKvNodeArgs WriteArgs(int layer) {
    const float* const x = states[static_cast<size_t>(layer)].data();
    const ConstTensor k = {x, DType::kF32, kHeads * kHeadSize, kHeadSize};
    const ConstTensor v = {x + kKvHeads * kHeadSize, DType::kF32,
                           kHeads * kHeadSize, kHeadSize};
    return {kv_, layer, k, v, slots_};
  }
  AttentionNodeArgs RunArgs(int layer) {
    AttentionNodeArgs args;
    args.plan = &plan;
    args.kv = kv_;
    args.layer = layer;
    const auto at = static_cast<size_t>(layer);
    args.tensors.q = {states[at].data(), DType::kF32};
    args.tensors.out = {states[at + 1].data(), DType::kF32};
    args.report = &reports[at];
    return args;
  }

  void StepByLaunches() {
    for (int layer = 0; layer < kLayers; ++layer) {
      const WriteKvNodeArgs write = WriteArgs(layer);
      VARLANE_ASSERT_OK(engine_.attention->WriteKv(kv_, layer, write.k, write.v,
                                                   write.slot_mapping));
      const AttentionNodeArgs run = RunArgs(layer);
      VARLANE_ASSERT_OK(
          engine_.attention->Run(&plan, kv_, layer, run.tensors, run.report));
    }
  }

  AttentionPlan plan;
  std::vector<std::vector<float>> states;  // [layers + 1]
  std::array<LaunchReport, kLayers> reports;
  bool throws = false;  // in a node of its own, after layer 2

 private:
  struct alignas(64) Line {
    std::array<std::byte, 64> bytes = {};
  };
  const Engine& engine_;
  KvView kv_;
  std::vector<Line> cache_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> seq_lens_;
  std::vector<int64_t> slots_;
};

LaunchGraph StepGraph(const Engine& engine) {
  LaunchGraph graph;
  std::vector<GraphNode> after;
  const auto add = [&](Result<GraphNode> node) {
    VARLANE_ASSERT_OK(node);
    after = {*node};
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    add(engine.attention->AddWriteKv(
        &graph, "write",
        [layer](void* args) {
          return static_cast<Model*>(args)->WriteArgs(layer);
        },
        after));
    add(engine.attention->AddRun(
        &graph, "attend",
        [layer](void* args) {
          return static_cast<Model*>(args)->RunArgs(layer);
        },
        after));
    if (layer != 2) continue;
    add(graph.AddLaunch(
        "check", 3,
        [](const Threadgroup& group, void* args) {
          if (static_cast<Model*>(args)->throws && group.index() == 1) {
            throw std::runtime_error("asked to");
          }
        },
        after));
  }
  EXPECT_TRUE(testing::IsOk(graph.Build()));
  return graph;
}

void ExpectSameStates(const Model& a, const Model& b, int from = 0) {
  for (size_t i = static_cast<size_t>(from); i < a.states.size(); ++i) {
    ASSERT_EQ(a.states[i].size(), b.states[i].size());
    EXPECT_EQ(std::memcmp(a.states[i].data(), b.states[i].data(),
                          a.states[i].size() * sizeof(float)),
              0)
        << "after layer " << i;
  }
}

const std::vector<std::vector<int>> kSteps = {
    {200, 3, 40}, {1, 1, 1}, {1, 60, 5}, {33, 1, 1}, {1, 1, 1}};

TEST(AttentionGraphTest, AStepAsAGraphIsTheStepLaunchByLaunchBitForBit) {
  for (const int threads : {1, 2, 4}) {
    const Engine engine = testing::MakeEngine(threads);
    const LaunchGraph graph = StepGraph(engine);
    for (const PartitionMode mode : testing::kPartitionModes) {
      Model by_launch(engine);
      Model by_graph(engine);
      for (const std::vector<int>& q_lens : kSteps) {
        by_launch.Plan(q_lens, mode);
        by_launch.StepByLaunches();
        by_graph.Plan(q_lens, mode);
        VARLANE_ASSERT_OK(engine.runtime->Run(graph, &by_graph));
        ExpectSameStates(by_launch, by_graph);
        for (size_t i = 0; i < kLayers; ++i) {
          EXPECT_EQ(by_graph.reports[i].threadgroups,
                    by_launch.reports[i].threadgroups);
          for (const LaunchReport& report :
               {by_graph.reports[i], by_launch.reports[i]}) {
            EXPECT_GT(report.mean_worker_seconds, 0);
            EXPECT_GE(report.imbalance(), 1);
            EXPECT_LE(report.longest_worker_seconds, report.seconds);
          }
          EXPECT_EQ(by_graph.reports[i].kv_bytes,
                    by_launch.reports[i].kv_bytes);
          EXPECT_EQ(by_graph.reports[i].spread_partitions,
                    by_launch.reports[i].spread_partitions);
        }
      }
    }
  }
}

TEST(AttentionGraphTest, AFailedStepIsRightWhenItRunsAgain) {
  const Engine engine = testing::MakeEngine(3);
  const LaunchGraph graph = StepGraph(engine);
  Model expected(engine);
  Model model(engine);
  for (const std::vector<int>& q_lens : kSteps) {
    expected.Plan(q_lens, PartitionMode::kSpread);
    expected.StepByLaunches();
    model.Plan(q_lens, PartitionMode::kSpread);
    model.throws = true;
    const Status status = engine.runtime->Run(graph, &model);
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_EQ(status.message(),
              "node \"check\": the body of threadgroup 1 threw: asked to");
    EXPECT_EQ(model.states[4][0], 7) << "layers after it did not run";
    model.throws = false;
    VARLANE_ASSERT_OK(engine.runtime->Run(graph, &model));
    ExpectSameStates(expected, model);
  }
}

TEST(AttentionGraphTest, OnePlanInTwoNodesAtOnceIsRefused) {
  const Engine engine = testing::MakeEngine(2);
  Model model(engine);
  model.Plan({400, 1}, PartitionMode::kWalk);
  // Whether two independent nodes meet is chance; that no run is wrong is not.
  LaunchGraph graph;
  std::vector<float> out(model.states[0].size());
  for (int i = 0; i < 2; ++i) {
    VARLANE_ASSERT_OK(engine.attention->AddRun(&graph, "twice", [&, i](void*) {
      AttentionNodeArgs args = model.RunArgs(0);
      args.report = nullptr;
      if (i == 1) args.tensors.out.data = out.data();
      return args;
    }));
  }
  VARLANE_ASSERT_OK(graph.Build());
  for (int repeat = 0; repeat < 200; ++repeat) {
    const Status status = engine.runtime->Run(graph);
    if (status.ok()) {
      ASSERT_EQ(out, model.states[1]);
      continue;
    }
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("one plan serves one Run at a time"),
              std::string_view::npos);
  }
}

TEST(AttentionGraphTest, BadArgumentsOfARunNameTheNode) {
  const Engine engine = testing::MakeEngine(2);
  LaunchGraph graph;
  AttentionNodeArgs args;
  const auto bind = [](void* from) {
    return *static_cast<AttentionNodeArgs*>(from);
  };
  VARLANE_ASSERT_OK(engine.attention->AddRun(&graph, "layer 0", bind));
  VARLANE_ASSERT_OK(graph.Build());
  EXPECT_EQ(engine.runtime->Run(graph, &args).message(),
            "node \"layer 0\": plan is null");
  AttentionPlan empty;
  args.plan = &empty;
  const Status status = engine.runtime->Run(graph, &args);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  Model model(engine);
  model.Plan({3, 1}, PartitionMode::kWalk);
  args = model.RunArgs(0);
  args.layer = 9;
  EXPECT_EQ(engine.runtime->Run(graph, &args).message(),
            "node \"layer 0\": layer = 9, but the layout has 5 layers");
  args.layer = 0;
  VARLANE_EXPECT_OK(engine.runtime->Run(graph, &args));
  EXPECT_EQ(engine.attention->AddRun(nullptr, "x", bind).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(engine.attention->AddRun(&graph, "x", nullptr).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace varlane
