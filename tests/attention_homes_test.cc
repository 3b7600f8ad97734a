// Homes: sequences' threadgroups go to the node of their blocks, whichever the
// owner pattern, and results do not know of it.
//
// SPDX-License-Identifier: Apache-2.0

#include "attention/homes.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/owner.h"
#include "tests/testing/allocation_faults.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

// Prefill chunks and decode steps on three nodes of 100 blocks; sequence i's
// blocks are of node homes[i].
struct Inputs {
  std::vector<int32_t> homes = {2, 0, 1, 0, 2, 0};
  std::vector<int32_t> cu_seqlens_q = {0, 1, 150, 151, 151, 191, 192};
  std::vector<int32_t> seq_lens = {700, 149, 1300, 16, 40, 5};
  std::vector<int32_t> block_tables;
  int64_t stride = 90;
  std::array<std::atomic<int64_t>, 3> node_blocks = {100, 100, 100};
  AttentionShape shape = {.num_q_heads = 8};
  KvLayout layout = {.dtype = DType::kBF16, .num_layers = 1, .num_kv_heads = 2};

  Inputs() {
    for (const int32_t home : homes) {
      for (int32_t b = 0; b < stride; ++b)
        block_tables.push_back(home * 100 + b);
    }
  }
  int32_t& Entry(int seq, int entry) {
    return block_tables[static_cast<size_t>(seq * stride + entry)];
  }
  KvView View() const {
    return {.num_blocks = 300,
            .layout = layout,
            .node_blocks = node_blocks.data(),
            .node_stride = 100};
  }
  Status Plan(AttentionPlan::Impl* plan, const PlanOptions& options,
              int num_nodes) const {
    return MakePlan({cu_seqlens_q, seq_lens, block_tables, stride}, shape,
                    View(), options, 4, plan, num_nodes);
  }
};

// What a threadgroup does, in terms of the batch.
using Task = std::tuple<int64_t, int64_t, int, int64_t, int64_t>;

std::multiset<Task> TasksOf(const AttentionPlan::Impl& plan) {
  std::multiset<Task> tasks;
  WorkerCounters count;
  for (int64_t index = 0; index < plan.grid_size; ++index) {
    const std::optional<Assignment> work = Assign(plan, index, count);
    if (!work) continue;
    tasks.insert({plan.BatchIndex(work->item.seq), work->item.first_token,
                  work->head, work->partition_begin, work->partition_end});
  }
  return tasks;
}

TEST(HomesTest, EveryPatternsGridIsCutByTheHomesOfItsSequences) {
  const Inputs in;
  for (const OwnerPattern owner : kOwnerPatterns) {
    for (const PartitionMode partitions : kPartitionModes) {
      SCOPED_TRACE(std::string(OwnerPatternName(owner)) + " " +
                   PartitionModeName(partitions));
      AttentionPlan::Impl plain;
      AttentionPlan::Impl plan;
      VARLANE_ASSERT_OK(in.Plan(&plain, {owner, partitions}, 1));
      VARLANE_ASSERT_OK(in.Plan(&plan, {owner, partitions}, 3));
      EXPECT_TRUE(plain.node_begin.empty());
      EXPECT_TRUE(plain.homes.empty());
      ASSERT_EQ(plan.node_begin.size(), 4u);
      EXPECT_EQ(plan.node_begin.front(), 0);
      EXPECT_EQ(plan.node_begin.back(), plan.grid_size);
      EXPECT_EQ(plan.grid_size, plain.grid_size);
      EXPECT_EQ(plan.partial_base.empty() ? 0 : plan.partial_base.back(),
                plain.partial_base.empty() ? 0 : plain.partial_base.back());
      EXPECT_EQ(TasksOf(plan), TasksOf(plain));
      WorkerCounters count;
      for (int32_t node = 0; node < 3; ++node) {
        const auto at = static_cast<size_t>(node);
        int64_t tasks = 0;
        for (int64_t i = plan.node_begin[at]; i < plan.node_begin[at + 1];
             ++i) {
          const std::optional<Assignment> work = Assign(plan, i, count);
          if (!work) continue;
          ++tasks;
          const int64_t own = work->item.seq;
          const auto seq = static_cast<size_t>(plan.BatchIndex(own));
          EXPECT_EQ(in.homes[seq], node) << "threadgroup " << i;
          EXPECT_EQ(plan.FirstToken(own), in.cu_seqlens_q[seq]);
        }
        EXPECT_GT(tasks, 0) << "node " << node;
      }
    }
  }
}

TEST(HomesTest, WithinANodeTheHeaviestDescriptorGoesFirst) {
  const Inputs in;
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(in.Plan(&plan, {.owner = OwnerPattern::kPlanned}, 3));
  for (size_t i = 1; i < plan.descriptors.size(); ++i) {
    const auto& before = plan.descriptors[i - 1];
    const auto& here = plan.descriptors[i];
    const auto home = [&](const auto& work) {
      return plan.homes[static_cast<size_t>(work.seq)];
    };
    EXPECT_LE(home(before), home(here));
    EXPECT_TRUE(home(before) < home(here) || before.cost >= here.cost);
  }
}

TEST(HomesTest, TheHomeHoldsMostOfTheBlocksThatAreRead) {
  Inputs in;
  // Sequence 0 reads blocks [0, 44); 21 of node 1 leave it at home, 22 each are
  // a tie for the lower number, 23 make node 1 its home.
  const auto home_with = [&](int moved) {
    for (int b = 0; b < 44; ++b) in.Entry(0, b) = (b < moved ? 100 : 200) + b;
    AttentionPlan::Impl plan;
    EXPECT_TRUE(IsOk(in.Plan(&plan, {.follow_homes = false}, 3)));
    return plan.homes[0];
  };
  EXPECT_EQ(home_with(21), 2);
  EXPECT_EQ(home_with(22), 1);
  EXPECT_EQ(home_with(23), 1);
  // Behind a window only what it shows counts.
  in.shape.mask.window_left = 15;
  EXPECT_EQ(home_with(23), 2);
}

TEST(HomesTest, WithoutHomesTheBatchKeepsItsOrder) {
  Inputs in;
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(in.Plan(&plan, {.follow_homes = false}, 3));
  EXPECT_TRUE(plan.node_begin.empty());
  EXPECT_TRUE(plan.batch_index.empty());
  EXPECT_EQ(plan.homes, in.homes) << "known still, for the report";
  // The pool has more nodes than the runtime: theirs are not the same.
  VARLANE_ASSERT_OK(in.Plan(&plan, {}, 2));
  EXPECT_TRUE(plan.homes.empty());
  EXPECT_TRUE(plan.node_begin.empty());
  // A plan is made anew each step.
  VARLANE_ASSERT_OK(in.Plan(&plan, {}, 3));
  EXPECT_FALSE(plan.node_begin.empty());
  VARLANE_ASSERT_OK(in.Plan(&plan, {}, 1));
  EXPECT_TRUE(plan.homes.empty() && plan.node_begin.empty() &&
              plan.batch_index.empty() && plan.first_token.empty());
}

TEST(HomesTest, BytesAreCountedBlockByBlock) {
  Inputs in;
  in.Entry(0, 2) = 7;  // node 0
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(in.Plan(&plan, {.follow_homes = false}, 3));
  const int64_t token = 2 * (in.layout.head_size + in.layout.v_head_size);
  WorkerCounters count;
  CountLocality(plan, 2, 0, 20, 60, &count);  // blocks 1, 2 and 12 of the third
  EXPECT_EQ(count.home, 1);
  EXPECT_EQ(count.stolen, 0);
  EXPECT_EQ(count.local_bytes, (12 + 12) * token);
  EXPECT_EQ(count.remote_bytes, 16 * token);
  CountLocality(plan, 0, 0, 20, 60, &count);
  EXPECT_EQ(count.stolen, 1);
  EXPECT_EQ(count.local_bytes, (12 + 12 + 16) * token);
  CountLocality(plan, 2, 0, 30, 30, &count);  // a row that sees nothing
  EXPECT_EQ(count.remote_bytes, (16 + 24) * token);
}

TEST(HomesTest, AWarmPlanAllocatesNothingAndAColdOneMayFail) {
  const Inputs in;
  for (const OwnerPattern owner : kOwnerPatterns) {
    SCOPED_TRACE(OwnerPatternName(owner));
    AttentionPlan::Impl plan;
    // Each allocation of a first plan fails once; then the plan can be made.
    int64_t failures = 0;
    while (true) {
      AttentionPlan::Impl cold;
      AllocationFaults::FailAfter(failures);
      const Status status = in.Plan(&cold, {owner}, 3);
      AllocationFaults::Disarm();
      if (AllocationFaults::failed() == 0) break;
      ASSERT_EQ(status.code(), StatusCode::kResourceExhausted);
      EXPECT_FALSE(cold.ready);
      ++failures;
    }
    EXPECT_GT(failures, 5);
    VARLANE_ASSERT_OK(in.Plan(&plan, {owner}, 3));
    AllocationFaults::FailAfter(-1);
    const Status status = in.Plan(&plan, {owner}, 3);
    AllocationFaults::Disarm();
    VARLANE_EXPECT_OK(status);
    EXPECT_EQ(AllocationFaults::allocations(), 0);
  }
}

// --- runs --------------------------------------------------------------------

CaseSpec MixedSpec() {
  CaseSpec spec;
  spec.seqs = {{1, 700},  {37, 37}, {1, 1100}, {0, 9},
               {70, 300}, {1, 0},   {3, 40}};
  spec.sinks = {0.5f, -1, 2, 0};
  return spec;
}

TEST(HomesTest, BitsDoNotKnowOfNodes) {
  const AttentionCase plain(MixedSpec());
  const Output expected = plain.Run(*MakeEngine(1).attention);
  for (const int num_nodes : {2, 4, 6}) {
    // Six are two nodes with an arena for each of three L3s.
    const Engine engine =
        num_nodes == 6 ? MakeL3Arenas(3) : MakeNodes(num_nodes);
    ASSERT_NE(engine.attention, nullptr);
    ASSERT_EQ(engine.runtime->num_nodes(), num_nodes);
    AttentionCase spread(MixedSpec());
    spread.SpreadOverNodes(num_nodes);
    ExpectSameBitsOnNodes(expected, spread, *engine.attention,
                          std::to_string(num_nodes) + " nodes");
  }
}

TEST(HomesTest, OneNodeIsAllAtHome) {
  const AttentionCase c(MixedSpec());
  const LaunchReport report = c.Run(*MakeEngine(2).attention).report;
  EXPECT_EQ(report.home_threadgroups,
            report.threadgroups - report.surplus_threadgroups);
  EXPECT_EQ(report.local_bytes, report.kv_bytes);
  EXPECT_EQ(report.stolen_threadgroups, 0);
  EXPECT_EQ(report.remote_bytes, 0);
}

// The runtime has nodes, but nobody knows whose the blocks are.
TEST(HomesTest, WhatIsUnknownIsNotReported) {
  const AttentionCase c(MixedSpec());
  const Engine engine = MakeNodes(2);
  ASSERT_NE(engine.attention, nullptr);
  const LaunchReport report = c.Run(*engine.attention).report;
  EXPECT_EQ(report.home_threadgroups + report.stolen_threadgroups, 0);
  EXPECT_EQ(report.local_bytes + report.remote_bytes, 0);
}

}  // namespace
}  // namespace varlane::testing
