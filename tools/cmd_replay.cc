// varlane replay: a serving trace through the whole system.
//
// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <string>

#include "tools/flags.h"
#include "tools/parse.h"
#include "tools/replay.h"
#include "tools/report.h"
#include "tools/status_util.h"
#include "tools/synthetic_trace.h"
#include "tools/trace.h"
#include "tools/trace_file.h"

namespace varlane::tools {
namespace {

// What `--demo` verifies unless told otherwise.
constexpr double kDemoVerifyShare = 0.01;

struct ReplayFlags {
  std::string file;
  bool demo = false;
  int64_t max_requests = 0;
  double scale_lengths = 1;
  ModelFlags model;
  ReplayOptions options;
  RuntimeFlags runtime;
  std::string trace;
  std::string json;
};

Result<Trace> GetTrace(const ReplayFlags& flags) {
  if (!flags.demo) return ReadTrace(flags.file, flags.max_requests);
  SyntheticTraceOptions options;
  if (flags.max_requests > 0) options.requests = flags.max_requests;
  return MakeSyntheticTrace(options);
}

std::string Headline(const ReplayFlags& flags, const Trace& trace) {
  if (flags.demo) {
    return fmt::format(
        "varlane replay --demo: a chat-shaped trace made here ({}; `varlane "
        "trace`\nwrites it to a file). Every step is one ragged batch - "
        "decodes and prefill\nchunks together - and every layer one attention "
        "launch over the paged KV pool.\nQ, K and V are synthetic; {:g}% of "
        "the output rows are checked.\n",
        trace.source, flags.options.verify_share * 100);
  }
  std::string text = fmt::format("varlane replay: {} ({})\n", trace.source,
                                 TraceFormatName(trace.format));
  if (trace.skipped > 0) {
    text += fmt::format("  {} rows without a generated token were skipped\n",
                        FormatCount(trace.skipped));
  }
  return text;
}

Status RunReplayCommand(ReplayFlags flags) {
  VARLANE_TOOLS_ASSIGN(flags.options.model, ResolveModel(flags.model));
  VARLANE_TOOLS_ASSIGN(const Trace trace, GetTrace(flags));
  VARLANE_TOOLS_ASSIGN(const Workload workload,
                       Workload::Create(trace, flags.scale_lengths));
  VARLANE_TOOLS_ASSIGN(const RuntimeOptions runtime_options,
                       MakeRuntimeOptions(flags.runtime));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Runtime> runtime,
                       Runtime::Create(runtime_options));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<TraceFile> trace_file,
                       TraceFile::Start(flags.trace, runtime.get()));
  flags.options.tracer = trace_file->tracer();
  VARLANE_TOOLS_ASSIGN(const ReplayResult result,
                       RunReplay(flags.options, workload, runtime.get()));
  VARLANE_TOOLS_TRY(trace_file->Finish());
  Json json = {{"trace",
                {{"source", trace.source},
                 {"format", TraceFormatName(trace.format)},
                 {"skipped", trace.skipped},
                 {"scale_lengths", flags.scale_lengths}}}};
  json.update(ReplayJson(flags.options, workload, result));
  VARLANE_TOOLS_TRY(Emit(Headline(flags, trace) + "\n" +
                             ReplayText(flags.options, workload, result),
                         json, flags.json));
  if (result.verify.ok()) return {};
  return Fail(StatusCode::kInternal,
              "verification failed in {} of {} rows; first: {}",
              result.verify.failed_rows, result.verify.rows,
              result.verify.first_failure);
}

void AddTraceFlags(CLI::App* command, ReplayFlags* flags) {
  command->add_option("TRACE", flags->file,
                      "Azure LLM inference CSV, Mooncake JSONL or BurstGPT "
                      "CSV, told apart by content");
  command->add_flag("--demo", flags->demo,
                    "No file: run the synthetic trace of `varlane trace`, "
                    "verifying 1%");
  command
      ->add_option("--requests", flags->max_requests,
                   "Only the first N requests; 0 = all")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  AddParsedOption(command, "--scale-lengths", &flags->scale_lengths,
                  ParseFactor,
                  "Multiply all lengths, rounding up: 0.25 or 1/16 (default 1)")
      ->type_name("FACTOR");
}

void AddLoadFlags(CLI::App* command, ReplayOptions* options) {
  auto* const rate =
      command
          ->add_option("--rate", options->rate,
                       "Open loop: requests arrive as in the trace, with time "
                       "running this much faster")
          ->check(CLI::PositiveNumber)
          ->type_name("FACTOR");
  command
      ->add_option("--concurrency", options->concurrency,
                   "Closed loop: keep this many requests in flight")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("N")
      ->excludes(rate);
  command
      ->add_option("--token-budget", options->scheduler.token_budget,
                   "Query tokens of a step")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("TOKENS");
  command
      ->add_option("--max-seqs", options->scheduler.max_seqs,
                   "Requests running at once")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--max-chunk", options->scheduler.max_chunk,
                   "Prefill tokens of one request in a step; 0 = any")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("TOKENS");
}

void AddPoolFlags(CLI::App* command, ReplayOptions* options) {
  AddDTypeFlag(command, "--kv-dtype", &options->kv_dtype,
               "Elements of the cache: bf16 (default), f32 or f16");
  command
      ->add_option("--block-size", options->block_size,
                   "Tokens of a block: 16, 32, 64, 128 or 256")
      ->capture_default_str()
      ->type_name("N");
  auto* const blocks =
      command
          ->add_option("--kv-blocks", options->kv_blocks,
                       "Blocks of the pool; default: what the trace can hold "
                       "at once, within the memory budget")
          ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
          ->type_name("N");
  AddBytesFlag(command, "--kv-bytes", &options->kv_bytes,
               "Bytes of the pool, e.g. 2GiB")
      ->excludes(blocks);
  command
      ->add_option("--fraction", options->fraction,
                   "Share of all memory that pool, --weights and buffers may "
                   "take; default VARLANE_MEMORY_FRACTION, or what fits up to "
                   "0.9")
      ->check(CLI::Range(1e-6, 1.0))
      ->type_name("SHARE");
  AddBytesFlag(command, "--weights", &options->weights_bytes,
               "Memory to leave for a model's weights (default 0)");
  command->add_flag("--pressure", options->pressure,
                    "Listen for memory pressure, and shrink the pool, preempt "
                    "and refuse while there is some");
  command
      ->add_option("--metrics", options->metrics_file,
                   "Write the metrics to FILE as Prometheus' text, each second "
                   "and at the end")
      ->type_name("FILE");
  command->add_flag("!--no-prefix-cache", options->prefix_cache,
                    "Compute every prompt in full, also where the pool has its "
                    "first blocks already");
  command->add_option("--memory-root", options->memory_root)->group("");
}

constexpr const char* kReplayFooter =
    "Q, K and V are synthetic and a function of (request or hash_id, "
    "position,\n"
    "layer, head). Latencies and rates are on the serving clock: wall time\n"
    "without making inputs and verifying. TTFT counts from arrival.\n"
    "Prompts that begin with the same hash_ids share K/V through the pool's "
    "prefix\n"
    "cache; what is found is not computed, but what attends to it is "
    "verified.\n"
    "Exit code 1 when a row fails verification.\n"
    "Examples:\n"
    "  varlane replay --demo\n"
    "  varlane replay AzureLLMInferenceTrace_conv.csv --requests 200 --verify "
    "0.01\n"
    "  varlane replay mooncake_conversation_trace.jsonl --requests 100 "
    "--scale-lengths 1/16 --block-size 32\n"
    "  varlane replay trace.csv --rate 4 --model Llama-3.2-1B --layers 4 "
    "--json replay.json\n"
    "  varlane replay --demo --kv-blocks 256   (a pool so small that requests "
    "are preempted)";

void Check(const ReplayFlags& flags) {
  if (flags.file.empty() != flags.demo) {
    ThrowUsage("replay needs either TRACE or --demo");
  }
}

}  // namespace

void AddReplayCommand(CLI::App* app, Run* run) {
  const auto flags = std::make_shared<ReplayFlags>();
  CLI::App* const command = app->add_subcommand(
      "replay",
      "Run a serving trace through scheduler, KV pool and attention, one "
      "launch per layer and step, checked against a reference");
  AddTraceFlags(command, flags.get());
  flags->model.model = "Qwen3-0.6B";
  AddModelFlags(command, &flags->model);
  AddLoadFlags(command, &flags->options);
  AddPoolFlags(command, &flags->options);
  AddPlanOptionFlags(command, &flags->options.plan);
  AddShardHeadsFlag(command, &flags->options.shard_heads);
  AddRuntimeFlags(command, &flags->runtime);
  AddShareFlag(command, "--verify", &flags->options.verify_share,
               "Share of the output rows to recompute in double precision "
               "(default 0; 0.01 with --demo)");
  AddTraceFlag(command, &flags->trace);
  AddJsonFlag(command, &flags->json);
  command->footer(kReplayFooter);
  command->callback([flags, command, run] {
    Check(*flags);
    if (flags->demo && command->count("--verify") == 0) {
      flags->options.verify_share = kDemoVerifyShare;
    }
    *run = [flags] { return RunReplayCommand(*flags); };
  });
}

}  // namespace varlane::tools
