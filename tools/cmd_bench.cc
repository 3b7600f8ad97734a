// varlane bench: this machine's limits, and how close we come.
//
// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <string>

#include "tools/benches.h"
#include "tools/flags.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

struct BenchFlags {
  BenchOptions options;
  RuntimeFlags runtime;
  std::string json;
};

std::string Summary(const std::vector<BenchRow>& rows) {
  int demanded = 0;
  int held = 0;
  int unknown = 0;
  for (const BenchRow& row : rows) {
    if (!row.must && !row.holds) continue;
    ++demanded;
    held += row.holds.value_or(false) ? 1 : 0;
    unknown += row.holds ? 0 : 1;
  }
  return fmt::format("{} demands: {} hold, {} do not, {} not measured\n",
                     demanded, held, demanded - held - unknown, unknown);
}

// One subcommand: its name and what it measures.
struct Bench {
  const char* name;
  Result<BenchResult> (*measure)(const BenchOptions&);
  bool takes_trace = false;
  bool attends = false;
};

Status RunBench(const Bench& bench, BenchFlags flags) {
  VARLANE_TOOLS_ASSIGN(flags.options.runtime,
                       MakeRuntimeOptions(flags.runtime));
  VARLANE_TOOLS_ASSIGN(const BenchResult result, bench.measure(flags.options));
  Json rows = Json::array();
  for (const BenchRow& row : result.rows) rows.push_back(ToJson(row));
  const std::string text = fmt::format(
      "varlane bench {}: {}, {} workers, {}; peaks {:.0f} GFLOP/s f32, "
      "{:.0f} bf16\n{}{}",
      bench.name, result.machine["cpu"].get<std::string>(),
      result.machine["workers"].get<int>(),
      result.machine["simd_target"].get<std::string>(),
      result.machine["f32_peak_gflop_per_s"].get<double>(),
      result.machine["bf16_peak_gflop_per_s"].get<double>(),
      RowsText(result.rows), Summary(result.rows));
  return Emit(text, {{"machine", result.machine}, {"rows", rows}}, flags.json);
}

constexpr const char* kKernelsFooter =
    "Each row is measured beside its limit, round after round in one process:\n"
    "plain reads of the same pages by the best of several loops, multiplies "
    "in\n"
    "registers, or whatever the row names. ratio is the median over rounds, "
    "+-\n"
    "its (p90 - p10) / median. A demand that does not hold is no error: the\n"
    "exit code says only whether the bench ran.\n"
    "--quick takes fewer rounds (five at least), does not repeat those that\n"
    "other processes disturbed, and leaves the rows of the largest pool and "
    "of\n"
    "the longest prefill to the full run.\n"
    "Examples:\n"
    "  varlane bench kernels --quick\n"
    "  varlane bench kernels --json kernels.json\n"
    "  varlane bench kernels --filter '^prefill.*bf16 16/4/128'";

constexpr const char* kMemoryFooter =
    "What the pool's bookkeeping costs, and how close it comes to the machine\n"
    "where it moves memory: the limit is the same done without a pool, in the\n"
    "same round. Threads that take blocks together are held against one that\n"
    "takes them alone: below 1 they would convoy. A demand that does not hold\n"
    "is no error: the exit code says only whether the bench ran.\n"
    "Examples:\n"
    "  varlane bench memory --quick\n"
    "  varlane bench memory --json memory.json\n"
    "  varlane bench memory --filter '^take'\n"
    "  varlane bench memory --filter '^prefix' --trace requests.jsonl";

constexpr const char* kRuntimeFooter =
    "Graphs are held against the same launches one by one, tracing against "
    "the\n"
    "same launch without, a busy process on a worker's core against none.\n"
    "A demand that does not hold is no error: the exit code says only whether\n"
    "the bench ran.\n"
    "Examples:\n"
    "  varlane bench runtime --quick\n"
    "  varlane bench runtime --json runtime.json\n"
    "  varlane bench runtime --filter '^28'";

void AddOneBench(CLI::App* bench, const Bench& what, const char* help,
                 const char* quick_help, const char* footer, Run* run) {
  const auto flags = std::make_shared<BenchFlags>();
  CLI::App* const command = bench->add_subcommand(what.name, help);
  command->add_flag("--quick", flags->options.quick, quick_help);
  command
      ->add_option("--filter", flags->options.filter,
                   "Only rows whose name matches")
      ->type_name("REGEX");
  command
      ->add_option("--seconds", flags->options.seconds,
                   "Time for a row, as far as seven rounds allow (five with "
                   "--quick); default 1, with --quick 0.4")
      ->check(CLI::Range(1e-6, 3600.0))
      ->type_name("S");
  AddBytesFlag(command, "--memory", &flags->options.memory_bytes,
               "Largest pool; default: three quarters of what is available");
  if (what.attends) {
    AddHeadsTogetherFlag(command, &flags->options.kv_heads_per_threadgroup);
  }
  if (what.takes_trace) {
    command->add_option("--trace", flags->options.trace,
                        "Also tell the prefix hits of a trace with hash_ids");
  }
  AddRuntimeFlags(command, &flags->runtime);
  AddJsonFlag(command, &flags->json);
  command->footer(footer);
  command->callback([flags, command, run, what] {
    if (flags->options.quick && command->count("--seconds") == 0) {
      flags->options.seconds = 0.4;
    }
    *run = [flags, what] { return RunBench(what, *flags); };
  });
}

}  // namespace

void AddBenchCommand(CLI::App* app, Run* run) {
  CLI::App* const bench =
      app->add_subcommand("bench", "Measure against this machine's limits");
  bench->require_subcommand(1);
  bench->footer(
      "Examples:\n  varlane bench kernels --quick\n"
      "  varlane bench memory --quick\n"
      "  varlane bench runtime --quick");
  AddOneBench(
      bench, {.name = "kernels", .measure = &BenchKernels, .attends = true},
      "Attention launches beside read bandwidth and multiply peak",
      "Only 16/4/128 heads and bf16: under a minute", kKernelsFooter, run);
  AddOneBench(bench,
              {.name = "memory", .measure = &BenchMemory, .takes_trace = true},
              "Blocks, forks, resizing, pressure",
              "Fewer rounds: under a minute", kMemoryFooter, run);
  AddOneBench(bench, {"runtime", &BenchRuntime},
              "Launches, graphs, tracing, and a runtime that shares its cores",
              "Fewer rounds", kRuntimeFooter, run);
  AddBenchNumaCommand(bench, run);
}

}  // namespace varlane::tools
