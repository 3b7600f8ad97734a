// Proves where workers stand on described machines: 1 to 8 nodes, SMT, hybrid
// cores, restricted sets, more CPUs than a word or a cpu_set_t holds; and that
// Runtimes with disjoint CPU lists keep apart.
//
// SPDX-License-Identifier: Apache-2.0

#include "runtime/placement.h"

#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/affinity.h"
#include "tests/testing/files.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

// --- described machines ------------------------------------------------------

struct Machine {
  const char* name;
  const char* synthetic;
  const char* kept = "";  // CPUs that a cpuset leaves, "" = all
  const char* fast = "";  // CPUs of the faster kind; "" = all are alike
};
void PrintTo(const Machine& machine, std::ostream* out) {
  *out << machine.name;
}

constexpr Machine kMachines[] = {
    {"Laptop", "numa:1 core:4 pu:2"},
    {"OneCpu", "numa:1 core:1 pu:1"},
    {"TwoNodes", "numa:2 l3:1 l2:4 core:1 pu:2"},
    {"ThreeNodes", "numa:3 core:5 pu:1"},
    {"EightNodes", "pack:2 numa:4 l3:2 core:4 pu:2"},
    {"NinetySixCpus", "pack:2 numa:1 core:24 pu:2"},
    {"SixHundredForty", "numa:8 core:80 pu:1"},
    {"MoreThanACpuSet", "pack:2 numa:4 core:96 pu:2"},
    {"HalfOfEachNode", "numa:4 core:8 pu:2", "0-7,16-23,32-39,48-55"},
    {"UnevenNodes", "numa:3 core:8 pu:2", "0-15,16,18,32-35"},
    {"ANodeWithoutCpus", "numa:3 core:4 pu:1", "0-3,8-11"},
    {"ManyL3s", "pack:2 numa:2 l3:4 core:4 pu:2"},
    {"UnevenL3s", "numa:2 l3:2 core:4 pu:1", "0-3,5,8-10,12-15"},
    {"NodesInAnL3", "pack:2 l3:1 numa:2 core:4 pu:1"},
    {"OddSiblings", "numa:1 core:6 pu:2", "1,2,3,5,8,9"},
    // Four fast cores with two threads each, eight slow ones with one.
    {"Hybrid", "numa:1 core:12 pu:2", "0-7,8,10,12,14,16,18,20,22", "0-7"},
    // The slow ones come first.
    {"HybridBackwards", "numa:1 core:8 pu:1", "", "6-7"},
    {"HybridNodes", "numa:2 core:6 pu:1", "", "0-1,6-7"},
};

hwloc_bitmap_t ListToBitmap(const char* list) {
  CpuMask mask;
  EXPECT_TRUE(testing::IsOk(CpuMask::Parse(list, &mask)));
  const hwloc_bitmap_t set = hwloc_bitmap_alloc();
  for (int cpu = 0; cpu < CpuMask::kMaxCpus; ++cpu) {
    if (mask.Has(cpu)) hwloc_bitmap_set(set, static_cast<unsigned>(cpu));
  }
  return set;
}

// The machine as hwloc exports it, so that everything is read as from a real
// one.
void ExportXml(const Machine& machine, const std::string& path) {
  hwloc_topology_t tree = nullptr;
  EXPECT_EQ(hwloc_topology_init(&tree), 0);
  EXPECT_EQ(hwloc_topology_set_synthetic(tree, machine.synthetic), 0);
  EXPECT_EQ(hwloc_topology_load(tree), 0);
  if (*machine.fast != '\0') {
    const hwloc_bitmap_t fast = ListToBitmap(machine.fast);
    const hwloc_bitmap_t slow =
        hwloc_bitmap_dup(hwloc_topology_get_topology_cpuset(tree));
    hwloc_bitmap_andnot(slow, slow, fast);
    EXPECT_EQ(hwloc_cpukinds_register(tree, fast, 2, 0, nullptr, 0), 0);
    EXPECT_EQ(hwloc_cpukinds_register(tree, slow, 1, 0, nullptr, 0), 0);
    hwloc_bitmap_free(fast);
    hwloc_bitmap_free(slow);
  }
  if (*machine.kept != '\0') {
    const hwloc_bitmap_t kept = ListToBitmap(machine.kept);
    EXPECT_EQ(hwloc_topology_restrict(tree, kept, 0), 0);
    hwloc_bitmap_free(kept);
  }
  EXPECT_EQ(hwloc_topology_export_xml(tree, path.c_str(), 0), 0);
  hwloc_topology_destroy(tree);
}

Topology Describe(const Machine& machine) {
  const testing::TemporaryFolder folder;
  RuntimeOptions options;
  options.topology = folder.file("machine.xml");
  ExportXml(machine, options.topology);
  Result<Topology> topology = Topology::Detect(options);
  EXPECT_TRUE(testing::IsOk(topology));
  return topology.ok() ? *std::move(topology) : Topology();
}

// --- what every placement promises -------------------------------------------

// Where a PU stands: its core, and whether it is that core's first thread.
struct Seat {
  int core = -1;
  bool is_sibling = false;
};

std::map<int, Seat> SeatsOf(const Topology& topology) {
  std::map<int, Seat> seats;
  for (int core = 0; core < static_cast<int>(topology.cores.size()); ++core) {
    const std::vector<int>& pus = topology.cores[static_cast<size_t>(core)].pus;
    for (size_t i = 0; i < pus.size(); ++i) seats[pus[i]] = {core, i > 0};
  }
  return seats;
}

// What the workers of one arena share.
using Share = std::pair<int, int>;  // node, L3

Share ShareOf(const Core& core, NumaPolicy numa) {
  switch (numa) {
    case NumaPolicy::kOff:
      return {0, 0};
    case NumaPolicy::kAuto:
      return {core.node, 0};
    case NumaPolicy::kL3:
      return {core.node, core.l3};
  }
  return {};
}

// The cores that go with `core`.
size_t CoresBeside(const Topology& topology, const Core& core,
                   NumaPolicy numa) {
  return static_cast<size_t>(std::count_if(
      topology.cores.begin(), topology.cores.end(), [&](const Core& other) {
        return ShareOf(other, numa) == ShareOf(core, numa);
      }));
}

class PlacementMachineTest : public ::testing::TestWithParam<Machine> {
 protected:
  void ExpectRight(const Topology& topology, const RuntimeOptions& options);
  static void ExpectFastestFirst(const Topology& topology,
                                 const std::vector<int>& pus, NumaPolicy numa);
};

void PlacementMachineTest::ExpectRight(const Topology& topology,
                                       const RuntimeOptions& options) {
  SCOPED_TRACE(::testing::Message()
               << options.num_threads << " threads, SMT " << options.use_smt
               << ", NUMA " << static_cast<int>(options.numa));
  const Result<Placement> placed = PlaceWorkers(topology, options);
  VARLANE_ASSERT_OK(placed);
  const std::map<int, Seat> seats = SeatsOf(topology);
  const int room = options.use_smt ? topology.num_pus
                                   : static_cast<int>(topology.cores.size());
  const int wanted = options.num_threads == 0 ? room : options.num_threads;
  ASSERT_EQ(placed->num_workers(), wanted);
  ASSERT_EQ(placed->first_worker.front(), 0);
  ASSERT_EQ(placed->first_worker.back(), wanted);
  ASSERT_EQ(static_cast<int>(placed->pus_of_node.size()), placed->num_nodes());
  ASSERT_EQ(static_cast<int>(placed->memory_of_node.size()),
            placed->num_nodes());
  std::set<int> used;
  std::set<Share> shares;
  for (int node = 0; node < placed->num_nodes(); ++node) {
    const auto n = static_cast<size_t>(node);
    const std::vector<int> pus(
        placed->pu_of_worker.begin() + placed->first_worker[n],
        placed->pu_of_worker.begin() + placed->first_worker[n + 1]);
    ASSERT_FALSE(pus.empty()) << "node " << node << " has no worker";
    ASSERT_TRUE(seats.contains(pus[0]));
    const Core& first =
        topology.cores[static_cast<size_t>(seats.at(pus[0]).core)];
    const Share share = ShareOf(first, options.numa);
    EXPECT_TRUE(shares.insert(share).second) << "one arena each";
    EXPECT_EQ(placed->memory_of_node[n],
              options.numa == NumaPolicy::kOff ? -1 : first.node);
    if (options.numa == NumaPolicy::kAuto) {
      EXPECT_EQ(first.node, node);
    }
    std::set<int> cores;
    size_t siblings = 0;
    for (const int pu : pus) {
      ASSERT_TRUE(seats.contains(pu)) << "PU " << pu << " is not ours";
      const Seat seat = seats.at(pu);
      ASSERT_EQ(
          ShareOf(topology.cores[static_cast<size_t>(seat.core)], options.numa),
          share);
      if (wanted <= room) {
        ASSERT_TRUE(used.insert(pu).second) << "PU " << pu << " has two";
      }
      cores.insert(seat.core);
      siblings += seat.is_sibling ? 1 : 0;
    }
    const size_t cores_of_node = CoresBeside(topology, first, options.numa);
    EXPECT_EQ(cores.size(), std::min(cores_of_node, pus.size()))
        << "node " << node << " shares cores while others are free";
    if (pus.size() <= cores_of_node) {
      EXPECT_EQ(siblings, 0u);
    }
    ExpectFastestFirst(topology, pus, options.numa);
  }
}

// No worker stands on a slower core while a faster one of its arena is free.
void PlacementMachineTest::ExpectFastestFirst(const Topology& topology,
                                              const std::vector<int>& pus,
                                              NumaPolicy numa) {
  const std::map<int, Seat> seats = SeatsOf(topology);
  const auto core_of = [&](int pu) -> const Core& {
    return topology.cores[static_cast<size_t>(seats.at(pu).core)];
  };
  std::set<const Core*> taken;
  int slowest = 1000;
  for (const int pu : pus) {
    taken.insert(&core_of(pu));
    slowest = std::min(slowest, core_of(pu).speed);
  }
  for (const Core& core : topology.cores) {
    if (ShareOf(core, numa) != ShareOf(core_of(pus[0]), numa)) continue;
    if (taken.contains(&core)) continue;
    EXPECT_LE(core.speed, slowest) << "a faster core is free";
  }
}

TEST_P(PlacementMachineTest, WorkersStandWhereTheyShould) {
  const Topology topology = Describe(GetParam());
  ASSERT_GT(topology.num_pus, 0);
  RuntimeOptions options;
  std::vector<NumaPolicy> policies = {NumaPolicy::kAuto, NumaPolicy::kOff};
  if (!topology.l3.empty()) policies.push_back(NumaPolicy::kL3);
  for (const NumaPolicy numa : policies) {
    for (const bool use_smt : {false, true}) {
      for (const int threads : {0, 1, 2, 3, 5, 8, 13, topology.num_pus / 2,
                                topology.num_pus, 2 * topology.num_pus + 1}) {
        options.numa = numa;
        options.use_smt = use_smt;
        options.num_threads = threads;
        ExpectRight(topology, options);
      }
    }
  }
}

// Nodes fill in step: none is a worker ahead of its share.
TEST_P(PlacementMachineTest, NodesFillByTheirCores) {
  const Topology topology = Describe(GetParam());
  RuntimeOptions options;
  const auto cores = static_cast<double>(topology.cores.size());
  for (int threads = 1; threads <= topology.num_pus; threads += 7) {
    options.num_threads = threads;
    const Result<Placement> placed = PlaceWorkers(topology, options);
    VARLANE_ASSERT_OK(placed);
    for (int node = 0; node < placed->num_nodes(); ++node) {
      const auto n = static_cast<size_t>(node);
      const double share =
          threads * static_cast<double>(topology.nodes[n].cores.size()) / cores;
      const int workers = placed->first_worker[n + 1] - placed->first_worker[n];
      EXPECT_LE(workers, std::max(1.0, share + 1)) << "node " << node;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Machines, PlacementMachineTest,
                         ::testing::ValuesIn(kMachines),
                         [](const auto& param_info) {
                           return std::string(param_info.param.name);
                         });

const Machine& Find(std::string_view name) {
  return *std::find_if(std::begin(kMachines), std::end(kMachines),
                       [&](const Machine& m) { return m.name == name; });
}

TEST(HybridTest, FastCoresHaveTheHigherSpeedAndTheFirstWorkers) {
  const Topology topology = Describe(Find("Hybrid"));
  ASSERT_EQ(topology.cores.size(), 12u);
  EXPECT_EQ(topology.num_pus, 16);
  for (const Core& core : topology.cores) {
    const bool is_fast = core.pus[0] < 8;
    EXPECT_EQ(core.speed, is_fast ? 1 : 0) << "PU " << core.pus[0];
    EXPECT_EQ(core.pus.size(), is_fast ? 2u : 1u);
  }
  const auto pus = [&](int threads, bool use_smt) {
    RuntimeOptions options;
    options.num_threads = threads;
    options.use_smt = use_smt;
    return PlaceWorkers(topology, options)->pu_of_worker;
  };
  EXPECT_EQ(pus(2, false), (std::vector<int>{0, 4})) << "spread over the fast";
  EXPECT_EQ(pus(4, false), (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(pus(6, false), (std::vector<int>{0, 2, 4, 6, 8, 16}));
  EXPECT_EQ(pus(0, true).size(), 16u);
  EXPECT_EQ(pus(13, true).back(), 1) << "siblings come after all cores";

  const Topology backwards = Describe(Find("HybridBackwards"));
  RuntimeOptions options;
  options.num_threads = 3;
  EXPECT_EQ(PlaceWorkers(backwards, options)->pu_of_worker,
            (std::vector<int>{6, 7, 0}));
}

TEST(HybridTest, CoresThatAreAlikeHaveNoRank) {
  for (const Core& core : Describe(Find("Laptop")).cores) {
    EXPECT_EQ(core.speed, 0);
  }
}

TEST(CpuMaskTest, HoldsMoreCpusThanACpuSet) {
  const Topology topology = Describe(Find("MoreThanACpuSet"));
  ASSERT_EQ(topology.num_pus, 1536);
  CpuMask mask;
  for (const Core& core : topology.cores) {
    for (const int pu : core.pus) mask.Add(pu);
  }
  EXPECT_TRUE(mask.Has(63) && mask.Has(64) && mask.Has(511) && mask.Has(1535));
  EXPECT_FALSE(mask.Has(1536));
}

// --- lists of CPUs -----------------------------------------------------------

TEST(CpuListTest, ReadsWhatTheKernelWrites) {
  CpuMask mask;
  VARLANE_ASSERT_OK(CpuMask::Parse("0-2,7,600-601", &mask));
  CpuMask expected;
  for (const int cpu : {0, 1, 2, 7, 600, 601}) expected.Add(cpu);
  EXPECT_EQ(mask, expected);
  for (const char* bad : {"", "a", "1,", ",1", "2-1", "1-", "-1", "1 2", "0x3",
                          "9999", "0-99999999999"}) {
    const Status status = CpuMask::Parse(bad, &mask);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(status.message().find(std::string("\"") + bad + "\""),
              std::string_view::npos)
        << status.message();
  }
}

TEST(CpuListTest, OnlyListedCpusAreUsed) {
  RuntimeOptions options;
  options.topology = "numa:2 core:4 pu:2";
  options.cpus = "2-3,8,10";
  const Result<Topology> topology = Topology::Detect(options);
  VARLANE_ASSERT_OK(topology);
  EXPECT_EQ(topology->num_pus, 4);
  EXPECT_EQ(topology->cores.size(), 3u);
  EXPECT_EQ(PlaceWorkers(*topology, options)->pu_of_worker,
            (std::vector<int>{2, 8, 10}));
  options.cpus = "15-16";
  const Status status = Topology::Detect(options).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("\"15-16\": CPU 16"), std::string_view::npos)
      << status.message();
}

// --- Runtimes that share this machine ----------------------------------------

std::vector<int> OurCpus() {
  CpuMask mask;
  EXPECT_TRUE(testing::IsOk(CpuMask::ReadThread(&mask)));
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CpuMask::kMaxCpus; ++cpu) {
    if (mask.Has(cpu)) cpus.push_back(cpu);
  }
  return cpus;
}

std::string ListOf(const std::vector<int>& cpus) {
  std::string text;
  for (const int cpu : cpus) {
    if (!text.empty()) text += ',';
    text += std::to_string(cpu);
  }
  return text;
}

TEST(SharedMachineTest, RuntimesWithDisjointListsKeepApart) {
  const std::vector<int> all = OurCpus();
  if (all.size() < 2) GTEST_SKIP() << "one CPU cannot be shared out";
  const auto middle = all.begin() + static_cast<ptrdiff_t>(all.size() / 2);
  std::vector<std::thread> threads;
  for (const bool is_first : {true, false}) {
    threads.emplace_back([&, is_first] {
      const std::vector<int> own(is_first ? all.begin() : middle,
                                 is_first ? middle : all.end());
      const std::set<int> allowed(own.begin(), own.end());
      RuntimeOptions options;
      options.cpus = ListOf(own);
      Result<std::unique_ptr<Runtime>> runtime = Runtime::Create(options);
      VARLANE_ASSERT_OK(runtime);
      for (int worker = 0; worker < (*runtime)->num_workers(); ++worker) {
        EXPECT_TRUE(allowed.contains((*runtime)->PuOfWorker(worker)));
      }
      std::atomic<int> strays = 0;
      for (int round = 0; round < 50; ++round) {
        VARLANE_ASSERT_OK((*runtime)->Launch({64}, [&](const Threadgroup&) {
          if (!allowed.contains(sched_getcpu())) strays.fetch_add(1);
        }));
        VARLANE_ASSERT_OK((*runtime)->Launch({1}, [&](const Threadgroup&) {
          if (!allowed.contains(sched_getcpu())) strays.fetch_add(1);
          // Nor may it be moved there later.
          for (const int cpu : OurCpus()) {
            if (!allowed.contains(cpu)) strays.fetch_add(1);
          }
        }));
      }
      EXPECT_EQ(strays.load(), 0) << "bodies ran on the other's CPUs";
      EXPECT_EQ(OurCpus(), all) << "the caller's affinity is what it was";
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace varlane
