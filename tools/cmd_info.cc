// varlane info: this machine as the runtime will use it.
//
// SPDX-License-Identifier: Apache-2.0

#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "tools/flags.h"
#include "tools/parse.h"
#include "tools/report.h"
#include "tools/status_util.h"
#include "varlane/attention.h"
#include "varlane/environment.h"
#include "varlane/memory_budget.h"
#include "varlane/runtime.h"
#include "varlane/version.h"

namespace varlane::tools {
namespace {

using Align = Table::Align;

struct InfoFlags {
  RuntimeFlags runtime;
  std::string json;
  std::string memory_root;
};

// What /proc/cpuinfo says, cut to what matters to SIMD code.
struct Cpu {
  std::string name;
  std::vector<std::string> features;
};

Cpu ReadCpu() {
  static const std::set<std::string> kRelevant = {
      "sse4_2",      "avx",         "f16c",        "fma",        "avx2",
      "avx_vnni",    "avx512f",     "avx512bw",    "avx512dq",   "avx512vl",
      "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512vbmi", "amx_tile",
      "amx_bf16",    "amx_int8",    "asimd",       "asimdhp",    "asimddp",
      "sve",         "sve2",        "bf16",        "i8mm"};
  Cpu cpu;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string value =
        colon + 2 <= line.size() ? line.substr(colon + 2) : "";
    if (line.rfind("model name", 0) == 0) cpu.name = value;
    if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) {
      std::istringstream words(value);
      for (std::string word; words >> word;) {
        if (kRelevant.count(word) != 0) cpu.features.push_back(word);
      }
    }
  }
  return cpu;
}

std::string PusOf(const Core& core) {
  return fmt::format("{}", fmt::join(core.pus, "+"));
}

std::string Join(const std::vector<std::string>& words) {
  return words.empty() ? "none" : fmt::format("{}", fmt::join(words, " "));
}

std::string DescribeCaches(const std::vector<Cache>& caches) {
  if (caches.empty()) return "none shown";
  return fmt::format("{} x {}", caches.size(),
                     FormatBytes(caches.front().size_bytes));
}

std::string TopologyText(const Runtime& runtime) {
  const Topology& topology = runtime.topology();
  Table table({Align::kLeft});
  table.AddRow({"source", topology.source});
  table.AddRow(
      {"hardware threads", fmt::format("{} of {} may be used", topology.num_pus,
                                       topology.num_pus_machine)});
  table.AddRow(
      {"cores", fmt::format("{} in {} package(s)", topology.cores.size(),
                            topology.num_packages)});
  table.AddRow({"L3", DescribeCaches(topology.l3)});
  table.AddRow({"L2", DescribeCaches(topology.l2)});
  for (const NumaNode& node : topology.nodes) {
    table.AddRow({fmt::format("NUMA node {}", node.os_index),
                  fmt::format("{} cores, {}", node.cores.size(),
                              FormatBytes(node.memory_bytes))});
  }
  for (const PageSize& page : topology.page_sizes) {
    std::string pages = FormatBytes(page.bytes);
    if (page.total > 0) {
      pages +=
          fmt::format(", {} of {} explicit pages free", page.free, page.total);
    }
    table.AddRow({"page size", pages});
  }
  table.AddRow(
      {"transparent huge pages", topology.transparent_huge_pages.empty()
                                     ? "unknown"
                                     : topology.transparent_huge_pages});
  std::string text = "Topology\n" + table.ToString();
  for (const std::string& warning : topology.warnings) {
    text += "  warning: " + warning + "\n";
  }
  return text;
}

// The system's index of the NUMA node whose memory an arena uses; -1: of all.
int MemoryIndexOf(const Runtime& runtime, int arena) {
  const int memory = runtime.MemoryOfNode(arena);
  const auto& nodes = runtime.topology().nodes;
  return memory < 0 ? -1 : nodes[static_cast<size_t>(memory)].os_index;
}

std::string ArenaText(const Runtime& runtime, int arena) {
  const int memory = MemoryIndexOf(runtime, arena);
  return memory < 0 ? fmt::format("arena {}", arena)
                    : fmt::format("arena {} on NUMA node {}", arena, memory);
}

std::string WorkersText(const Runtime& runtime) {
  const Topology& topology = runtime.topology();
  Table table({Align::kLeft});
  for (int w = 0; w < runtime.num_workers(); ++w) {
    const int pu = runtime.PuOfWorker(w);
    std::string siblings;
    for (const Core& core : topology.cores) {
      for (const int sibling : core.pus) {
        if (sibling == pu) siblings = "core of hardware threads " + PusOf(core);
      }
    }
    table.AddRow({fmt::format("worker {}", w),
                  ArenaText(runtime, runtime.NodeOfWorker(w)),
                  pu < 0 ? "not pinned"
                         : fmt::format("pinned to hardware thread {}", pu),
                  siblings});
  }
  return fmt::format("Workers: {} in {} arena(s)\n{}", runtime.num_workers(),
                     runtime.num_nodes(), table.ToString());
}

std::string LimitsText(const MemoryLimits& limits) {
  Table table({Align::kLeft, Align::kRight, Align::kRight, Align::kRight,
               Align::kLeft});
  table.AddRow({"", "limit", "used", "available", ""});
  for (size_t i = 0; i < limits.limits.size(); ++i) {
    const MemoryLimit& limit = limits.limits[i];
    std::string note;
    if (static_cast<int>(i) == limits.binding_total) note = "binds the total";
    if (static_cast<int>(i) == limits.binding_available) {
      note +=
          note.empty() ? "binds what is available" : " and what is available";
    }
    table.AddRow({limit.name, FormatBytes(limit.limit_bytes),
                  FormatBytes(limit.used_bytes),
                  FormatBytes(limit.available_bytes), note});
  }
  std::string text = "Memory limits\n" + table.ToString();
  for (const std::string& warning : limits.warnings) {
    text += "  warning: " + warning + "\n";
  }
  return text;
}

std::string EnvironmentText() {
  Table table({Align::kLeft});
  for (const EnvVariable& variable : EnvironmentVariables()) {
    const std::string value = EnvironmentValue(variable);
    table.AddRow({variable.name,
                  value.empty() ? variable.default_value : value + " (set)",
                  variable.meaning});
  }
  return "Environment variables\n" + table.ToString();
}

Json CachesToJson(const std::vector<Cache>& caches) {
  Json json = Json::array();
  for (const Cache& cache : caches) {
    json.push_back({{"size_bytes", cache.size_bytes}, {"cores", cache.cores}});
  }
  return json;
}

Json TopologyToJson(const Topology& topology) {
  Json nodes = Json::array();
  for (const NumaNode& node : topology.nodes) {
    nodes.push_back({{"os_index", node.os_index},
                     {"memory_bytes", node.memory_bytes},
                     {"cores", node.cores}});
  }
  Json cores = Json::array();
  for (const Core& core : topology.cores) {
    cores.push_back({{"package", core.package},
                     {"node", core.node},
                     {"l3", core.l3},
                     {"l2", core.l2},
                     {"pus", core.pus}});
  }
  Json pages = Json::array();
  for (const PageSize& page : topology.page_sizes) {
    pages.push_back(
        {{"bytes", page.bytes}, {"total", page.total}, {"free", page.free}});
  }
  return {{"source", topology.source},
          {"packages", topology.num_packages},
          {"hardware_threads", topology.num_pus},
          {"hardware_threads_of_machine", topology.num_pus_machine},
          {"nodes", nodes},
          {"cores", cores},
          {"l3", CachesToJson(topology.l3)},
          {"l2", CachesToJson(topology.l2)},
          {"page_sizes", pages},
          {"transparent_huge_pages", topology.transparent_huge_pages},
          {"warnings", topology.warnings}};
}

Json WorkersToJson(const Runtime& runtime) {
  Json json = Json::array();
  for (int w = 0; w < runtime.num_workers(); ++w) {
    const int arena = runtime.NodeOfWorker(w);
    json.push_back({{"arena", arena},
                    {"numa_node", MemoryIndexOf(runtime, arena)},
                    {"hardware_thread", runtime.PuOfWorker(w)}});
  }
  return json;
}

Json LimitsToJson(const MemoryLimits& limits) {
  Json list = Json::array();
  for (const MemoryLimit& limit : limits.limits) {
    list.push_back({{"name", limit.name},
                    {"limit_bytes", limit.limit_bytes},
                    {"used_bytes", limit.used_bytes},
                    {"available_bytes", limit.available_bytes}});
  }
  return {{"total_bytes", limits.total_bytes},
          {"available_bytes", limits.available_bytes},
          {"binding_total", limits.binding_total},
          {"binding_available", limits.binding_available},
          {"limits", list},
          {"warnings", limits.warnings}};
}

Json EnvironmentToJson() {
  Json json = Json::array();
  for (const EnvVariable& variable : EnvironmentVariables()) {
    json.push_back({{"name", variable.name},
                    {"value", EnvironmentValue(variable)},
                    {"default", variable.default_value},
                    {"meaning", variable.meaning}});
  }
  return json;
}

Status RunInfo(const InfoFlags& flags) {
  VARLANE_TOOLS_ASSIGN(const RuntimeOptions options,
                       MakeRuntimeOptions(flags.runtime));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Runtime> runtime,
                       Runtime::Create(options));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Attention> attention,
                       Attention::Create(runtime.get()));
  VARLANE_TOOLS_ASSIGN(const MemoryLimits limits,
                       MemoryLimits::Detect(flags.memory_root));
  const Cpu cpu = ReadCpu();
  const std::vector<std::string> targets = SupportedSimdTargets();

  Table simd({Align::kLeft});
  simd.AddRow({"CPU", cpu.name.empty() ? "unknown" : cpu.name});
  simd.AddRow({"instruction sets", Join(cpu.features)});
  simd.AddRow({"kernel tables", Join(targets) + " (best first)"});
  simd.AddRow({"chosen", attention->simd_target()});
  const std::string text =
      fmt::format("varlane {}\n\n{}\n{}\nSIMD\n{}\n{}\n{}", VersionString(),
                  TopologyText(*runtime), WorkersText(*runtime),
                  simd.ToString(), LimitsText(limits), EnvironmentText());
  const Json json = {{"version", VersionString()},
                     {"topology", TopologyToJson(runtime->topology())},
                     {"arenas", runtime->num_nodes()},
                     {"workers", WorkersToJson(*runtime)},
                     {"cpu", {{"name", cpu.name}, {"features", cpu.features}}},
                     {"simd_targets", targets},
                     {"simd_target", attention->simd_target()},
                     {"memory", LimitsToJson(limits)},
                     {"environment", EnvironmentToJson()}};
  return Emit(text, json, flags.json);
}

}  // namespace

void AddInfoCommand(CLI::App* app, Run* run) {
  const auto flags = std::make_shared<InfoFlags>();
  CLI::App* const command = app->add_subcommand(
      "info",
      "Show this machine as the runtime will use it: topology, workers, "
      "instruction sets, page sizes, memory limits, environment variables");
  AddRuntimeFlags(command, &flags->runtime);
  AddJsonFlag(command, &flags->json);
  command->add_option("--memory-root", flags->memory_root)->group("");
  command->footer(
      "Examples:\n"
      "  varlane info\n"
      "  varlane info --json info.json\n"
      "  VARLANE_TOPOLOGY=\"numa:2 core:4 pu:2\" varlane info\n"
      "  VARLANE_SIMD=AVX2 varlane info");
  command->callback(
      [flags, run] { *run = [flags] { return RunInfo(*flags); }; });
}

}  // namespace varlane::tools
