// varlane trace: writes the synthetic trace that `replay --demo` runs, or tells
// what a prefix cache would find of a trace.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tools/flags.h"
#include "tools/parse.h"
#include "tools/prefix_hits.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/status_util.h"
#include "tools/synthetic_trace.h"

namespace varlane::tools {
namespace {

// "all" in --capacity: one block for each different hash_id.
constexpr int64_t kAllBlocks = 0;

struct TraceFlags {
  SyntheticTraceOptions options;
  TraceFormat format = TraceFormat::kAzureCsv;
  std::string out = "-";
  std::string prefix_hits;  // a trace to read
  std::vector<int64_t> capacities = {1000,   3000,    10'000,    30'000,
                                     50'000, 100'000, kAllBlocks};
  std::string json;
};

Status WriteTo(const Trace& trace, const TraceFlags& flags) {
  if (flags.out == "-") return WriteTrace(trace, flags.format, std::cout);
  std::ofstream file(flags.out, std::ios::binary | std::ios::trunc);
  if (!file) {
    return Fail(StatusCode::kUnavailable, "{} cannot be written", flags.out);
  }
  return WriteTrace(trace, flags.format, file);
}

Status RunTrace(const TraceFlags& flags) {
  VARLANE_TOOLS_ASSIGN(const Trace trace, MakeSyntheticTrace(flags.options));
  VARLANE_TOOLS_TRY(WriteTo(trace, flags));
  std::vector<double> inputs;
  std::vector<double> outputs;
  int64_t input_sum = 0;
  int64_t output_sum = 0;
  for (const TraceRequest& request : trace.requests) {
    input_sum += request.input_tokens;
    output_sum += request.output_tokens;
    inputs.push_back(static_cast<double>(request.input_tokens));
    outputs.push_back(static_cast<double>(request.output_tokens));
  }
  const double span =
      static_cast<double>(trace.requests.back().arrival_ns) * 1e-9;
  const Json json = {{"source", trace.source},
                     {"format", TraceFormatName(flags.format)},
                     {"file", flags.out},
                     {"requests", trace.requests.size()},
                     {"seconds", span},
                     {"input_tokens", input_sum},
                     {"output_tokens", output_sum},
                     {"input", ToJson(ComputePercentiles(inputs))},
                     {"output", ToJson(ComputePercentiles(outputs))}};
  if (flags.out == "-") {  // stdout is the trace's
    return flags.json.empty() ? Status() : Emit("", json, flags.json);
  }
  return Emit(fmt::format("{}: {} requests over {:.1f} s, {} prompt and {} "
                          "generated tokens ({})\n",
                          flags.out, trace.requests.size(), span,
                          FormatCount(input_sum), FormatCount(output_sum),
                          TraceFormatName(flags.format)),
              json, flags.json);
}

// --- what a prefix cache would find ------------------------------------------

// "1000", "30k" (30,000), "2M" or "all".
Result<int64_t> ParseCapacity(std::string_view text) {
  if (text == "all") return kAllBlocks;
  std::string_view digits = text;
  int64_t unit = 1;
  if (text.ends_with('k')) unit = 1000;
  if (text.ends_with('M')) unit = 1'000'000;
  if (unit > 1) digits.remove_suffix(1);
  constexpr int64_t kMost = int64_t{1} << 30;
  const std::optional<int64_t> count = ParseNumber<int64_t>(digits);
  if (!count || *count < 1 || *count > kMost / unit) {
    return BadArgument(
        "\"{}\" is not a number of blocks: 1 to {}, as in 30k, "
        "or all",
        text, kMost);
  }
  return *count * unit;
}

Result<std::vector<int64_t>> ParseCapacities(std::string_view text) {
  std::vector<int64_t> capacities;
  for (;;) {
    const size_t comma = text.find(',');
    VARLANE_TOOLS_ASSIGN(const int64_t capacity,
                         ParseCapacity(text.substr(0, comma)));
    capacities.push_back(capacity);
    if (comma == std::string_view::npos) return capacities;
    text.remove_prefix(comma + 1);
  }
}

Json ToJson(const PrefixHits& hits) {
  return {{"capacity_blocks", hits.capacity_blocks},
          {"blocks", hits.blocks},
          {"hit_blocks", hits.hit_blocks},
          {"hit_rate", hits.rate()},
          {"evicted_blocks", hits.evicted_blocks},
          {"too_large_requests", hits.too_large_requests},
          {"seconds", hits.seconds}};
}

Status RunPrefixHits(const TraceFlags& flags) {
  VARLANE_TOOLS_ASSIGN(const Trace trace, ReadTrace(flags.prefix_hits, 0));
  VARLANE_TOOLS_ASSIGN(RuntimeOptions options, MakeRuntimeOptions({}));
  options.num_threads = 1;
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Runtime> runtime,
                       Runtime::Create(options));
  const int64_t distinct = DistinctHashIds(trace);
  Table table({Table::Align::kRight});
  table.AddRow({"capacity", "hit rate", "hit blocks", "evicted", "too large"});
  Json rows = Json::array();
  int64_t blocks = 0;
  Progress progress("prefix hits");
  for (const int64_t capacity : flags.capacities) {
    progress.Update(static_cast<double>(rows.size()),
                    static_cast<double>(flags.capacities.size()), "");
    VARLANE_TOOLS_ASSIGN(
        const PrefixHits hits,
        MeasurePrefixHits(trace, capacity == kAllBlocks ? distinct : capacity,
                          runtime.get()));
    blocks = hits.blocks;
    table.AddRow(
        {capacity == kAllBlocks ? "all" : FormatCount(hits.capacity_blocks),
         fmt::format("{:.2f}%", 100 * hits.rate()),
         FormatCount(hits.hit_blocks), FormatCount(hits.evicted_blocks),
         FormatCount(hits.too_large_requests)});
    rows.push_back(ToJson(hits));
  }
  const std::string text = fmt::format(
      "{} ({}): {} requests, {} blocks of {} tokens, {} of them different\n{}",
      trace.source, TraceFormatName(trace.format),
      FormatCount(std::ssize(trace.requests)), FormatCount(blocks),
      kHashBlockTokens, FormatCount(distinct), table.ToString());
  return Emit(text,
              {{"source", trace.source},
               {"requests", trace.requests.size()},
               {"blocks", blocks},
               {"block_tokens", kHashBlockTokens},
               {"distinct_blocks", distinct},
               {"rows", rows}},
              flags.json);
}

// --- options -----------------------------------------------------------------

void AddPrefixFlags(CLI::App* command, TraceFlags* flags) {
  auto* const file =
      command
          ->add_option("--prefix-hits", flags->prefix_hits,
                       "Write nothing; read this trace (Mooncake JSONL) and "
                       "tell what share of its blocks a pool's prefix cache "
                       "finds, requests one after another")
          ->type_name("FILE");
  AddParsedOption(command, "--capacity", &flags->capacities, ParseCapacities,
                  "With --prefix-hits: blocks of the pool, one hash_id a "
                  "block; default 1k,3k,10k,30k,50k,100k,all")
      ->type_name("LIST")
      ->needs(file);
}

void AddShapeFlags(CLI::App* command, SyntheticTraceOptions* options) {
  const auto add = [command](const char* name, auto* value, const char* help) {
    command->add_option(name, *value, help)->capture_default_str();
  };
  add("--requests", &options->requests, "How many requests");
  add("--seed", &options->seed, "The same seed makes the same trace");
  add("--rate", &options->rate, "Mean arrivals a second (Poisson)");
  add("--input-median", &options->input_median,
      "Median prompt tokens (log-normal)");
  add("--input-sigma", &options->input_sigma,
      "Standard deviation of ln(prompt tokens)");
  add("--max-input", &options->max_input, "Longer prompts are cut to this");
  add("--output-median", &options->output_median,
      "Median generated tokens (log-normal)");
  add("--output-sigma", &options->output_sigma,
      "Standard deviation of ln(generated tokens)");
  add("--max-output", &options->max_output, "Longer answers are cut to this");
  add("--shared-share", &options->shared_share,
      "Share of requests that start with a system prompt: if their prompt has "
      "512 tokens or more, its first hash_id is one of the shared ones");
  add("--system-prompts", &options->system_prompts,
      "How many different system prompts");
}

}  // namespace

void AddTraceCommand(CLI::App* app, Run* run) {
  const auto flags = std::make_shared<TraceFlags>();
  CLI::App* const command = app->add_subcommand(
      "trace",
      "Write a synthetic chat-shaped serving trace; the defaults are the trace "
      "of `varlane replay --demo`. With --prefix-hits: tell how often the "
      "prefix cache finds the blocks of a trace");
  const auto format = [](const std::string& text) -> Result<TraceFormat> {
    if (text == "azure") return TraceFormat::kAzureCsv;
    if (text == "mooncake") return TraceFormat::kMooncakeJsonl;
    return BadArgument("\"{}\" is not azure or mooncake", text);
  };
  AddParsedOption(command, "--format", &flags->format, format,
                  "azure (CSV, default) or mooncake (JSONL with hash_ids)")
      ->type_name("NAME");
  command->add_option("--out", flags->out, "Where to; \"-\" = stdout")
      ->capture_default_str()
      ->type_name("FILE");
  AddShapeFlags(command, &flags->options);
  AddPrefixFlags(command, flags.get());
  AddJsonFlag(command, &flags->json);
  command->footer(
      "Examples:\n"
      "  varlane trace --out demo.csv\n"
      "  varlane trace --format mooncake --requests 1000 --out long.jsonl\n"
      "  varlane trace --out bursty.csv --rate 50 && varlane replay bursty.csv "
      "--rate 1\n"
      "  varlane trace --prefix-hits mooncake_conversation_trace.jsonl "
      "--capacity 10k,all");
  command->callback([flags, run] {
    if (!flags->prefix_hits.empty()) {
      *run = [flags] { return RunPrefixHits(*flags); };
      return;
    }
    if (flags->out == "-" && flags->json == "-") {
      ThrowUsage("--json - and the trace cannot both go to stdout: give --out");
    }
    *run = [flags] { return RunTrace(*flags); };
  });
}

}  // namespace varlane::tools
