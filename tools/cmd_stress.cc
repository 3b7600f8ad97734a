// varlane stress: a trace under memory pressure, verified to the bit.
//
// SPDX-License-Identifier: Apache-2.0

#include <initializer_list>
#include <memory>
#include <string>

#include "tools/flags.h"
#include "tools/status_util.h"
#include "tools/stress.h"
#include "tools/synthetic_trace.h"
#include "tools/trace.h"

namespace varlane::tools {
namespace {

struct StressFlags {
  std::string file;
  int64_t max_requests = 0;
  ModelFlags model;
  StressOptions options;
  double minutes = 0;
  RuntimeFlags runtime;
  std::string json;
};

template <typename T>
struct Named {
  const char* name;
  T value;
};

template <typename T>
Result<T> FindNamed(std::initializer_list<Named<T>> all,
                    const std::string& text) {
  std::string names;
  for (const Named<T>& one : all) {
    if (text == one.name) return one.value;
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  return BadArgument("\"{}\" is none of {}", text, names);
}

Result<StressMode> ParseMode(const std::string& text) {
  return FindNamed<StressMode>({{"auto", StressMode::kAuto},
                                {"cgroup", StressMode::kCgroup},
                                {"rlimit", StressMode::kRlimit},
                                {"schedule", StressMode::kSchedule}},
                               text);
}

Result<EvictionPolicy> ParseEviction(const std::string& text) {
  return FindNamed<EvictionPolicy>({{"cost", EvictionPolicy::kByCost},
                                    {"swap", EvictionPolicy::kSwap},
                                    {"recompute", EvictionPolicy::kRecompute}},
                                   text);
}

Result<Trace> GetTrace(const StressFlags& flags) {
  if (!flags.file.empty()) return ReadTrace(flags.file, flags.max_requests);
  SyntheticTraceOptions options;
  if (flags.max_requests > 0) options.requests = flags.max_requests;
  return MakeSyntheticTrace(options);
}

Status RunStressCommand(StressFlags flags) {
  StressOptions& options = flags.options;
  if (flags.minutes > 0) options.seconds = flags.minutes * 60;
  VARLANE_TOOLS_ASSIGN(options.model, ResolveModel(flags.model));
  VARLANE_TOOLS_ASSIGN(options.runtime, MakeRuntimeOptions(flags.runtime));
  VARLANE_TOOLS_ASSIGN(const Trace trace, GetTrace(flags));
  VARLANE_TOOLS_ASSIGN(const Workload workload, Workload::Create(trace, 1));
  return RunStress(options, workload,
                   fmt::format("varlane stress: {}\n", trace.source),
                   flags.json);
}

void AddPressureFlags(CLI::App* command, StressFlags* flags) {
  StressOptions* const options = &flags->options;
  AddParsedOption(command, "--mode", &options->mode, ParseMode,
                  "Where the pressure comes from: auto (default), cgroup, "
                  "rlimit or schedule")
      ->type_name("MODE");
  AddBytesFlag(command, "--limit", &options->limit_bytes,
               "cgroup, rlimit: what pool, process and ballast share (default "
               "512MiB)");
  command
      ->add_option("--rest-seconds", options->ballast.rest_s,
                   "cgroup, rlimit: the ballast's pause between two waves")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str()
      ->type_name("S");
  CLI::Option* const seconds =
      command
          ->add_option("--seconds", options->seconds,
                       "How long; the round under way ends after it")
          ->check(CLI::Range(0.0, 1e7))
          ->capture_default_str()
          ->type_name("S");
  command->add_option("--minutes", flags->minutes, "The same in minutes")
      ->check(CLI::Range(0.0, 1e5))
      ->excludes(seconds)
      ->type_name("M");
  command->add_option("--seed", options->seed, "Of all that is random")
      ->capture_default_str();
  command
      ->add_option("--min-shrinks", options->min_shrinks,
                   "Fewer of them are a failure")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--period", options->period,
                   "schedule: steps between two changes of the limit")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("STEPS");
  command
      ->add_option("--hang-seconds", options->hang_seconds,
                   "So long without a step is a failure")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str()
      ->type_name("S");
}

void AddServingFlags(CLI::App* command, StressFlags* flags) {
  StressOptions* const options = &flags->options;
  StressEngineOptions* const engine = &options->engine;
  command
      ->add_option("--concurrency", engine->concurrency, "Requests in flight")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--token-budget", engine->token_budget,
                   "Query tokens of a step")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--kv-blocks", options->kv_blocks,
                   "Blocks of the pool; default: what the trace can hold at "
                   "once, within the memory budget")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
      ->type_name("N");
  command->add_option("--block-size", options->block_size, "Tokens of a block")
      ->check(CLI::IsMember({16, 32, 64, 128, 256}))
      ->capture_default_str();
  AddDTypeFlag(command, "--kv-dtype", &options->kv_dtype,
               "Elements of the cache: bf16 (default), f32 or f16");
  AddShardHeadsFlag(command, &engine->shard_heads);
  AddBytesFlag(command, "--swap", &engine->swap_bytes,
               "Disk space for preempted sequences (default 256MiB; 0 = they "
               "are computed again)");
  command
      ->add_option("--swap-folder", engine->swap_folder,
                   "Where the swap file is made")
      ->capture_default_str()
      ->type_name("DIR");
  AddParsedOption(command, "--eviction", &engine->eviction, ParseEviction,
                  "What a preemption does: the cheaper way (cost, default), "
                  "swap or recompute")
      ->type_name("WAY");
}

constexpr const char* kStressFooter =
    "The trace is served once in peace, then again and again on the same pool\n"
    "while memory is short and plentiful by turns:\n"
    "  cgroup    a ballast process takes memory in waves, in one memory "
    "cgroup\n"
    "            with the pool, which answers to pressure as a service's does\n"
    "  rlimit    the same in one process, under RLIMIT_DATA\n"
    "  schedule  the pool's limit is set every few steps: down to a random\n"
    "            size, the least being what the longest request needs, and up\n"
    "Every output row of every layer must have the bits of the first round,\n"
    "every block must come back at each round's end, what the pool gives back\n"
    "must leave the resident set, and the pool must have its full size again\n"
    "in the end. auto takes a cgroup where it can be made, else RLIMIT_DATA.\n"
    "All runs in a child process: being killed or hung is a\n"
    "failure like any other. Exit code 1 on any failure.\n"
    "Examples:\n"
    "  varlane stress --minutes 10 --min-shrinks 20 --json stress.json\n"
    "  varlane stress --kv-blocks 300 --eviction swap\n"
    "  varlane stress trace.csv --requests 200 --layers 4";

}  // namespace

void AddStressCommand(CLI::App* app, Run* run) {
  const auto flags = std::make_shared<StressFlags>();
  CLI::App* const command = app->add_subcommand(
      "stress",
      "Serve a trace while memory is short by turns, and compare every output "
      "bit for bit");
  command->add_option("TRACE", flags->file,
                      "As replay's; default: the synthetic trace");
  command
      ->add_option("--requests", flags->max_requests,
                   "Only the first N requests; 0 = all")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  flags->model.model = "Qwen3-0.6B";
  flags->model.layers = 2;
  AddModelFlags(command, &flags->model);
  StressEngineOptions* const engine = &flags->options.engine;
  engine->token_budget = 1024;
  engine->swap_bytes = int64_t{256} << 20;
  engine->swap_folder = "/var/tmp";
  AddPressureFlags(command, flags.get());
  AddServingFlags(command, flags.get());
  AddRuntimeFlags(command, &flags->runtime);
  AddJsonFlag(command, &flags->json);
  command->footer(kStressFooter);
  command->callback(
      [flags, run] { *run = [flags] { return RunStressCommand(*flags); }; });
}

}  // namespace varlane::tools
