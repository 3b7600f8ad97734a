// varlane bench numa: what memory of which node costs workers of which node.
//
// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <string>

#include "tools/bench_numa.h"
#include "tools/flags.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

struct BenchNumaFlags {
  BenchNumaOptions options;
  RuntimeFlags runtime;
  std::string json;
  std::string plot;
};

Status RunBenchNuma(BenchNumaFlags flags) {
  VARLANE_TOOLS_ASSIGN(flags.options.runtime,
                       MakeRuntimeOptions(flags.runtime));
  VARLANE_TOOLS_ASSIGN(const BenchNumaResult result, BenchNuma(flags.options));
  Json rows = Json::array();
  for (const BenchRow& row : result.rows) rows.push_back(ToJson(row));
  std::string text = fmt::format(
      "varlane bench numa: {} nodes, {} workers in {} arenas\n{}\n{}\n{}",
      result.machine["nodes"].size(), result.machine["workers"].get<int>(),
      result.machine["arenas"].get<int>(), RowsText(result.rows),
      MatrixText(result), ScalingText(result));
  for (const Json& warning : result.machine["warnings"]) {
    text += fmt::format("warning: {}\n", warning.get<std::string>());
  }
  VARLANE_TOOLS_TRY(Emit(text,
                         {{"machine", result.machine},
                          {"rows", rows},
                          {"matrix_bytes_per_s", result.matrix},
                          {"scaling_workers", result.workers},
                          {"scaling_bytes_per_s", result.scaling}},
                         flags.json));
  return flags.plot.empty() ? Status() : PlotNuma(result, flags.plot);
}

constexpr const char* kBenchNumaFooter =
    "Decode steps of 2048 tokens of context, or as many as --memory holds,\n"
    "over a pool with as much K/V on every node: all workers, once following\n"
    "homes and once not; KV heads sharded over the nodes, beside sequences at\n"
    "home; the workers of each node over the memory of each, and over blocks\n"
    "of all nodes in turn; more and more workers. \"local bytes\" is what the\n"
    "kernel says of the pool's pages.\n"
    "Examples:\n"
    "  varlane bench numa --quick\n"
    "  varlane bench numa --json numa.json --plot numa.svg";

}  // namespace

void AddBenchNumaCommand(CLI::App* bench, Run* run) {
  const auto flags = std::make_shared<BenchNumaFlags>();
  CLI::App* const command = bench->add_subcommand(
      "numa", "Local, remote and interleaved memory; scaling over cores");
  command->add_flag("--quick", flags->options.quick,
                    "Less K/V and fewer rounds: some seconds");
  command
      ->add_option("--seconds", flags->options.seconds,
                   "Time for each of its four parts; default 2, with --quick "
                   "0.5")
      ->check(CLI::Range(1e-6, 3600.0))
      ->type_name("S");
  AddBytesFlag(command, "--memory", &flags->options.node_bytes,
               "K/V on each node; default: 256 MiB, with --quick 64 MiB");
  command
      ->add_option("--plot", flags->plot,
                   "Picture of the curves, .svg or .png, by gnuplot")
      ->type_name("FILE");
  AddRuntimeFlags(command, &flags->runtime);
  AddJsonFlag(command, &flags->json);
  command->footer(kBenchNumaFooter);
  command->callback([flags, command, run] {
    if (flags->options.quick && command->count("--seconds") == 0) {
      flags->options.seconds = 0.5;
    }
    *run = [flags] { return RunBenchNuma(*flags); };
  });
}

}  // namespace varlane::tools
