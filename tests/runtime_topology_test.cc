// Proves that topologies are read right, ours and described ones.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/kernel_nodes.h"
#include "runtime/placement.h"
#include "tests/testing/files.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

Result<Topology> Describe(const std::string& text) {
  RuntimeOptions options;
  options.topology = text;
  return Topology::Detect(options);
}

bool Warns(const Topology& topology, const std::string& text) {
  return std::any_of(topology.warnings.begin(), topology.warnings.end(),
                     [&](const std::string& warning) {
                       return warning.find(text) != std::string::npos;
                     });
}

// What every topology promises, whatever it describes.
void ExpectConsistent(const Topology& topology) {
  std::vector<int> seen(topology.cores.size());
  bool has_ended = false;
  for (size_t n = 0; n < topology.nodes.size(); ++n) {
    const NumaNode& node = topology.nodes[n];
    EXPECT_FALSE(has_ended && !node.cores.empty())
        << "a node with cores stands behind one without";
    has_ended = has_ended || node.cores.empty();
    for (const int core : node.cores) {
      ++seen[static_cast<size_t>(core)];
      EXPECT_EQ(topology.cores[static_cast<size_t>(core)].node,
                static_cast<int>(n));
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1),
            static_cast<std::ptrdiff_t>(seen.size()));
  std::set<int> pus;
  int previous_node = 0;
  for (const Core& core : topology.cores) {
    EXPECT_GE(core.node, previous_node);
    previous_node = core.node;
    EXPECT_FALSE(core.pus.empty());
    for (const int pu : core.pus) {
      EXPECT_TRUE(pus.insert(pu).second) << "PU " << pu << " is in two cores";
    }
    EXPECT_LT(core.package, topology.num_packages);
    EXPECT_LT(core.l3, static_cast<int>(topology.l3.size()));
    EXPECT_LT(core.l2, static_cast<int>(topology.l2.size()));
  }
  EXPECT_EQ(static_cast<int>(pus.size()), topology.num_pus);
  EXPECT_LE(topology.num_pus, topology.num_pus_machine);
}

TEST(TopologyTest, ThisMachineIsReadWithinTheAffinityMask) {
  Result<Topology> topology = Topology::Detect({});
  VARLANE_ASSERT_OK(topology);
  ExpectConsistent(*topology);
  EXPECT_EQ(topology->source, "this machine");
  EXPECT_TRUE(topology->is_this_machine);
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  EXPECT_EQ(topology->num_pus, CPU_COUNT(&mask));
  for (const Core& core : topology->cores) {
    for (const int pu : core.pus) EXPECT_TRUE(CPU_ISSET(pu, &mask));
  }
  ASSERT_FALSE(topology->page_sizes.empty());
  EXPECT_EQ(topology->page_sizes[0].bytes, sysconf(_SC_PAGESIZE));
}

TEST(TopologyTest, AThreadBoundToOneCpuSeesOneCore) {
  std::thread([] {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    int last = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &all)) last = cpu;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    Result<Topology> topology = Topology::Detect({});
    VARLANE_ASSERT_OK(topology);
    ExpectConsistent(*topology);
    EXPECT_EQ(topology->num_pus, 1);
    ASSERT_EQ(topology->cores.size(), 1u);
    EXPECT_EQ(topology->cores[0].pus, std::vector<int>{last});
    Result<std::unique_ptr<Runtime>> runtime = Runtime::Create({});
    VARLANE_ASSERT_OK(runtime);
    EXPECT_EQ((*runtime)->num_workers(), 1);
    EXPECT_EQ((*runtime)->PuOfWorker(0), last);
  }).join();
}

struct Synthetic {
  const char* name;
  const char* text;
  size_t nodes, cores, pus, l3, l2;
};
void PrintTo(const Synthetic& s, std::ostream* out) { *out << s.name; }

class SyntheticTopologyTest : public ::testing::TestWithParam<Synthetic> {};

TEST_P(SyntheticTopologyTest, HasWhatItsDescriptionSays) {
  Result<Topology> topology = Describe(GetParam().text);
  VARLANE_ASSERT_OK(topology);
  ExpectConsistent(*topology);
  EXPECT_FALSE(topology->is_this_machine);
  EXPECT_EQ(topology->source, std::string("synthetic:") + GetParam().text);
  EXPECT_EQ(topology->nodes.size(), GetParam().nodes);
  EXPECT_EQ(topology->cores.size(), GetParam().cores);
  EXPECT_EQ(static_cast<size_t>(topology->num_pus), GetParam().pus);
  EXPECT_EQ(topology->l3.size(), GetParam().l3);
  EXPECT_EQ(topology->l2.size(), GetParam().l2);
  // What is missing is said.
  const auto says = [&](const char* what) {
    return std::any_of(topology->warnings.begin(), topology->warnings.end(),
                       [&](const std::string& warning) {
                         return warning.find(what) != std::string::npos;
                       });
  };
  EXPECT_EQ(says("no L3"), GetParam().l3 == 0);
  EXPECT_EQ(says("no L2"), GetParam().l2 == 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, SyntheticTopologyTest,
    ::testing::Values(
        Synthetic{"OneNode", "numa:1 core:4 pu:1", 1, 4, 4, 0, 0},
        Synthetic{"TwoNodes", "numa:2 core:4 pu:1", 2, 8, 8, 0, 0},
        Synthetic{"FourNodesSmt", "pack:2 numa:2 l3:1 l2:4 core:1 pu:2", 4, 16,
                  32, 4, 16},
        Synthetic{"EightNodes", "pack:2 numa:4 l3:2 l2:2 core:1 pu:1", 8, 32,
                  32, 16, 32},
        Synthetic{"SharedL2", "numa:1 l3:1 l2:2 core:4 pu:1", 1, 8, 8, 1, 2},
        Synthetic{"NoCores", "numa:2 pu:3", 2, 6, 6, 0, 0}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

// Two nodes of two cores with two threads each, as hwloc exports it; a third
// node has memory and no CPU. The cpuset allows PUs 0, 2, 3, 4 and 5: half of
// core 0, none of core 3.
constexpr const char* kRestrictedXml =
    R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
<object type="Machine" os_index="0" cpuset="0xff" complete_cpuset="0xff"
 allowed_cpuset="0x3d" nodeset="0x7" complete_nodeset="0x7"
 allowed_nodeset="0x7" gp_index="1">
<object type="NUMANode" os_index="2" cpuset="0xff" complete_cpuset="0xff"
 nodeset="0x4" complete_nodeset="0x4" gp_index="40" local_memory="4096"/>
<object type="Package" os_index="0" cpuset="0xff" complete_cpuset="0xff"
 nodeset="0x7" complete_nodeset="0x7" gp_index="2">
<object type="L3Cache" cpuset="0xf" complete_cpuset="0xf" nodeset="0x5"
 complete_nodeset="0x5" gp_index="3" cache_size="16777216" depth="3"
 cache_linesize="64" cache_associativity="0" cache_type="0">
<object type="NUMANode" os_index="0" cpuset="0xf" complete_cpuset="0xf"
 nodeset="0x1" complete_nodeset="0x1" gp_index="4" local_memory="1073741824">
<page_type size="4096" count="262144"/></object>
<object type="Core" os_index="0" cpuset="0x3" complete_cpuset="0x3"
 nodeset="0x5" complete_nodeset="0x5" gp_index="5">
<object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1"
 nodeset="0x5" complete_nodeset="0x5" gp_index="6"/>
<object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2"
 nodeset="0x5" complete_nodeset="0x5" gp_index="7"/></object>
<object type="Core" os_index="1" cpuset="0xc" complete_cpuset="0xc"
 nodeset="0x5" complete_nodeset="0x5" gp_index="8">
<object type="PU" os_index="2" cpuset="0x4" complete_cpuset="0x4"
 nodeset="0x5" complete_nodeset="0x5" gp_index="9"/>
<object type="PU" os_index="3" cpuset="0x8" complete_cpuset="0x8"
 nodeset="0x5" complete_nodeset="0x5" gp_index="10"/></object></object>
<object type="L3Cache" cpuset="0xf0" complete_cpuset="0xf0" nodeset="0x6"
 complete_nodeset="0x6" gp_index="11" cache_size="16777216" depth="3"
 cache_linesize="64" cache_associativity="0" cache_type="0">
<object type="NUMANode" os_index="1" cpuset="0xf0" complete_cpuset="0xf0"
 nodeset="0x2" complete_nodeset="0x2" gp_index="12" local_memory="0"/>
<object type="Core" os_index="2" cpuset="0x30" complete_cpuset="0x30"
 nodeset="0x6" complete_nodeset="0x6" gp_index="13">
<object type="PU" os_index="4" cpuset="0x10" complete_cpuset="0x10"
 nodeset="0x6" complete_nodeset="0x6" gp_index="14"/>
<object type="PU" os_index="5" cpuset="0x20" complete_cpuset="0x20"
 nodeset="0x6" complete_nodeset="0x6" gp_index="15"/></object>
<object type="Core" os_index="3" cpuset="0xc0" complete_cpuset="0xc0"
 nodeset="0x6" complete_nodeset="0x6" gp_index="16">
<object type="PU" os_index="6" cpuset="0x40" complete_cpuset="0x40"
 nodeset="0x6" complete_nodeset="0x6" gp_index="17"/>
<object type="PU" os_index="7" cpuset="0x80" complete_cpuset="0x80"
 nodeset="0x6" complete_nodeset="0x6" gp_index="18"/></object></object>
</object></object>
</topology>
)";

class XmlFile {
 public:
  explicit XmlFile(const std::string& text) {
    testing::WriteWholeFile(path(), text);
  }
  std::string path() const { return folder_.file("topology.xml"); }

 private:
  testing::TemporaryFolder folder_;
};

TEST(TopologyTest, XmlWithACpusetShowsOnlyWhatIsAllowed) {
  const XmlFile file(kRestrictedXml);
  Result<Topology> topology = Describe(file.path());
  VARLANE_ASSERT_OK(topology);
  ExpectConsistent(*topology);
  EXPECT_EQ(topology->source, "xml:" + file.path());
  EXPECT_FALSE(topology->is_this_machine);
  EXPECT_EQ(topology->num_pus, 5);
  EXPECT_EQ(topology->num_pus_machine, 8);
  ASSERT_EQ(topology->cores.size(), 3u);
  EXPECT_EQ(topology->cores[0].pus, (std::vector<int>{0}));
  EXPECT_EQ(topology->cores[1].pus, (std::vector<int>{2, 3}));
  EXPECT_EQ(topology->cores[2].pus, (std::vector<int>{4, 5}));
  // Node 1 has no memory: its core takes it from node 2, which holds the core
  // too, and so comes before it.
  ASSERT_EQ(topology->nodes.size(), 3u);
  EXPECT_EQ(topology->nodes[0].memory_bytes, 1073741824);
  EXPECT_EQ(topology->nodes[1].os_index, 2);
  EXPECT_EQ(topology->nodes[1].memory_bytes, 4096);
  EXPECT_EQ(topology->nodes[1].cores, (std::vector<int>{2}));
  EXPECT_EQ(topology->nodes[2].os_index, 1);
  EXPECT_EQ(topology->nodes[2].memory_bytes, 0);
  EXPECT_TRUE(topology->nodes[2].cores.empty());
  EXPECT_TRUE(Warns(*topology, "node 1 has no memory: its cores use node 2"));
  EXPECT_TRUE(topology->distances.empty()) << "the file tells none";

  RuntimeOptions options;
  options.topology = file.path();
  Result<std::unique_ptr<Runtime>> runtime = Runtime::Create(options);
  VARLANE_ASSERT_OK(runtime);
  EXPECT_EQ((*runtime)->num_workers(), 3);
  EXPECT_EQ((*runtime)->num_nodes(), 2);
  EXPECT_EQ((*runtime)->PuOfWorker(0), -1) << "not our machine: not pinned";
}

std::string With(std::string xml, const std::string& from,
                 const std::string& to) {
  const size_t at = xml.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return xml.replace(at, from.size(), to);
}

TEST(TopologyTest, ANodeWithoutCpusComesLast) {
  const XmlFile file(
      With(kRestrictedXml, "local_memory=\"0\"", "local_memory=\"8192\""));
  Result<Topology> topology = Describe(file.path());
  VARLANE_ASSERT_OK(topology);
  ExpectConsistent(*topology);
  ASSERT_EQ(topology->nodes.size(), 3u);
  EXPECT_EQ(topology->nodes[1].os_index, 1);
  EXPECT_EQ(topology->nodes[1].memory_bytes, 8192);
  EXPECT_EQ(topology->nodes[1].cores, (std::vector<int>{2}));
  EXPECT_EQ(topology->nodes[2].os_index, 2);
  EXPECT_TRUE(topology->nodes[2].cores.empty());
  EXPECT_FALSE(Warns(*topology, "has no memory"));
}

// As hwloc writes them: rows and columns by the nodes' numbers.
constexpr const char* kDistancesXml =
    R"(<distances2 type="NUMANode" nbobjs="3" kind="5" indexing="os">
<indexes length="6">0 1 2 </indexes>
<u64values length="27">10 11 30 12 10 21 31 20 10 </u64values>
</distances2>
</topology>)";

TEST(TopologyTest, DistancesStandInTheOrderOfNodes) {
  const std::string xml = With(kRestrictedXml, "</topology>", kDistancesXml);
  const XmlFile file(xml);
  Result<Topology> topology = Describe(file.path());
  VARLANE_ASSERT_OK(topology);
  // Node 1 has no memory, and node 0 is nearer to it than node 2 is.
  ASSERT_EQ(topology->nodes.size(), 3u);
  EXPECT_EQ(topology->nodes[0].cores, (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(Warns(*topology, "node 1 has no memory: its cores use node 0"));
  EXPECT_EQ(topology->distances,
            (std::vector<int>{10, 11, 30, 12, 10, 21, 31, 20, 10}));
  // With memory everywhere, but only node 1's core allowed, it comes first.
  const XmlFile other(
      With(With(xml, "local_memory=\"0\"", "local_memory=\"1\""),
           "allowed_cpuset=\"0x3d\"", "allowed_cpuset=\"0x30\""));
  topology = Describe(other.path());
  VARLANE_ASSERT_OK(topology);
  ASSERT_EQ(topology->nodes.size(), 3u);
  EXPECT_EQ(topology->nodes[0].os_index, 1);
  EXPECT_EQ(topology->distances,
            (std::vector<int>{10, 12, 21, 11, 10, 30, 20, 31, 10}));
}

TEST(TopologyTest, NodesThatWereNotFoundAreWarnedOf) {
  const auto warnings = [](const std::string& text, int num_nodes) {
    const XmlFile file(text);
    std::vector<std::string> found;
    CompareWithKernelsNodes(file.path(), num_nodes, &found);
    return found;
  };
  EXPECT_TRUE(warnings("0\n", 1).empty());
  EXPECT_TRUE(warnings("0-3,8\n", 5).empty());
  ASSERT_EQ(warnings("0-1\n", 1).size(), 1u);
  EXPECT_EQ(warnings("0-1\n", 1)[0],
            "the kernel has 2 NUMA nodes (0-1), but only 1 may be used or were "
            "found");
  ASSERT_EQ(warnings("nonsense", 1).size(), 1u);
  std::vector<std::string> found;
  CompareWithKernelsNodes("/no/such/file", 1, &found);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0],
            "the NUMA nodes are not known for sure: /no/such/file cannot be "
            "read; 1 found otherwise");
}

TEST(TopologyTest, RefusalsSayWhy) {
  const Status missing = Describe("/no/such/file.xml").status();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound) << missing.ToString();
  EXPECT_NE(missing.message().find("/no/such/file.xml"),
            std::string_view::npos);
  const Status bad = Describe("nonsense:twelve").status();
  EXPECT_EQ(bad.code(), StatusCode::kInvalidArgument) << bad.ToString();
  EXPECT_NE(bad.message().find("nonsense:twelve"), std::string_view::npos);
  const XmlFile broken("this is no XML");
  const Status unreadable = Describe(broken.path()).status();
  EXPECT_FALSE(unreadable.ok());
  EXPECT_NE(unreadable.message().find(broken.path()), std::string_view::npos)
      << unreadable.ToString();
}

std::vector<int> WorkersOfNodes(const std::string& text, int num_threads,
                                NumaPolicy numa, bool use_smt) {
  RuntimeOptions options;
  options.topology = text;
  options.num_threads = num_threads;
  options.numa = numa;
  options.use_smt = use_smt;
  Result<Topology> topology = Topology::Detect(options);
  EXPECT_TRUE(testing::IsOk(topology));
  Result<Placement> placement = PlaceWorkers(*topology, options);
  EXPECT_TRUE(testing::IsOk(placement));
  std::vector<int> counts;
  for (int n = 0; n < placement->num_nodes(); ++n) {
    const auto i = static_cast<size_t>(n);
    counts.push_back(placement->first_worker[i + 1] -
                     placement->first_worker[i]);
  }
  return counts;
}

TEST(PlacementTest, SpreadsWorkersOverNodesByTheirCores) {
  const std::string two = "numa:2 core:4 pu:2";
  using Counts = std::vector<int>;
  EXPECT_EQ(WorkersOfNodes(two, 0, NumaPolicy::kAuto, false), (Counts{4, 4}));
  EXPECT_EQ(WorkersOfNodes(two, 0, NumaPolicy::kAuto, true), (Counts{8, 8}));
  EXPECT_EQ(WorkersOfNodes(two, 0, NumaPolicy::kOff, false), (Counts{8}));
  EXPECT_EQ(WorkersOfNodes(two, 3, NumaPolicy::kAuto, false), (Counts{2, 1}));
  EXPECT_EQ(WorkersOfNodes(two, 1, NumaPolicy::kAuto, false), (Counts{1}));
  EXPECT_EQ(WorkersOfNodes(two, 20, NumaPolicy::kAuto, false),
            (Counts{10, 10}));
}

TEST(PlacementTest, FewWorkersAreSpreadOverCoresAndManyTakeSiblings) {
  RuntimeOptions options;
  options.topology = "numa:1 core:4 pu:2";
  Result<Topology> topology = Topology::Detect(options);
  VARLANE_ASSERT_OK(topology);
  const auto pus = [&](int num_threads) {
    options.num_threads = num_threads;
    return PlaceWorkers(*topology, options)->pu_of_worker;
  };
  EXPECT_EQ(pus(0), (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(pus(2), (std::vector<int>{0, 4}));
  EXPECT_EQ(pus(6), (std::vector<int>{0, 2, 4, 6, 1, 3}));
  EXPECT_EQ(pus(9), (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7, 0}));
}

TEST(PlacementTest, RefusesAThreadCountThatCannotBe) {
  RuntimeOptions options;
  options.num_threads = -1;
  const Status negative = Runtime::Create(options).status();
  EXPECT_EQ(negative.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(negative.message().find("num_threads = -1"),
            std::string_view::npos);
  options.num_threads = kMaxWorkers + 1;
  EXPECT_EQ(Runtime::Create(options).status().code(),
            StatusCode::kInvalidArgument);
}

// Sets a variable for a scope.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const char* value) : name_(name) {
    setenv(name, value, 1);
  }
  ~ScopedEnv() { unsetenv(name_); }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  const char* name_;
};

TEST(RuntimeOptionsTest, EveryVariableReachesItsOption) {
  const ScopedEnv threads("VARLANE_THREADS", "3");
  const ScopedEnv smt("VARLANE_SMT", "1");
  const ScopedEnv pin("VARLANE_PIN", "0");
  const ScopedEnv numa("VARLANE_NUMA", "l3");
  const ScopedEnv pages("VARLANE_HUGE_PAGES", "explicit");
  const ScopedEnv simd("VARLANE_SIMD", "AVX2");
  const ScopedEnv topology("VARLANE_TOPOLOGY", "numa:2 core:2 pu:1");
  Result<RuntimeOptions> options = RuntimeOptions::FromEnvironment();
  VARLANE_ASSERT_OK(options);
  EXPECT_EQ(options->num_threads, 3);
  EXPECT_TRUE(options->use_smt);
  EXPECT_FALSE(options->pin);
  EXPECT_EQ(options->numa, NumaPolicy::kL3);
  EXPECT_EQ(options->huge_pages, HugePages::kExplicit);
  EXPECT_EQ(options->simd_target, "AVX2");
  EXPECT_EQ(options->topology, "numa:2 core:2 pu:1");
}

TEST(RuntimeOptionsTest, WithoutVariablesTheDefaultsStand) {
  for (const char* name :
       {"VARLANE_THREADS", "VARLANE_SMT", "VARLANE_PIN", "VARLANE_NUMA",
        "VARLANE_HUGE_PAGES", "VARLANE_SIMD", "VARLANE_TOPOLOGY"}) {
    unsetenv(name);
  }
  Result<RuntimeOptions> options = RuntimeOptions::FromEnvironment();
  VARLANE_ASSERT_OK(options);
  const RuntimeOptions defaults;
  EXPECT_EQ(options->num_threads, defaults.num_threads);
  EXPECT_EQ(options->pin, defaults.pin);
  EXPECT_EQ(options->huge_pages, defaults.huge_pages);
  EXPECT_EQ(options->topology, defaults.topology);
}

TEST(RuntimeOptionsTest, AMalformedVariableIsNamedWithItsValue) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"VARLANE_THREADS", "many"}, {"VARLANE_THREADS", "-2"},
      {"VARLANE_SMT", "maybe"},    {"VARLANE_PIN", "2"},
      {"VARLANE_NUMA", "on"},      {"VARLANE_HUGE_PAGES", "huge"}};
  for (const auto& [name, value] : cases) {
    const ScopedEnv variable(name, value);
    const Status status = RuntimeOptions::FromEnvironment().status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find(name), std::string_view::npos);
    EXPECT_NE(status.message().find(value), std::string_view::npos);
  }
}

}  // namespace
}  // namespace varlane
