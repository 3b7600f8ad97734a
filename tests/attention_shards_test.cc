// Sharded KV heads: threadgroups go to the node of their head, whichever the
// owner pattern, and results do not know of it.
//
// SPDX-License-Identifier: Apache-2.0

#include "attention/shards.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "attention/kernels_of.h"
#include "attention/owner.h"
#include "attention/run.h"
#include "attention/write_kv.h"
#include "tests/testing/allocation_faults.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/kv_ops.h"
#include "varlane/limits.h"

namespace varlane::testing {
namespace {

std::string Name(OwnerPattern owner, PartitionMode partitions) {
  return std::string(OwnerPatternName(owner)) + " " +
         PartitionModeName(partitions);
}

CaseSpec MixedSpec(DType dtype = DType::kBF16) {
  CaseSpec spec;
  spec.seqs = {{1, 700},  {37, 37}, {1, 2100}, {0, 9},
               {70, 300}, {1, 0},   {3, 40}};
  spec.q_heads = 8;
  spec.kv_heads = 4;
  spec.kv_dtype = dtype;
  spec.sinks = {0.5f, -1, 2, 0, 1, -2, 0.25f, 3};
  return spec;
}

// --- plans -------------------------------------------------------------------

// A case, and plans of it.
struct Plans {
  AttentionCase c = AttentionCase(MixedSpec());

  Status Plan(const PlanOptions& options, int num_nodes,
              AttentionPlan::Impl* plan) const {
    return MakePlan(c.batch(), c.shape(), c.view(), options, 4, plan,
                    num_nodes);
  }
};

// What a threadgroup does.
using Task = std::tuple<int64_t, int64_t, int, int64_t, int64_t>;

Task TaskOf(const Assignment& work) {
  return {work.item.seq, work.item.first_token, work.head, work.partition_begin,
          work.partition_end};
}

// In the order of their numbers; surplus ones too, as {-1, ...}.
std::vector<Task> TasksOf(const AttentionPlan::Impl& plan) {
  std::vector<Task> tasks;
  WorkerCounters count;
  for (int64_t index = 0; index < plan.grid_size; ++index) {
    const std::optional<Assignment> work = Assign(plan, index, count);
    tasks.push_back(work ? TaskOf(*work) : Task{-1, 0, 0, 0, 0});
  }
  return tasks;
}

TEST(ShardsTest, EveryPatternsGridIsCutByTheShardsOfItsHeads) {
  for (const int shards : {2, 4}) {
    Plans plain;
    Plans sharded;
    sharded.c.ShardHeads(shards);
    for (const OwnerPattern owner : kOwnerPatterns) {
      for (const PartitionMode partitions : kPartitionModes) {
        SCOPED_TRACE(std::to_string(shards) + " " + Name(owner, partitions));
        AttentionPlan::Impl of_plain;
        AttentionPlan::Impl plan;
        VARLANE_ASSERT_OK(plain.Plan({owner, partitions}, 1, &of_plain));
        VARLANE_ASSERT_OK(sharded.Plan({owner, partitions}, shards, &plan));
        EXPECT_TRUE(of_plain.node_begin.empty());
        ASSERT_EQ(std::ssize(plan.node_begin), shards + 1);
        EXPECT_EQ(plan.grid_size, of_plain.grid_size);
        EXPECT_EQ(plan.node_begin.front(), 0);
        EXPECT_EQ(plan.node_begin.back(), plan.grid_size);
        EXPECT_EQ(plan.spread_blocks > 0, partitions == PartitionMode::kSpread);
        const std::vector<Task> tasks = TasksOf(plan);
        const std::vector<Task> wanted = TasksOf(of_plain);
        EXPECT_EQ(std::multiset<Task>(tasks.begin(), tasks.end()),
                  std::multiset<Task>(wanted.begin(), wanted.end()));
        for (int node = 0; node < shards; ++node) {
          // A node's range is the plain grid with its heads alone.
          std::vector<Task> of_node;
          for (const Task& task : wanted) {
            const bool is_surplus = std::get<0>(task) < 0;
            if (!is_surplus && std::get<2>(task) * shards / 4 == node) {
              of_node.push_back(task);
            }
          }
          std::vector<Task> found;
          for (int64_t i = plan.node_begin[size_t(node)];
               i < plan.node_begin[size_t(node) + 1]; ++i) {
            const Task& task = tasks[size_t(i)];
            if (std::get<0>(task) >= 0) found.push_back(task);
          }
          EXPECT_FALSE(found.empty());
          EXPECT_EQ(found, of_node) << "node " << node;
        }
      }
    }
  }
}

TEST(ShardsTest, TheGridIsOneWhereHomesAreNotFollowedOrNotTheRuntimes) {
  Plans plain;
  Plans sharded;
  sharded.c.ShardHeads(2);
  for (const OwnerPattern owner : kOwnerPatterns) {
    SCOPED_TRACE(OwnerPatternName(owner));
    AttentionPlan::Impl of_plain;
    AttentionPlan::Impl plan;
    VARLANE_ASSERT_OK(plain.Plan({.owner = owner}, 1, &of_plain));
    VARLANE_ASSERT_OK(
        sharded.Plan({.owner = owner, .follow_homes = false}, 2, &plan));
    EXPECT_TRUE(plan.node_begin.empty());
    EXPECT_EQ(TasksOf(plan), TasksOf(of_plain));
    EXPECT_TRUE(plan.counts_locality()) << "known still, for the report";
    for (const int num_nodes : {1, 3, 4}) {
      VARLANE_ASSERT_OK(sharded.Plan({.owner = owner}, num_nodes, &plan));
      EXPECT_TRUE(plan.node_begin.empty());
      EXPECT_EQ(TasksOf(plan), TasksOf(of_plain));
      EXPECT_FALSE(plan.counts_locality());
    }
    // A plan is made anew each step.
    VARLANE_ASSERT_OK(sharded.Plan({.owner = owner}, 2, &plan));
    EXPECT_EQ(plan.node_begin.size(), 3u);
    VARLANE_ASSERT_OK(plain.Plan({.owner = owner}, 2, &plan));
    EXPECT_TRUE(plan.node_begin.empty());
    EXPECT_FALSE(plan.counts_locality());
    EXPECT_EQ(TasksOf(plan), TasksOf(of_plain));
  }
}

TEST(ShardsTest, AnEmptyStepHasAnEmptyGrid) {
  const Engine engine = MakeNodes(2);
  for (const std::vector<SeqSpec>& seqs :
       {std::vector<SeqSpec>{}, std::vector<SeqSpec>{{0, 9}, {0, 0}}}) {
    CaseSpec spec = MixedSpec();
    spec.seqs = seqs;
    AttentionCase c(spec);
    c.ShardHeads(2);
    for (const OwnerPattern owner : kOwnerPatterns) {
      EXPECT_TRUE(c.Run(*engine.attention, {.owner = owner}).out.empty());
    }
  }
}

TEST(ShardsTest, BytesAreCountedByShard) {
  Plans sharded;
  sharded.c.ShardHeads(2);
  AttentionPlan::Impl plan;
  VARLANE_ASSERT_OK(sharded.Plan({}, 2, &plan));
  const int64_t token = 2 * (64 + 64);
  WorkerCounters count;
  CountShardLocality(plan, 0, 1, 20, 60, &count);
  CountShardLocality(plan, 1, 2, 0, 7, &count);
  EXPECT_EQ(count.home, 2);
  EXPECT_EQ(count.local_bytes, 47 * token);
  EXPECT_EQ(count.stolen + count.remote_bytes, 0);
  CountShardLocality(plan, 1, 1, 20, 60, &count);
  CountShardLocality(plan, 0, 3, 30, 30, &count);  // a row that sees nothing
  EXPECT_EQ(count.home, 2);
  EXPECT_EQ(count.stolen, 2);
  EXPECT_EQ(count.local_bytes, 47 * token);
  EXPECT_EQ(count.remote_bytes, 40 * token);
}

TEST(ShardsTest, AWarmPlanAllocatesNothing) {
  Plans sharded;
  sharded.c.ShardHeads(4);
  for (const OwnerPattern owner : kOwnerPatterns) {
    AttentionPlan::Impl plan;
    VARLANE_ASSERT_OK(sharded.Plan({.owner = owner}, 4, &plan));
    const Batch batch = sharded.c.batch();
    const AttentionShape shape = sharded.c.shape();
    const KvView view = sharded.c.view();
    AllocationFaults::FailAfter(-1);
    const Status status = MakePlan(batch, shape, view, {owner}, 4, &plan, 4);
    AllocationFaults::Disarm();
    VARLANE_EXPECT_OK(status);
    EXPECT_EQ(AllocationFaults::allocations(), 0);
  }
}

// --- runs --------------------------------------------------------------------

class ShardsRunTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, ShardsRunTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

TEST_P(ShardsRunTest, BitsDoNotKnowOfShards) {
  const AttentionCase plain(MixedSpec(GetParam()));
  const Output expected = plain.Run(*MakeEngine(1).attention);
  plain.ExpectMatchesReference(expected);
  for (const int num_nodes : {1, 2, 4}) {
    const Engine engine = MakeNodes(num_nodes, num_nodes == 2 ? 2 : 1);
    ASSERT_NE(engine.attention, nullptr);
    AttentionCase sharded(MixedSpec(GetParam()));
    sharded.ShardHeads(num_nodes);
    ExpectSameBitsOnNodes(expected, sharded, *engine.attention,
                          std::to_string(num_nodes) + " nodes");
  }
}

// Shards of a pool that was made for another number of nodes.
TEST_P(ShardsRunTest, AnyRuntimeReadsAnyShards) {
  const AttentionCase plain(MixedSpec(GetParam()));
  const Engine one = MakeEngine(2);
  const Engine two = MakeNodes(2);
  const Output expected = plain.Run(*one.attention);
  AttentionCase sharded(MixedSpec(GetParam()));
  sharded.ShardHeads(4);
  const Output on_one = sharded.Run(*one.attention);
  ExpectSameBits(expected, on_one, "one node");
  EXPECT_EQ(on_one.report.local_bytes, on_one.report.kv_bytes);
  const Output on_two = sharded.Run(*two.attention);
  ExpectSameBits(expected, on_two, "two nodes");
  EXPECT_EQ(on_two.report.local_bytes + on_two.report.remote_bytes, 0)
      << "nobody knows";
}

// Node by node, each range by a worker of its own, one after another.
TEST_P(ShardsRunTest, AllIsLocalWhereEachNodeRunsItsOwn) {
  const AttentionCase plain(MixedSpec(GetParam()));
  const Engine one = MakeEngine(1);
  const Output expected = plain.Run(*one.attention);
  const Result<const KernelTable*> table = KernelsOf(*one.runtime);
  VARLANE_ASSERT_OK(table);
  AttentionCase sharded(MixedSpec(GetParam()));
  sharded.ShardHeads(2);
  for (const OwnerPattern owner : kOwnerPatterns) {
    for (const PartitionMode partitions : kPartitionModes) {
      for (const bool is_swapped : {false, true}) {
        SCOPED_TRACE(Name(owner, partitions));
        AttentionPlan::Impl plan;
        VARLANE_ASSERT_OK(MakePlan(sharded.batch(), sharded.shape(),
                                   sharded.view(), {owner, partitions}, 2,
                                   &plan, 2));
        Output output = {std::vector<float>(expected.out.size()),
                         std::vector<float>(expected.lse.size()),
                         {}};
        AttentionTensors tensors;
        tensors.q = sharded.q();
        tensors.out = {output.out.data()};
        tensors.lse = output.lse.data();
        tensors.sinks = sharded.spec().sinks.data();
        PlanRun run;
        VARLANE_ASSERT_OK(
            run.Begin(**table, &plan, sharded.view(), 0, tensors));
        std::vector<std::byte> memory(run.scratch_bytes() + 64);
        const size_t skip =
            (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        const auto scratch =
            std::span(memory).subspan(skip, run.scratch_bytes());
        const Grid grid = run.grid();
        for (int node = 0; node < 2; ++node) {
          for (int64_t i = grid.node_begin[size_t(node)];
               i < grid.node_begin[size_t(node) + 1]; ++i) {
            const int runner = is_swapped ? 1 - node : node;
            run(Threadgroup(
                i, runner, runner, scratch, [](const void*) { return false; },
                nullptr));
          }
        }
        run.End(true, false, &output.report);
        ExpectSameBits(expected, output, "by hand");
        const LaunchReport& report = output.report;
        const int64_t useful =
            report.threadgroups - report.surplus_threadgroups;
        EXPECT_EQ(report.home_threadgroups, is_swapped ? 0 : useful);
        EXPECT_EQ(report.stolen_threadgroups, is_swapped ? useful : 0);
        EXPECT_EQ(is_swapped ? report.local_bytes : report.remote_bytes, 0);
        EXPECT_GE(is_swapped ? report.remote_bytes : report.local_bytes,
                  report.kv_bytes);
      }
    }
  }
}

// --- writes and probes -------------------------------------------------------

// Each shard's tokens are written by threadgroups of its node's range.
TEST(ShardsTest, WritesAreCutByShard) {
  const Engine engine = MakeNodes(2);
  const Result<const KernelTable*> table = KernelsOf(*engine.runtime);
  VARLANE_ASSERT_OK(table);
  AttentionCase c(MixedSpec(DType::kF32));
  const std::vector<float> rows = RandomRows(5, 40, 4 * 64);
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < 40; ++i) slots.push_back(i);
  KvWrite write;
  VARLANE_ASSERT_OK(write.Begin(**table, 2, c.view(), 0, {rows.data()},
                                {rows.data()}, slots));
  EXPECT_TRUE(write.grid().node_begin.empty()) << "no shards";
  EXPECT_EQ(write.grid().num_threadgroups, 3);
  c.ShardHeads(2);
  VARLANE_ASSERT_OK(write.Begin(**table, 4, c.view(), 0, {rows.data()},
                                {rows.data()}, slots));
  EXPECT_TRUE(write.grid().node_begin.empty()) << "not the runtime's nodes";
  VARLANE_ASSERT_OK(write.Begin(**table, 2, c.view(), 0, {rows.data()},
                                {rows.data()}, slots));
  const Grid grid = write.grid();
  ASSERT_EQ(
      std::vector<int64_t>(grid.node_begin.begin(), grid.node_begin.end()),
      (std::vector<int64_t>{0, 3, 6}));
  EXPECT_EQ(grid.num_threadgroups, 6);
  // Node 1's range alone writes heads 2 and 3, and nothing of 0 and 1.
  const KvView view = c.view();
  const auto shard_bytes =
      static_cast<size_t>(view.num_blocks * view.part_bytes());
  std::memset(view.part(0, 0), 0x11, shard_bytes);
  std::memset(view.part(0, 1), 0x11, shard_bytes);
  for (int64_t i = grid.node_begin[1]; i < grid.node_begin[2]; ++i) {
    write(Threadgroup(
        i, 0, 1, {}, [](const void*) { return false; }, nullptr));
  }
  const std::vector<std::byte> untouched(shard_bytes, std::byte{0x11});
  EXPECT_EQ(std::memcmp(view.part(0, 0), untouched.data(), shard_bytes), 0);
  for (int64_t token = 0; token < 40; ++token) {
    for (int head = 2; head < 4; ++head) {
      for (int d = 0; d < 64; ++d) {
        const float wanted = rows[size_t((token * 4 + head) * 64 + d)];
        const auto t = int(token % 16);
        ASSERT_EQ(LoadElement(view.k(token / 16, 0, head), DType::kF32,
                              view.layout.k_offset(t, d)),
                  double(wanted));
        ASSERT_EQ(LoadElement(view.v(token / 16, 0, head), DType::kF32,
                              view.layout.v_offset(t, d)),
                  double(wanted));
      }
    }
  }
}

TEST(ShardsTest, LimitsReadTheSameBytes) {
  const Engine engine = MakeNodes(2);
  AttentionCase c(MixedSpec());
  const auto plain =
      ReadProbe::Create(engine.runtime.get(), c.view(), 0, c.batch());
  VARLANE_ASSERT_OK(plain);
  const int64_t bytes = (*plain)->bytes();
  c.ShardHeads(2);
  const auto sharded =
      ReadProbe::Create(engine.runtime.get(), c.view(), 0, c.batch());
  VARLANE_ASSERT_OK(sharded);
  EXPECT_EQ((*sharded)->bytes(), bytes);
  for (const int loop : {0, (*sharded)->num_loops() - 1}) {
    VARLANE_EXPECT_OK((*sharded)->Run(loop));
  }
}

// --- refusals ----------------------------------------------------------------

void ExpectRefusal(const Status& status, const std::string& text) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), text);
}

TEST(ShardsTest, ViewsThatCannotBeAreRefusedEverywhere) {
  const Engine engine = MakeNodes(2);
  AttentionCase c(MixedSpec());
  c.ShardHeads(2);
  const auto refuse = [&](const KvView& view, const std::string& text) {
    AttentionPlan plan;
    ExpectRefusal(engine.attention->Plan(c.batch(), c.shape(), view, {}, &plan),
                  text);
    const std::vector<float> rows(size_t{4} * 64);
    const std::vector<int64_t> slots = {0};
    ExpectRefusal(
        engine.attention->WriteKv(view, 0, {rows.data()}, {rows.data()}, slots),
        text);
    const std::vector<BlockCopy> copies = {{0, 1}};
    ExpectRefusal(CopyBlocks(engine.runtime.get(), view, copies), text);
    const std::vector<int32_t> table = {0};
    std::vector<float> out(rows.size());
    ExpectRefusal(GatherKv(engine.runtime.get(), view, {table, 0, 0, 1},
                           {out.data()}, {}),
                  text);
    ExpectRefusal(
        ReadProbe::Create(engine.runtime.get(), view, 0, c.batch()).status(),
        text);
  };
  for (const int bad : {0, -1, 3, 8}) {
    KvView view = c.view();
    view.num_shards = bad;
    refuse(view, "the KV view's num_shards = " + std::to_string(bad) +
                     ", must divide num_kv_heads = 4");
  }
  const int64_t part = c.view().part_bytes();
  const int64_t blocks = c.view().num_blocks;
  for (const int64_t bad :
       {int64_t{0}, blocks * part - 64, c.view().shard_stride + 32}) {
    KvView view = c.view();
    view.shard_stride = bad;
    refuse(view, "the KV view's shard_stride = " + std::to_string(bad) +
                     ", must be a multiple of 64 and hold " +
                     std::to_string(blocks) + " blocks' " +
                     std::to_string(part) + " bytes");
  }
  KvView view = c.view();
  const std::atomic<int64_t> of_nodes[2] = {blocks, 0};
  view.node_blocks = of_nodes;
  view.node_stride = blocks;
  refuse(view, "the KV view has both num_shards = 2 and node_blocks");
}

TEST(ShardsTest, APlanIsForOneNumberOfShards) {
  const Engine engine = MakeNodes(2);
  AttentionCase c(MixedSpec());
  const KvView plain = c.view();
  AttentionPlan plan;
  VARLANE_ASSERT_OK(
      engine.attention->Plan(c.batch(), c.shape(), plain, {}, &plan));
  KvView sharded = plain;
  sharded.num_shards = 2;
  sharded.shard_stride = plain.num_blocks * sharded.part_bytes();
  std::vector<float> out(size_t(c.spec().total_q() * 8 * 64));
  ExpectRefusal(engine.attention->Run(&plan, sharded, 0,
                                      {.q = c.q(), .out = {out.data()}}),
                "the KV view has num_shards = 2, but the plan was made for 1");
}

}  // namespace
}  // namespace varlane::testing
