// varlane attend: one launch on a captured or made batch.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <memory>
#include <string>

#include "tools/attend.h"
#include "tools/attention_case.h"
#include "tools/batch_spec.h"
#include "tools/flags.h"
#include "tools/parse.h"
#include "tools/report.h"
#include "tools/safetensors.h"
#include "tools/status_util.h"
#include "tools/trace_file.h"

namespace varlane::tools {
namespace {

using Align = Table::Align;

struct AttendFlags {
  std::string file;
  BatchSpec random;  // empty = from the file
  RandomCaseShape shape;
  bool kv_dtype_given = false;
  AttendOptions options;
  RuntimeFlags runtime;
  double verify = 0;
  std::string out;
  std::string trace;
  std::string json;

  bool is_random() const { return !random.q_lens.empty(); }
};

struct Timing {
  double min = 0;
  double median = 0;
};

Timing TimingOf(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2]};
}

// Per second of the median launch, in units of 1e9.
double GigaRate(int64_t amount, double seconds) {
  return seconds > 0 ? static_cast<double>(amount) / seconds * 1e-9 : 0;
}

Json VerifyToJson(const VerifyResult& verify) {
  return {{"rows", verify.rows},
          {"failed_rows", verify.failed_rows},
          {"worst_error_over_bound", verify.worst_ratio},
          {"worst_error", verify.worst_error},
          {"worst_lse_error", verify.worst_lse_error},
          {"first_failure", verify.first_failure}};
}

Json CaseToJson(const AttentionCase& c, const AttendOptions& options) {
  return {{"source", c.source},
          {"sequences", c.num_seqs()},
          {"total_q", c.q.tokens},
          {"total_kv", c.k.tokens},
          {"q_heads", c.q.heads},
          {"kv_heads", c.k.heads},
          {"head_size", c.q.head_size},
          {"v_head_size", c.v.head_size},
          {"scale", c.scale},
          {"causal", c.causal},
          {"window", c.window},
          {"softcap", c.softcap},
          {"alibi", !c.alibi_slopes.empty()},
          {"sinks", !c.sinks.empty()},
          {"kv_dtype", DTypeName(options.kv_dtype)},
          {"block_size", options.block_size},
          {"seed", options.seed}};
}

Json ResultToJson(const AttendOptions& options, const AttendResult& result,
                  int workers) {
  const LaunchReport& report = result.report;
  const Timing timing = TimingOf(result.seconds);
  Json json = {{"simd_target", result.simd_target},
               {"workers", workers},
               {"owner", OwnerPatternName(options.plan.owner)},
               {"partitions", PartitionModeName(options.plan.partitions)},
               {"spreads_partitions", result.spread},
               {"kv_heads_per_threadgroup", result.kv_heads_per_threadgroup},
               {"blocks", result.num_blocks},
               {"head_shards", result.num_shards},
               {"threadgroups", report.threadgroups},
               {"surplus_threadgroups", report.surplus_threadgroups},
               {"owner_searches", report.owner_searches},
               {"owner_lookups", report.owner_lookups},
               {"owner_planned", report.owner_planned},
               {"owner_padded", report.owner_padded},
               {"spread_partitions", report.spread_partitions},
               {"merges", report.merges},
               {"home_threadgroups", report.home_threadgroups},
               {"stolen_threadgroups", report.stolen_threadgroups},
               {"local_bytes", report.local_bytes},
               {"remote_bytes", report.remote_bytes},
               {"kv_bytes", report.kv_bytes},
               {"flops", report.flops},
               {"seconds", result.seconds},
               {"min_seconds", timing.min},
               {"median_seconds", timing.median},
               {"gb_per_s", GigaRate(report.kv_bytes, timing.median)},
               {"gflop_per_s", GigaRate(report.flops, timing.median)},
               {"imbalance", report.imbalance()}};
  if (options.measures_limit) {
    json["limit_gb_per_s"] = result.rates.bytes_per_second * 1e-9;
    json["limit_gflop_per_s"] = result.rates.flops_per_second * 1e-9;
    json["limit_seconds"] = LimitSeconds(report, result.rates);
  }
  return json;
}

std::string LimitText(const AttendResult& result, double seconds) {
  const double limit = LimitSeconds(result.report, result.rates);
  return fmt::format(
      "{} at {:.1f} GB/s and {:.1f} GFLOP/s; the median launch is at {:.0f}% "
      "of it",
      FormatSeconds(limit), result.rates.bytes_per_second * 1e-9,
      result.rates.flops_per_second * 1e-9,
      seconds > 0 ? limit / seconds * 100 : 0);
}

std::string VerifyText(const VerifyResult& verify) {
  return fmt::format(
      "{} rows recomputed, {} wrong; worst error {:.2g} of its bound "
      "({:.2g} absolute), lse {:.2g}",
      FormatCount(verify.rows), FormatCount(verify.failed_rows),
      verify.worst_ratio, verify.worst_error, verify.worst_lse_error);
}

// What of the case shapes its scores beside the scale.
std::string MaskText(const AttentionCase& c) {
  std::string text;
  if (c.causal) text += ", causal";
  if (c.window > 0) text += fmt::format(", window {}", FormatCount(c.window));
  if (c.softcap != 0) text += fmt::format(", softcap {}", c.softcap);
  if (!c.alibi_slopes.empty()) text += ", ALiBi";
  if (!c.sinks.empty()) text += ", sinks";
  return text;
}

std::string ResultText(const AttentionCase& c, const AttendFlags& flags,
                       const AttendResult& result, const VerifyResult* verify,
                       int workers) {
  const LaunchReport& report = result.report;
  const Timing timing = TimingOf(result.seconds);
  Table table({Align::kLeft});
  table.AddRow(
      {"batch", fmt::format("{} sequences, {} query tokens, {} "
                            "context tokens",
                            FormatCount(c.num_seqs()), FormatCount(c.q.tokens),
                            FormatCount(c.k.tokens))});
  table.AddRow(
      {"shape", fmt::format("{} query heads, {} KV heads, head size {}{}{}",
                            c.q.heads, c.k.heads, c.q.head_size,
                            c.v.head_size == c.q.head_size
                                ? ""
                                : fmt::format(" (V: {})", c.v.head_size),
                            MaskText(c))});
  table.AddRow({"KV", fmt::format("{}, {} shuffled blocks of {} tokens{}",
                                  DTypeName(flags.options.kv_dtype),
                                  FormatCount(result.num_blocks),
                                  flags.options.block_size,
                                  FormatHeadShards(result.num_shards))});
  table.AddRow(
      {"kernels", fmt::format("{}, {} workers", result.simd_target, workers)});
  table.AddRow({"threadgroups",
                fmt::format("{}, {} of them surplus; owner {}, partitions {}",
                            FormatCount(report.threadgroups),
                            FormatCount(report.surplus_threadgroups),
                            OwnerPatternName(flags.options.plan.owner),
                            result.spread ? "spread" : "walked")});
  table.AddRow(
      {"time", fmt::format("{} median, {} min of {} launches",
                           FormatSeconds(timing.median),
                           FormatSeconds(timing.min), result.seconds.size())});
  table.AddRow({"rate", fmt::format("{:.1f} GB/s of K/V, {:.1f} GFLOP/s",
                                    GigaRate(report.kv_bytes, timing.median),
                                    GigaRate(report.flops, timing.median))});
  table.AddRow(
      {"imbalance", fmt::format("{:.2f} (the longest worker over the mean)",
                                report.imbalance())});
  if (flags.options.measures_limit) {
    table.AddRow({"limit", LimitText(result, timing.median)});
  }
  if (verify != nullptr) table.AddRow({"verified", VerifyText(*verify)});
  if (!flags.out.empty()) table.AddRow({"written", flags.out});
  return "varlane attend: " + c.source + "\n" + table.ToString();
}

Status WriteOutput(const AttentionCase& c, const AttendResult& result,
                   const std::string& path) {
  const std::vector<TensorToWrite> tensors = {
      {"out",
       TensorType::kF32,
       {c.q.tokens, c.q.heads, c.v.head_size},
       result.out.data()},
      {"lse", TensorType::kF32, {c.q.tokens, c.q.heads}, result.lse.data()}};
  return WriteSafetensors(path, tensors, {});
}

Status RunAttendCommand(AttendFlags flags) {
  VARLANE_TOOLS_ASSIGN(const RuntimeOptions runtime_options,
                       MakeRuntimeOptions(flags.runtime));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Runtime> runtime,
                       Runtime::Create(runtime_options));
  VARLANE_TOOLS_ASSIGN(
      const AttentionCase c,
      flags.is_random()
          ? MakeRandomCase(flags.random, flags.shape, runtime.get())
          : LoadAttentionCase(flags.file));
  if (!flags.kv_dtype_given) flags.options.kv_dtype = c.k.dtype;
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<TraceFile> trace,
                       TraceFile::Start(flags.trace, runtime.get()));
  VARLANE_TOOLS_ASSIGN(const AttendResult result,
                       RunAttend(c, flags.options, runtime.get()));
  VARLANE_TOOLS_TRY(trace->Finish());
  Json json = {
      {"case", CaseToJson(c, flags.options)},
      {"launch", ResultToJson(flags.options, result, runtime->num_workers())}};
  VerifyResult verify;
  if (flags.verify > 0) {
    VARLANE_TOOLS_ASSIGN(verify, VerifyAttend(c, flags.options.kv_dtype, result,
                                              flags.verify, runtime.get()));
    json["verification"] = VerifyToJson(verify);
  }
  if (!flags.out.empty()) {
    VARLANE_TOOLS_TRY(WriteOutput(c, result, flags.out));
  }
  VARLANE_TOOLS_TRY(
      Emit(ResultText(c, flags, result, flags.verify > 0 ? &verify : nullptr,
                      runtime->num_workers()),
           json, flags.json));
  if (verify.ok()) return {};
  return Fail(StatusCode::kInternal,
              "verification failed in {} of {} rows; first: {}",
              verify.failed_rows, verify.rows, verify.first_failure);
}

void AddCaseFlags(CLI::App* command, AttendFlags* flags) {
  command->add_option("CASE", flags->file, "A safetensors file, see below");
  AddParsedOption(command, "--random", &flags->random, ParseBatchSpec,
                  "Make a case instead: COUNTxQ@CONTEXT,... = COUNT sequences "
                  "of Q query tokens at a context of CONTEXT, those included")
      ->type_name("BATCH");
  const auto number = [command](const char* name, int* value,
                                const char* help) {
    command->add_option(name, *value, help)
        ->check(CLI::Range(1, 65536))
        ->capture_default_str()
        ->type_name("N");
  };
  number("--q-heads", &flags->shape.num_q_heads, "Query heads of --random");
  number("--kv-heads", &flags->shape.num_kv_heads, "KV heads of --random");
  number("--head-size", &flags->shape.head_size,
         "Elements of a head of --random");
}

void AddLaunchFlags(CLI::App* command, AttendFlags* flags) {
  AddDTypeFlag(command, "--kv-dtype", &flags->options.kv_dtype,
               "Elements of the cache: bf16, f32 or f16; default: what k has "
               "in the file");
  command
      ->add_option("--block-size", flags->options.block_size,
                   "Tokens of a block: 16, 32, 64, 128 or 256")
      ->capture_default_str()
      ->type_name("N");
  AddPlanOptionFlags(command, &flags->options.plan);
  AddShardHeadsFlag(command, &flags->options.shard_heads);
  AddRuntimeFlags(command, &flags->runtime);
  command
      ->add_option("--seed", flags->options.seed,
                   "Permutes the physical blocks; also makes --random's values")
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--repeat", flags->options.repeat,
                   "Launch this often, for timing")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--limit", flags->options.measures_limit,
                    "Measure what this machine could do at most: plain reads "
                    "of the same pages, multiplies in registers");
  AddShareFlag(command, "--verify", &flags->verify,
               "Share of the output rows to recompute in double precision "
               "(default 0)");
  command->add_option("--out", flags->out, "Write out and lse (safetensors)")
      ->type_name("FILE");
  AddTraceFlag(command, &flags->trace);
  AddJsonFlag(command, &flags->json);
}

constexpr const char* kAttendFooter =
    "CASE holds tensors q [total_q, Hq, D], k [total_kv, Hkv, D], v "
    "[total_kv,\n"
    "Hkv, Dv] (F32, BF16 or F16, packed by sequence), cu_seqlens_q and\n"
    "cu_seqlens_k (I32 [N+1]); head sizes are multiples of 8 up to 576. Query "
    "i of\n"
    "a sequence stands at position kv_len - q_len + i. String metadata: scale\n"
    "(default 1/sqrt(D)); causal (default true: a query sees itself and what "
    "is\n"
    "before it); window W (a query sees itself and the W-1 tokens before; 0 = "
    "none;\n"
    "causal only); softcap C (scores become C tanh(score / C); 0 = none). "
    "Optional\n"
    "F32 tensors: alibi_slopes [Hq] (adds slope x (key - query position)), "
    "sinks\n"
    "[Hq] (one more logit, unscaled, without a value, counted in lse). "
    "Anything\n"
    "else is refused by name. docs/attend.md has an example in Python.\n"
    "OUT holds out (F32 [total_q, Hq, Dv]) and lse (F32 [total_q, Hq], "
    "natural\n"
    "logarithm); a row that sees nothing has out 0 and lse -inf, or its sink.\n"
    "Exit code 1 when a row fails verification.\n"
    "Examples:\n"
    "  varlane attend case.safetensors --out out.safetensors\n"
    "  varlane attend case.safetensors --out out.safetensors --kv-dtype bf16 "
    "--verify 1\n"
    "  varlane attend --random 64x1@2048 --repeat 20\n"
    "  varlane attend --random 32x1@512,4x512@512 --verify 0.05 --json a.json";

}  // namespace

void AddAttendCommand(CLI::App* app, Run* run) {
  const auto flags = std::make_shared<AttendFlags>();
  CLI::App* const command = app->add_subcommand(
      "attend",
      "Run one attention launch on a captured batch, through a real KV pool "
      "with a shuffled block table");
  AddCaseFlags(command, flags.get());
  AddLaunchFlags(command, flags.get());
  command->footer(kAttendFooter);
  command->callback([flags, command, run] {
    if (flags->file.empty() == !flags->is_random()) {
      ThrowUsage("attend needs either CASE or --random BATCH");
    }
    if (!flags->is_random() && flags->out.empty()) {
      ThrowUsage("attend CASE needs --out FILE");
    }
    flags->shape.seed = flags->options.seed;
    flags->kv_dtype_given = command->count("--kv-dtype") > 0;
    *run = [flags] { return RunAttendCommand(*flags); };
  });
}

}  // namespace varlane::tools
