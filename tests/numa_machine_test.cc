// Truth on a machine with several NUMA nodes: what was detected, and where the
// pages of a pool are.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/os_calls.h"
#include "memory/node_memory.h"
#include "runtime/numa_memory.h"
#include "tests/testing/numa_machine.h"
#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
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
  const char* const name = VirtualMachine();
  for (const Layout& layout : kLayouts) {
    if (name != nullptr && layout.name == std::string(name)) return &layout;
  }
  EXPECT_EQ(name, nullptr) << "no such layout";
  return nullptr;
}

using NumaMachineTest = NumaMachine;

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
    for (int64_t at = 0; at < kNumaLayout.block_bytes(); at += page) {
      void* address = view.k(block, 0, 0) + at;
      int found = -1;
      EXPECT_EQ(os::QueryPages(1, &address, &found), 0);
      local += found == os_node ? page : 0;
    }
  }
  return {local, capacity * kNumaLayout.block_bytes()};
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
      const auto pool = MakePool({.layout = kNumaLayout,
                                  .num_blocks = 1000,
                                  .max_blocks = 2000,
                                  .huge_pages = pages,
                                  .backing = backing,
                                  .shard_heads = shard_heads},
                                 runtime);
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
  ASSERT_EQ(kNumaLayout.block_bytes() % BasePageBytes(), 0);
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
  ASSERT_TRUE(CanShard());
  const int num_nodes = runtime()->num_nodes();
  const int heads_of_node = kNumaLayout.num_kv_heads / num_nodes;
  WithEveryMemory(runtime(), true, [&](KvPool* pool) {
    ASSERT_EQ(pool->num_shards(), num_nodes);
    // What was given back comes back to the same node.
    VARLANE_ASSERT_OK(pool->Shrink(1000));
    VARLANE_ASSERT_OK(pool->Grow(900));
    for (int head = 0; head < kNumaLayout.num_kv_heads; ++head) {
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
      .layout = kNumaLayout, .num_blocks = 200, .check_limits = false};
  OsFaults::FailAfter(0, EPERM, 0);
  (void)MakePool(options, runtime());
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
  const auto pool = MakePool({.layout = kNumaLayout,
                              .num_blocks = 1,
                              .max_blocks = 400,
                              .check_limits = false},
                             runtime());
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
  const auto by_l3 = MakeRuntime(options);
  ASSERT_NE(by_l3, nullptr);
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
  const auto pool =
      MakePool({.layout = kNumaLayout, .num_blocks = 1000}, by_l3.get());
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
  const auto one = OneNodeRuntime(0);
  ASSERT_NE(one, nullptr);
  EXPECT_EQ(one->num_nodes(), 1);
  const auto pool =
      MakePool({.layout = kNumaLayout, .num_blocks = 500}, one.get());
  ASSERT_NE(pool, nullptr);
  const KvPlacement placement = pool->MeasurePlacement();
  EXPECT_EQ(placement.local_bytes, pool->stats().committed_bytes);
}

TEST_F(NumaMachineTest, AFullNodeSpillsToOthersAndCountsIt) {
  const auto pool =
      MakePool({.layout = kNumaLayout, .num_blocks = 200}, runtime());
  ASSERT_NE(pool, nullptr);
  const SeqId seq = pool->CreateSequence({.home_node = 1});
  const int64_t home_blocks = pool->node_stats(1).capacity_blocks;
  VARLANE_ASSERT_OK(pool->Append(seq, 16 * (home_blocks + 5)));
  EXPECT_EQ(pool->node_stats(1).referenced_blocks, home_blocks);
  EXPECT_EQ(pool->stats().spilled_blocks, 5);
}

}  // namespace
}  // namespace varlane::testing
