// varlane trace: writes the synthetic trace that `replay --demo` runs.
//
// SPDX-License-Identifier: Apache-2.0

#include <fstream>
#include <iostream>
#include <memory>
#include <string>

#include "tools/flags.h"
#include "tools/report.h"
#include "tools/status_util.h"
#include "tools/synthetic_trace.h"

namespace varlane::tools {
namespace {

struct TraceFlags {
  SyntheticTraceOptions options;
  TraceFormat format = TraceFormat::kAzureCsv;
  std::string out = "-";
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
      "of `varlane replay --demo`");
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
  AddJsonFlag(command, &flags->json);
  command->footer(
      "Examples:\n"
      "  varlane trace --out demo.csv\n"
      "  varlane trace --format mooncake --requests 1000 --out long.jsonl\n"
      "  varlane trace --out bursty.csv --rate 50 && varlane replay bursty.csv "
      "--rate 1");
  command->callback([flags, run] {
    if (flags->out == "-" && flags->json == "-") {
      ThrowUsage("--json - and the trace cannot both go to stdout: give --out");
    }
    *run = [flags] { return RunTrace(*flags); };
  });
}

}  // namespace varlane::tools
