// Truth on a machine with several NUMA nodes: what was detected, where pages
// are, who runs what.
//
// tests/numa/run_numa_machine.py runs it on virtual ones; on a machine with one
// node every case is skipped.
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/os_calls.h"
#include "memory/node_memory.h"
#include "runtime/numa_memory.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/log.h"
#include "varlane/runtime.h"

namespace varlane::testing {
namespace {

std::string ReadLine(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

std::string NodeFile(int os_index, const std::string& name) {
  return ReadLine("/sys/devices/system/node/node" + std::to_string(os_index) +
                  "/" + name);
}

// What run_numa_machine.py built. Node by node: CPUs, and whether it has
// memory.
struct Layout {
  const char* name;
  std::vector<std::pair<int, bool>> nodes;
  int num_arenas;
  int num_l3_arenas;
  std::vector<int> distances_of_0;  // as its script says, by OS index
};
const Layout kLayouts[] = {
    {"2-nodes", {{2, true}, {2, true}}, 2, 4, {10, 20}},
    {"4-nodes",
     {{1, true}, {1, true}, {1, true}, {1, true}},
     4,
     4,
     {10, 16, 22, 28}},
    {"no-memory", {{1, true}, {1, false}, {2, true}}, 2, 3, {10, 30, 20}},
    {"no-cpus", {{2, true}, {1, true}, {0, true}}, 2, 2, {10, 20, 20}},
};

const Layout* VirtualLayout() {
  const char* const name = std::getenv("VARLANE_NUMA_MACHINE");
  for (const Layout& layout : kLayouts) {
    if (name != nullptr && layout.name == std::string(name)) return &layout;
  }
  EXPECT_EQ(name, nullptr) << "no such layout";
  return nullptr;
}

Result<std::unique_ptr<Runtime>> OneNodeRuntime(int num_threads) {
  RuntimeOptions options;
  options.num_threads = num_threads;
  options.numa = NumaPolicy::kOff;
  return Runtime::Create(options);
}

class NumaMachineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = Runtime::Create({});
    VARLANE_ASSERT_OK(made);
    runtime_ = *std::move(made);
    if (topology().nodes.size() > 1) return;
    // The virtual machines have several: not to find them is no reason to skip.
    ASSERT_EQ(VirtualLayout(), nullptr) << "one node was found";
    GTEST_SKIP() << "this machine has one NUMA node";
  }
  void TearDown() override { SetLog({}); }

  Runtime* runtime() const { return runtime_.get(); }
  const Topology& topology() const { return runtime_->topology(); }
  int OsNode(int node) const {
    return topology().nodes[static_cast<size_t>(node)].os_index;
  }

 private:
  std::unique_ptr<Runtime> runtime_;
};

TEST_F(NumaMachineTest, TheTopologyIsTheKernels) {
  const Topology& t = topology();
  const std::vector<int> online =
      ParseIndexList(ReadLine("/sys/devices/system/node/online"));
  ASSERT_EQ(t.nodes.size(), online.size());
  ASSERT_EQ(t.distances.size(), online.size() * online.size());
  for (size_t i = 0; i < t.nodes.size(); ++i) {
    const NumaNode& node = t.nodes[i];
    SCOPED_TRACE(node.os_index);
    std::vector<int> cpus = ParseIndexList(NodeFile(node.os_index, "cpulist"));
    std::vector<int> ours;
    for (const int core : node.cores) {
      const std::vector<int>& pus = t.cores[static_cast<size_t>(core)].pus;
      ours.insert(ours.end(), pus.begin(), pus.end());
    }
    std::sort(ours.begin(), ours.end());
    if (node.memory_bytes == 0) {
      EXPECT_TRUE(ours.empty()) << "first touch takes no memory from here";
    } else {
      EXPECT_TRUE(
          std::includes(ours.begin(), ours.end(), cpus.begin(), cpus.end()));
    }
    std::istringstream row(NodeFile(node.os_index, "distance"));
    std::vector<int> by_os_index((std::istream_iterator<int>(row)),
                                 std::istream_iterator<int>());
    ASSERT_EQ(by_os_index.size(), t.nodes.size());
    for (size_t j = 0; j < t.nodes.size(); ++j) {
      const auto column =
          std::find(online.begin(), online.end(), t.nodes[j].os_index);
      EXPECT_EQ(t.distances[i * t.nodes.size() + j],
                by_os_index[static_cast<size_t>(column - online.begin())]);
    }
  }
}

TEST_F(NumaMachineTest, TheVirtualMachineIsTheOneThatWasBuilt) {
  const Layout* const layout = VirtualLayout();
  if (layout == nullptr) GTEST_SKIP() << "a real machine";
  ASSERT_EQ(topology().nodes.size(), layout->nodes.size());
  EXPECT_EQ(runtime()->num_nodes(), layout->num_arenas);
  int cpus = 0;
  for (size_t i = 0; i < layout->nodes.size(); ++i) {
    const auto& [num_cpus, has_memory] = layout->nodes[i];
    const auto node = std::find_if(
        topology().nodes.begin(), topology().nodes.end(),
        [&](const NumaNode& n) { return n.os_index == static_cast<int>(i); });
    ASSERT_NE(node, topology().nodes.end());
    EXPECT_EQ(node->memory_bytes > 0, has_memory) << "node " << i;
    EXPECT_EQ(ParseIndexList(NodeFile(static_cast<int>(i), "cpulist")).size(),
              static_cast<size_t>(num_cpus));
    cpus += num_cpus;
  }
  EXPECT_EQ(topology().num_pus, cpus);
  EXPECT_EQ(runtime()->num_workers(), cpus);
  std::istringstream row(NodeFile(0, "distance"));
  EXPECT_EQ(std::vector<int>((std::istream_iterator<int>(row)),
                             std::istream_iterator<int>()),
            layout->distances_of_0);
  // The emulator has AVX2 and no AVX-512.
  EXPECT_EQ(SupportedSimdTargets().front(), "AVX2");
  if (layout->name == std::string("no-memory")) {
    // Node 1's CPU takes memory from node 2, which is nearer than node 0.
    for (const NumaNode& node : topology().nodes) {
      EXPECT_EQ(node.cores.size(), node.os_index == 2   ? 3u
                                   : node.os_index == 0 ? 1u
                                                        : 0u);
    }
  }
}

// --- placement ---------------------------------------------------------------

constexpr KvLayout kLayout = {.dtype = DType::kBF16,
                              .num_layers = 1,
                              .num_kv_heads = 4,
                              .head_size = 64,
                              .v_head_size = 64,
                              .block_size = 16};

std::unique_ptr<KvPool> MakePool(Runtime* runtime, KvPoolOptions options) {
  auto pool = KvPool::Create(options, runtime);
  EXPECT_TRUE(IsOk(pool));
  return pool.ok() ? *std::move(pool) : nullptr;
}

// Whether the layout's heads can be sharded over so many nodes.
bool CanShard(const Runtime& runtime) {
  return kLayout.num_kv_heads % runtime.num_nodes() == 0;
}

// Of the node's blocks: bytes on its memory, and bytes in all.
std::pair<int64_t, int64_t> LocalBytes(const KvPool& pool, int node,
                                       int os_node) {
  const KvView view = pool.view();
  const int64_t page = BasePageBytes();
  const int64_t capacity = pool.node_stats(node).capacity_blocks;
  int64_t local = 0;
  for (int64_t i = 0; i < capacity; ++i) {
    const int64_t block = node * view.node_stride + i;
    EXPECT_EQ(pool.NodeOfBlock(static_cast<BlockId>(block)), node);
    for (int64_t at = 0; at < kLayout.block_bytes(); at += page) {
      void* address = view.k(block, 0, 0) + at;
      int found = -1;
      EXPECT_EQ(os::QueryPages(1, &address, &found), 0);
      local += found == os_node ? page : 0;
    }
  }
  return {local, capacity * kLayout.block_bytes()};
}

// Calls check(pool) of a pool of 1500 blocks, 500 of which it grew by, in each
// kind of memory that a pool can have.
template <typename Check>
void WithEveryMemory(Runtime* runtime, bool shard_heads, const Check& check) {
  for (const HugePages pages : {HugePages::kOff, HugePages::kTransparent}) {
    for (const MemoryBacking backing :
         {MemoryBacking::kAnonymous, MemoryBacking::kMemfd}) {
      SCOPED_TRACE(
          ::testing::Message()
          << (pages == HugePages::kOff ? "base" : "huge") << " pages, "
          << (backing == MemoryBacking::kMemfd ? "memfd" : "anonymous"));
      const auto pool = MakePool(runtime, {.layout = kLayout,
                                           .num_blocks = 1000,
                                           .max_blocks = 2000,
                                           .huge_pages = pages,
                                           .backing = backing,
                                           .shard_heads = shard_heads});
      ASSERT_NE(pool, nullptr);
      VARLANE_ASSERT_OK(pool->Grow(500));
      check(pool.get());
    }
  }
}

// Nearly all that is committed, and all of it is known.
void ExpectMeasuredLocal(const KvPool& pool, const char* what) {
  const KvPlacement placement = pool.MeasurePlacement();
  const int64_t committed = pool.stats().committed_bytes;
  EXPECT_EQ(pool.stats().mempolicy_error, 0);
  EXPECT_EQ(placement.error, 0);
  EXPECT_EQ(placement.unknown_bytes, 0);
  EXPECT_EQ(placement.local_bytes + placement.remote_bytes, committed);
  EXPECT_GE(placement.local_bytes, committed / 100 * 99);
  std::printf("local bytes of %s: %.2f%% of %ld\n", what,
              100.0 * double(placement.local_bytes) / double(committed),
              long(committed));
}

TEST_F(NumaMachineTest, EveryBlockIsOnItsNode) {
  ASSERT_EQ(kLayout.block_bytes() % BasePageBytes(), 0);
  WithEveryMemory(runtime(), false, [&](KvPool* pool) {
    for (int node = 0; node < runtime()->num_nodes(); ++node) {
      const auto [local, all] = LocalBytes(*pool, node, OsNode(node));
      EXPECT_GE(local, all / 100 * 99) << "node " << node;
    }
    ExpectMeasuredLocal(*pool, "blocks");
  });
}

// Of the head's blocks, seen through the view: how many keys and how many
// values are on the node's memory.
int64_t LocalBlocks(const KvPool& pool, int head, int os_node) {
  const KvView view = pool.view();
  int64_t local = 0;
  for (int64_t block = 0; block < pool.capacity_blocks(); ++block) {
    for (std::byte* const at :
         {view.k(block, 0, head), view.v(block, 0, head)}) {
      // move_pages takes any address of a page.
      void* address = at;
      int found = -1;
      EXPECT_EQ(os::QueryPages(1, &address, &found), 0);
      local += found == os_node ? 1 : 0;
    }
  }
  return local;
}

TEST_F(NumaMachineTest, EveryShardIsOnItsNode) {
  ASSERT_TRUE(CanShard(*runtime()));
  const int num_nodes = runtime()->num_nodes();
  const int heads_of_node = kLayout.num_kv_heads / num_nodes;
  WithEveryMemory(runtime(), true, [&](KvPool* pool) {
    ASSERT_EQ(pool->num_shards(), num_nodes);
    // What was given back comes back to the same node.
    VARLANE_ASSERT_OK(pool->Shrink(1000));
    VARLANE_ASSERT_OK(pool->Grow(900));
    for (int head = 0; head < kLayout.num_kv_heads; ++head) {
      EXPECT_GE(LocalBlocks(*pool, head, OsNode(head / heads_of_node)),
                2 * pool->capacity_blocks() / 100 * 99)
          << "head " << head;
    }
    ExpectMeasuredLocal(*pool, "shards");
    const int64_t of_node = pool->stats().committed_bytes / num_nodes;
    for (int node = 0; node < num_nodes; ++node) {
      EXPECT_EQ(pool->node_stats(node).committed_bytes, of_node);
      EXPECT_GE(pool->MeasurePlacement(node).local_bytes, of_node / 100 * 99);
    }
  });
}

// What a container does that refuses mempolicy calls: the workers' own first
// touch places the pages all the same. Which call it is that fails differs, so
// each is made to in turn.
TEST_F(NumaMachineTest, FirstTouchAloneIsEnough) {
  const KvPoolOptions options = {
      .layout = kLayout, .num_blocks = 200, .check_limits = false};
  OsFaults::FailAfter(0, EPERM, 0);
  (void)MakePool(runtime(), options);
  const int64_t calls = OsFaults::calls();
  int refused = 0;
  int told = 0;
  SetLog([&](const LogRecord& record) {
    if (record.event == "pool_mempolicy_refused") ++told;
  });
  for (int64_t i = 0; i < calls; ++i) {
    OsFaults::FailAfter(i, EPERM);
    const auto pool = KvPool::Create(options, runtime());
    OsFaults::Disarm();
    if (!pool.ok() || (*pool)->stats().mempolicy_error == 0) continue;
    ++refused;
    EXPECT_EQ(told, refused);
    EXPECT_EQ((*pool)->stats().mempolicy_error, EPERM);
    const KvPlacement placement = (*pool)->MeasurePlacement();
    EXPECT_GE(placement.local_bytes,
              (*pool)->stats().committed_bytes / 100 * 99);
  }
  EXPECT_GE(refused, runtime()->num_nodes()) << "one for every node's slab";
}

// Nothing is refused while the pool is made, but when it grows.
TEST_F(NumaMachineTest, ARefusalIsToldOnce) {
  int told = 0;
  SetLog([&](const LogRecord& record) {
    if (record.event == "pool_mempolicy_refused") ++told;
  });
  const auto pool = MakePool(runtime(), {.layout = kLayout,
                                         .num_blocks = 1,
                                         .max_blocks = 400,
                                         .check_limits = false});
  ASSERT_NE(pool, nullptr);
  EXPECT_EQ(told, 0);
  const auto grow_and_shrink = [&](int failing_call) {
    OsFaults::FailAfter(failing_call, EPERM);
    (void)pool->Grow(300);
    OsFaults::Disarm();
    VARLANE_EXPECT_OK(pool->Shrink(pool->capacity_blocks() - 1));
  };
  constexpr int kMostCalls = 50;
  for (int i = 0; i < kMostCalls && told == 0; ++i) grow_and_shrink(i);
  EXPECT_EQ(told, 1);
  for (int i = 0; i < kMostCalls; ++i) grow_and_shrink(i);
  EXPECT_EQ(told, 1);
}

// An arena for every L3 is one more level: its blocks are in its node's memory.
TEST_F(NumaMachineTest, L3ArenasUseTheMemoryOfTheirNodes) {
  if (topology().l3.empty()) GTEST_SKIP() << "this machine shows no L3";
  RuntimeOptions options;
  options.numa = NumaPolicy::kL3;
  auto made = Runtime::Create(options);
  VARLANE_ASSERT_OK(made);
  Runtime* const by_l3 = made->get();
  EXPECT_GE(by_l3->num_nodes(), runtime()->num_nodes());
  if (const Layout* const layout = VirtualLayout(); layout != nullptr) {
    EXPECT_EQ(by_l3->num_nodes(), layout->num_l3_arenas);
  }
  for (int worker = 0; worker < by_l3->num_workers(); ++worker) {
    const int node = by_l3->MemoryOfNode(by_l3->NodeOfWorker(worker));
    const NumaNode& memory = topology().nodes[static_cast<size_t>(node)];
    EXPECT_TRUE(std::any_of(
        memory.cores.begin(), memory.cores.end(),
        [&](int core) {
          const std::vector<int>& pus =
              topology().cores[static_cast<size_t>(core)].pus;
          return std::count(pus.begin(), pus.end(), by_l3->PuOfWorker(worker));
        }))
        << "worker " << worker;
  }
  const auto pool = MakePool(by_l3, {.layout = kLayout, .num_blocks = 1000});
  ASSERT_NE(pool, nullptr);
  ASSERT_EQ(pool->num_nodes(), by_l3->num_nodes());
  for (int arena = 0; arena < by_l3->num_nodes(); ++arena) {
    const auto [local, all] =
        LocalBytes(*pool, arena, OsNode(by_l3->MemoryOfNode(arena)));
    EXPECT_GE(local, all / 100 * 99) << "arena " << arena;
  }
  const KvPlacement placement = pool->MeasurePlacement();
  EXPECT_GE(placement.local_bytes, pool->stats().committed_bytes / 100 * 99);
}

TEST_F(NumaMachineTest, OneArenaForAllNodesTakesWhatItGets) {
  auto one = OneNodeRuntime(0);
  VARLANE_ASSERT_OK(one);
  EXPECT_EQ((*one)->num_nodes(), 1);
  const auto pool =
      MakePool(one->get(), {.layout = kLayout, .num_blocks = 500});
  ASSERT_NE(pool, nullptr);
  const KvPlacement placement = pool->MeasurePlacement();
  EXPECT_EQ(placement.local_bytes, pool->stats().committed_bytes);
}

// --- who runs where ----------------------------------------------------------

// As many threadgroups on each node as it has workers, none of which ends
// before all have begun.
TEST_F(NumaMachineTest, WorkersAreOnTheCpusOfTheirNode) {
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

// --- attention ---------------------------------------------------------------

// Decode steps and a chunk over a pool: every sequence at home on one node.
class Step {
 public:
  static constexpr int kHeads = 8;
  static constexpr int kContext = 320;

  // Sequences are at home on `homes` in turn, -1: where the pool has them.
  Step(Runtime* runtime, int num_seqs, const std::vector<int>& homes,
       bool shard_heads = false) {
    attention_ = *Attention::Create(runtime);
    pool_ = MakePool(
        runtime,
        {.layout = kLayout, .num_blocks = 1200, .shard_heads = shard_heads});
    const int64_t stride = (kContext + kLayout.block_size - 1) / 16;
    for (int i = 0; i < num_seqs; ++i) {
      const SeqId seq = pool_->CreateSequence(
          {.home_node = homes[static_cast<size_t>(i) % homes.size()]});
      const Result<Admission> grown = pool_->Append(seq, kContext);
      EXPECT_TRUE(grown.ok() && grown->admitted());
      tables_.resize(tables_.size() + static_cast<size_t>(stride));
      EXPECT_TRUE(IsOk(pool_->CopyBlockTable(
          seq, std::span(tables_).last(static_cast<size_t>(stride)))));
      const int q_len = i == 1 ? 24 : 1;
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + q_len);
      seq_lens_.push_back(kContext);
      Write(seq, i);
      seqs_.push_back(seq);
    }
    stride_ = stride;
    q_.resize(static_cast<size_t>(cu_seqlens_q_.back()) * kHeads * 64);
    for (size_t i = 0; i < q_.size(); ++i) {
      q_[i] = static_cast<float>(RandomValue(1, i, 0, 0, 0));
    }
  }

  KvPool& pool() { return *pool_; }
  std::span<const int32_t> TableOf(int i) const {
    return std::span(tables_).subspan(static_cast<size_t>(i * stride_),
                                      static_cast<size_t>(stride_));
  }

  std::vector<float> Run(const PlanOptions& options, LaunchReport* report) {
    AttentionPlan plan;
    std::vector<float> out(q_.size(), -1);
    EXPECT_TRUE(IsOk(attention_->Plan(
        {cu_seqlens_q_, seq_lens_, tables_, stride_}, {.num_q_heads = kHeads},
        pool_->view(), options, &plan)));
    EXPECT_TRUE(
        IsOk(attention_->Run(&plan, pool_->view(), 0,
                             {.q = {q_.data()}, .out = {out.data()}}, report)));
    return out;
  }

 private:
  void Write(SeqId seq, int seed) {
    std::vector<int64_t> slots(kContext);
    EXPECT_TRUE(IsOk(pool_->CopySlotMapping(seq, 0, slots)));
    std::vector<float> k(slots.size() * 4 * 64);
    std::vector<float> v(k.size());
    for (size_t i = 0; i < k.size(); ++i) {
      k[i] = static_cast<float>(RandomValue(2, i, uint64_t(seed), 0, 0));
      v[i] = static_cast<float>(RandomValue(3, i, uint64_t(seed), 0, 0));
    }
    EXPECT_TRUE(IsOk(
        attention_->WriteKv(pool_->view(), 0, {k.data()}, {v.data()}, slots)));
  }

  std::unique_ptr<Attention> attention_;
  std::unique_ptr<KvPool> pool_;
  std::vector<SeqId> seqs_;
  std::vector<int32_t> cu_seqlens_q_ = {0};
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> tables_;
  int64_t stride_ = 0;
  std::vector<float> q_;
};

TEST_F(NumaMachineTest, SequencesGetHomesInTurn) {
  const int num_nodes = runtime()->num_nodes();
  Step step(runtime(), 3 * num_nodes, {-1});
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

TEST_F(NumaMachineTest, BitsAreThoseOfOneNode) {
  auto one = OneNodeRuntime(1);
  VARLANE_ASSERT_OK(one);
  LaunchReport report;
  const std::vector<float> expected =
      Step(one->get(), 12, {-1}).Run({}, &report);
  ASSERT_TRUE(CanShard(*runtime()));
  for (const bool shard_heads : {false, true}) {
    Step step(runtime(), 12, {-1}, shard_heads);
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
    for (int i = 0; i < 100 && std::min(best, local) < 0.75; ++i) {
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

TEST_F(NumaMachineTest, ThreadgroupsRunAtHome) {
  // As much for each worker, so that nobody has a reason to help.
  std::vector<int> homes;
  for (int worker = 0; worker < runtime()->num_workers(); ++worker) {
    homes.push_back(runtime()->NodeOfWorker(worker));
  }
  Step step(runtime(), 24, homes);
  ExpectMostAtHome(&step, "homes");
}

// As much for each node here.
TEST_F(NumaMachineTest, ThreadgroupsRunWhereTheirHeadIs) {
  std::vector<int> workers(static_cast<size_t>(runtime()->num_nodes()));
  for (int worker = 0; worker < runtime()->num_workers(); ++worker) {
    ++workers[static_cast<size_t>(runtime()->NodeOfWorker(worker))];
  }
  if (*std::min_element(workers.begin(), workers.end()) !=
      *std::max_element(workers.begin(), workers.end())) {
    GTEST_SKIP() << "nodes with more workers have a reason to help";
  }
  Step step(runtime(), 24, {-1}, true);
  ExpectMostAtHome(&step, "shards");
}

// All work is on the last node: the others, the caller's first of all, steal.
TEST_F(NumaMachineTest, NodesWithoutWorkSteal) {
  Step step(runtime(), 12, {runtime()->num_nodes() - 1});
  EXPECT_EQ(step.pool().stats().spilled_blocks, 0);
  int64_t stolen = 0;
  for (int i = 0; i < 20 && stolen == 0; ++i) {
    LaunchReport report;
    (void)step.Run({}, &report);
    stolen += report.stolen_threadgroups;
  }
  EXPECT_GT(stolen, 0);
}

TEST_F(NumaMachineTest, AFullNodeSpillsToOthersAndCountsIt) {
  const auto pool = MakePool(runtime(), {.layout = kLayout, .num_blocks = 200});
  ASSERT_NE(pool, nullptr);
  const SeqId seq = pool->CreateSequence({.home_node = 1});
  const int64_t home_blocks = pool->node_stats(1).capacity_blocks;
  VARLANE_ASSERT_OK(pool->Append(seq, 16 * (home_blocks + 5)));
  EXPECT_EQ(pool->node_stats(1).referenced_blocks, home_blocks);
  EXPECT_EQ(pool->stats().spilled_blocks, 5);
}

}  // namespace
}  // namespace varlane::testing
