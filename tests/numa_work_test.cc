// Truth on a machine with several NUMA nodes: who runs what.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/numa_machine.h"
#include "tests/testing/pools.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/runtime.h"

namespace varlane::testing {
namespace {

using NumaWorkTest = NumaMachine;

// As many threadgroups on each node as it has workers, none of which ends
// before all have begun.
TEST_F(NumaWorkTest, WorkersAreOnTheCpusOfTheirNode) {
  const int workers = runtime()->num_workers();
  std::vector<int64_t> begin = {0};
  for (int node = 0; node < runtime()->num_nodes(); ++node) {
    int64_t of_node = 0;
    for (int worker = 0; worker < workers; ++worker) {
      of_node += runtime()->NodeOfWorker(worker) == node ? 1 : 0;
    }
    begin.push_back(begin.back() + of_node);
  }
  std::atomic<int> begun = 0;
  std::vector<std::atomic<int>> node_of(static_cast<size_t>(workers));
  std::vector<std::atomic<int>> cpu_of(static_cast<size_t>(workers));
  VARLANE_ASSERT_OK(
      runtime()->Launch({workers, begin}, [&](const Threadgroup& group) {
        const auto at = static_cast<size_t>(group.index());
        node_of[at] = group.node();
        ++begun;
        const auto give_up =
            std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (begun < workers && std::chrono::steady_clock::now() < give_up) {
          std::this_thread::yield();
        }
        cpu_of[at] = sched_getcpu();
      }));
  EXPECT_EQ(begun, workers);
  for (int node = 0; node < runtime()->num_nodes(); ++node) {
    for (int64_t i = begin[static_cast<size_t>(node)];
         i < begin[static_cast<size_t>(node) + 1]; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_EQ(node_of[at], node) << "threadgroup " << i;
      const std::vector<int>& cores =
          topology().nodes[static_cast<size_t>(node)].cores;
      EXPECT_TRUE(std::any_of(
          cores.begin(), cores.end(),
          [&](int core) {
            const std::vector<int>& pus =
                topology().cores[static_cast<size_t>(core)].pus;
            return std::find(pus.begin(), pus.end(), cpu_of[at]) != pus.end();
          }))
          << "CPU " << cpu_of[at] << " for node " << node;
    }
  }
}

// Chunks and decode steps over a pool: every sequence at home on one node.
class Step {
 public:
  static constexpr int kHeads = 8;
  static constexpr int kMostContext = 160;

  struct Options {
    int num_seqs;
    int context = kMostContext;
    int num_chunks = 1;  // the first sequences; the others decode
    bool shard_heads = false;
  };

  // Sequences are at home on `homes` in turn, -1: where the pool has them.
  Step(Runtime* runtime, const std::vector<int>& homes,
       const Options& options) {
    attention_ = *Attention::Create(runtime);
    pool_ = MakePool({.layout = kNumaLayout,
                      .num_blocks = 1200,
                      .shard_heads = options.shard_heads},
                     runtime);
    for (int i = 0; i < options.num_seqs; ++i) {
      const SeqId seq = pool_->CreateSequence(
          {.home_node = homes[static_cast<size_t>(i) % homes.size()]});
      const Result<Admission> grown = pool_->Append(seq, options.context);
      EXPECT_TRUE(grown.ok() && grown->admitted());
      tables_.resize(tables_.size() + kTableSize);
      EXPECT_TRUE(IsOk(
          pool_->CopyBlockTable(seq, std::span(tables_).last(kTableSize))));
      const int q_len = i < options.num_chunks ? 16 : 1;
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + q_len);
      seq_lens_.push_back(options.context);
      Write(seq, i, options.context);
    }
    q_ = RandomRows(0, cu_seqlens_q_.back(), kHeads * 64);
  }

  KvPool& pool() { return *pool_; }
  std::span<const int32_t> TableOf(int i) const {
    return std::span(tables_).subspan(static_cast<size_t>(i) * kTableSize,
                                      kTableSize);
  }

  std::vector<float> Run(const PlanOptions& options, LaunchReport* report) {
    AttentionPlan plan;
    std::vector<float> out(q_.size(), -1);
    EXPECT_TRUE(IsOk(attention_->Plan(
        {cu_seqlens_q_, seq_lens_, tables_, kTableSize},
        {.num_q_heads = kHeads}, pool_->view(), options, &plan)));
    EXPECT_TRUE(
        IsOk(attention_->Run(&plan, pool_->view(), 0,
                             {.q = {q_.data()}, .out = {out.data()}}, report)));
    return out;
  }

 private:
  static constexpr size_t kTableSize = kMostContext / kNumaLayout.block_size;

  void Write(SeqId seq, int i, int context) {
    std::vector<int64_t> slots(static_cast<size_t>(context));
    EXPECT_TRUE(IsOk(pool_->CopySlotMapping(seq, 0, slots)));
    const auto seed = static_cast<uint64_t>(i);
    const std::vector<float> k = RandomRows(1000 + seed, context, 4 * 64);
    const std::vector<float> v = RandomRows(2000 + seed, context, 4 * 64);
    EXPECT_TRUE(IsOk(
        attention_->WriteKv(pool_->view(), 0, {k.data()}, {v.data()}, slots)));
  }

  std::unique_ptr<Attention> attention_;
  std::unique_ptr<KvPool> pool_;
  std::vector<int32_t> cu_seqlens_q_ = {0};
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> tables_;
  std::vector<float> q_;
};

TEST_F(NumaWorkTest, SequencesGetHomesInTurn) {
  const int num_nodes = runtime()->num_nodes();
  Step step(runtime(), {-1}, {.num_seqs = 3 * num_nodes});
  std::vector<int> of_node(static_cast<size_t>(num_nodes));
  for (int i = 0; i < 3 * num_nodes; ++i) {
    const int home = step.pool().NodeOfBlock(step.TableOf(i)[0]);
    ++of_node[static_cast<size_t>(home)];
    for (const int32_t block : step.TableOf(i)) {
      EXPECT_EQ(step.pool().NodeOfBlock(block), home) << "sequence " << i;
    }
  }
  EXPECT_EQ(of_node, std::vector<int>(static_cast<size_t>(num_nodes), 3));
  EXPECT_EQ(step.pool().stats().spilled_blocks, 0);
}

TEST_F(NumaWorkTest, BitsAreThoseOfOneNode) {
  const auto one = OneNodeRuntime(1);
  ASSERT_NE(one, nullptr);
  // Two tiles: an emulated machine multiplies slowly.
  Step::Options options = {.num_seqs = 8, .context = 128};
  LaunchReport report;
  const std::vector<float> expected =
      Step(one.get(), {-1}, options).Run({}, &report);
  ASSERT_TRUE(CanShard());
  for (const bool shard_heads : {false, true}) {
    options.shard_heads = shard_heads;
    Step step(runtime(), {-1}, options);
    for (const OwnerPattern owner : kOwnerPatterns) {
      for (const bool follow_homes : {true, false}) {
        EXPECT_EQ(
            step.Run({.owner = owner, .follow_homes = follow_homes}, &report),
            expected)
            << OwnerPatternName(owner) << (shard_heads ? ", sharded" : "");
      }
    }
  }
}

// A node's workers may lose their CPUs to the host for a while, and others then
// help out as they should: one launch in some must show it. By chance a half of
// the threadgroups at most is at home, give or take a twentieth.
void ExpectMostAtHome(Step* step, const char* what) {
  for (const OwnerPattern owner : kOwnerPatterns) {
    double best = 0;
    double local = 0;
    // Who gets the host's cores is chance.
    for (int i = 0; i < 400 && std::min(best, local) < 0.75; ++i) {
      LaunchReport report;
      (void)step->Run({.owner = owner}, &report);
      const int64_t useful = report.threadgroups - report.surplus_threadgroups;
      ASSERT_EQ(report.home_threadgroups + report.stolen_threadgroups, useful);
      best = std::max(best, double(report.home_threadgroups) / double(useful));
      local =
          std::max(local, double(report.local_bytes) /
                              double(report.local_bytes + report.remote_bytes));
    }
    std::printf(
        "%s, %s: %.1f%% of threadgroups at home, %.1f%% of bytes local\n", what,
        OwnerPatternName(owner), 100 * best, 100 * local);
    EXPECT_GE(best, 0.75) << OwnerPatternName(owner);
    EXPECT_GE(local, 0.75) << OwnerPatternName(owner);
  }
}

TEST_F(NumaWorkTest, ThreadgroupsRunAtHome) {
  // As much for each worker, so that nobody has a reason to help. A chunk takes
  // as long as many decode steps, and a plan sends it first: one alone would
  // leave its node's other work to others.
  std::vector<int> homes;
  for (int worker = 0; worker < runtime()->num_workers(); ++worker) {
    homes.push_back(runtime()->NodeOfWorker(worker));
  }
  const Step::Options options{.num_seqs = 24,
                              .num_chunks = runtime()->num_workers()};
  Step step(runtime(), homes, options);
  ExpectMostAtHome(&step, "homes");
}

// As much for each node here.
TEST_F(NumaWorkTest, ThreadgroupsRunWhereTheirHeadIs) {
  std::vector<int> workers(static_cast<size_t>(runtime()->num_nodes()));
  for (int worker = 0; worker < runtime()->num_workers(); ++worker) {
    ++workers[static_cast<size_t>(runtime()->NodeOfWorker(worker))];
  }
  if (*std::min_element(workers.begin(), workers.end()) !=
      *std::max_element(workers.begin(), workers.end())) {
    GTEST_SKIP() << "nodes with more workers have a reason to help";
  }
  Step step(runtime(), {-1}, {.num_seqs = 24, .shard_heads = true});
  ExpectMostAtHome(&step, "shards");
}

// All work is on the last node: the others, the caller's first of all, steal.
TEST_F(NumaWorkTest, NodesWithoutWorkSteal) {
  Step step(runtime(), {runtime()->num_nodes() - 1}, {.num_seqs = 12});
  EXPECT_EQ(step.pool().stats().spilled_blocks, 0);
  int64_t stolen = 0;
  for (int i = 0; i < 20 && stolen == 0; ++i) {
    LaunchReport report;
    (void)step.Run({}, &report);
    stolen += report.stolen_threadgroups;
  }
  EXPECT_GT(stolen, 0);
}

}  // namespace
}  // namespace varlane::testing
