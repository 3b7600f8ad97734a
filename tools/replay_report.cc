// A replay's result as a table for people and as JSON for programs.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <vector>

#include "tools/parse.h"
#include "tools/replay.h"
#include "tools/replay_sizing.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using Align = Table::Align;

double PerSecond(double amount, double seconds) {
  return seconds > 0 ? amount / seconds : 0;
}

double Share(double part, double whole) { return whole > 0 ? part / whole : 0; }

struct Rates {
  double prefill_tokens = 0;  // a second of the serving clock
  double decode_tokens = 0;
  double requests = 0;
  double gb = 0;  // a second inside attention launches
  double gflop = 0;
};

Rates RatesOf(const ReplayResult& r) {
  const double serving = r.seconds.serving();
  return {PerSecond(static_cast<double>(r.scheduler.prefill_tokens), serving),
          PerSecond(static_cast<double>(r.scheduler.decode_tokens), serving),
          PerSecond(static_cast<double>(r.ended), serving),
          PerSecond(static_cast<double>(r.launches.kv_bytes) * 1e-9,
                    r.launches.seconds),
          PerSecond(static_cast<double>(r.launches.flops) * 1e-9,
                    r.launches.seconds)};
}

std::string LoadText(const ReplayOptions& options) {
  return options.rate > 0
             ? fmt::format(
                   "open loop: arrivals of the trace, {:g} times as "
                   "fast",
                   options.rate)
             : fmt::format("closed loop: {} requests in flight",
                           options.concurrency);
}

std::string SetUpText(const ReplayOptions& options, const Workload& workload,
                      const ReplayResult& r) {
  const KvLayout layout = ReplayLayout(options);
  Table table({Align::kLeft});
  table.AddRow(
      {"requests", fmt::format("{}: {} prompt and {} generated tokens",
                               FormatCount(workload.size()),
                               FormatCount(workload.input_tokens()),
                               FormatCount(workload.output_tokens()))});
  table.AddRow({"load", LoadText(options)});
  table.AddRow({"model", DescribeModel(options.model)});
  table.AddRow({"KV pool",
                fmt::format("{} blocks of {} tokens, {}, {} in all{}",
                            FormatCount(r.sizing.blocks), layout.block_size,
                            DTypeName(layout.dtype),
                            FormatBytes(r.sizing.blocks * layout.block_bytes()),
                            FormatHeadShards(r.head_shards))});
  table.AddRow({"", r.sizing.reason});
  table.AddRow({"workers", fmt::format("{}, {} kernels, owner {}", r.workers,
                                       r.simd_target,
                                       OwnerPatternName(options.plan.owner))});
  return table.ToString();
}

// Of the prompts, or of what a preempted request had to catch up with.
double HitRate(const ReplayResult& r) {
  return Share(static_cast<double>(r.scheduler.cached_tokens),
               static_cast<double>(r.scheduler.started_tokens));
}

std::string PrefixText(const ReplayOptions& options, const ReplayResult& r) {
  if (!options.prefix_cache) return "off";
  return fmt::format(
      "{} of {} tokens to compute were found ({:.1f}%); {} blocks evicted",
      FormatCount(r.scheduler.cached_tokens),
      FormatCount(r.scheduler.started_tokens), 100 * HitRate(r),
      FormatCount(r.prefixes.evicted_blocks));
}

std::string BatchText(const ReplayOptions& options, const ReplayResult& r) {
  Table table({Align::kLeft});
  table.AddRow(
      {"steps",
       fmt::format("{}: {} decode only, {} mixed, {} prefill "
                   "only",
                   FormatCount(r.scheduler.steps), FormatCount(r.decode_steps),
                   FormatCount(r.mixed_steps), FormatCount(r.prefill_steps))});
  table.AddRow(
      {"requests", fmt::format("{} finished, {} never fit the pool, {} "
                               "preemptions ({} tokens recomputed)",
                               FormatCount(r.ended), FormatCount(r.never_fit),
                               FormatCount(r.scheduler.preemptions),
                               FormatCount(r.scheduler.recomputed_tokens))});
  table.AddRow({"prefix cache", PrefixText(options, r)});
  table.AddRow(
      {"launches",
       fmt::format(
           "{}, {} spread partitions; {} threadgroups, "
           "{:.1f}% surplus",
           FormatCount(r.num_launches), FormatCount(r.spread_launches),
           FormatCount(r.launches.threadgroups),
           100 * Share(static_cast<double>(r.launches.surplus_threadgroups),
                       static_cast<double>(r.launches.threadgroups)))});
  const std::string line = Sparkline(r.kv_use.values(), 48);
  table.AddRow({"KV use over time",
                fmt::format("|{}| peak {:.0f}%", line, 100 * r.peak_kv_use)});
  return table.ToString();
}

std::string LatencyText(const ReplayResult& r) {
  Table table({Align::kLeft, Align::kRight});
  table.AddRow({"", "p50", "p90", "p99", "max"});
  const auto times = [&](const char* name, const Percentiles& p) {
    table.AddRow({name, FormatSeconds(p.p50), FormatSeconds(p.p90),
                  FormatSeconds(p.p99), FormatSeconds(p.max)});
  };
  const auto counts = [&](const char* name, const Percentiles& p) {
    const auto text = [](double x) {
      return FormatCount(static_cast<int64_t>(x));
    };
    table.AddRow({name, text(p.p50), text(p.p90), text(p.p99), text(p.max)});
  };
  times("time to first token", r.ttft);
  times("time per output token", r.tpot);
  times("step time", r.step_seconds);
  counts("tokens a step", r.step_tokens);
  counts("sequences a step", r.step_seqs);
  return table.ToString();
}

std::string TimeText(const ReplayResult& r) {
  const PhaseSeconds& s = r.seconds;
  Table table({Align::kLeft, Align::kRight, Align::kRight, Align::kLeft});
  const auto row = [&](const char* name, double seconds, const char* note) {
    table.AddRow({name, FormatSeconds(seconds),
                  fmt::format("{:.1f}%", 100 * Share(seconds, s.wall)), note});
  };
  row("attention", s.attention, "");
  row("writing K/V", s.write_kv, "");
  row("scheduling", s.schedule, "");
  row("planning", s.plan, "");
  if (s.resize > 0) row("resizing the pool", s.resize, "");
  if (s.idle > 0) row("idle", s.idle, "waiting for arrivals");
  row("making inputs", s.generate, "not on the serving clock");
  row("verifying", s.verify, "not on the serving clock");
  row("all", s.wall, "");
  return table.ToString();
}

std::string VerifyText(const ReplayOptions& options, const ReplayResult& r) {
  if (options.verify_share == 0) return "  off (--verify SHARE)\n";
  const VerifyResult& v = r.verify;
  std::string text = fmt::format(
      "  {} output rows recomputed in double precision: {}\n"
      "  worst error {:.2g} of its bound ({:.2g} absolute), log-sum-exp off by "
      "{:.2g}\n",
      FormatCount(v.rows),
      v.ok() ? "all right"
             : fmt::format("{} WRONG", FormatCount(v.failed_rows)),
      v.worst_ratio, v.worst_error, v.worst_lse_error);
  if (!v.ok()) text += "  first: " + v.first_failure + "\n";
  return text;
}

// Empty where it was not asked for.
std::string PressureText(const ReplayResult& r) {
  if (!r.pressure) return "";
  const ServingPressureStats& stats = *r.pressure;
  const PressureStats& ladder = stats.ladder;
  std::string text = fmt::format(
      "\nMemory pressure\n  {}, rung \"{}\"; {} steps up and {} down the "
      "ladder\n  {} given back and {} taken again in {} updates, the longest "
      "{}\n",
      PressureLevelName(ladder.level), PressureRungName(ladder.rung),
      FormatCount(ladder.climbs), FormatCount(ladder.descents),
      FormatBytes(ladder.released_bytes), FormatBytes(ladder.regained_bytes),
      FormatCount(stats.updates),
      FormatSeconds(static_cast<double>(stats.longest_update_ns) * 1e-9));
  if (!ladder.cause.empty()) text += "  last cause: " + ladder.cause + "\n";
  return text;
}

Json PressureToJson(const ReplayResult& r) {
  if (!r.pressure) return nullptr;
  const ServingPressureStats& stats = *r.pressure;
  const PressureStats& ladder = stats.ladder;
  return {{"level", PressureLevelName(ladder.level)},
          {"rung", PressureRungName(ladder.rung)},
          {"climbs", ladder.climbs},
          {"descents", ladder.descents},
          {"released_bytes", ladder.released_bytes},
          {"regained_bytes", ladder.regained_bytes},
          {"cause", ladder.cause},
          {"updates", stats.updates},
          {"longest_update_seconds",
           static_cast<double>(stats.longest_update_ns) * 1e-9},
          {"refused", r.scheduler.refused}};
}

Json SetUpToJson(const ReplayOptions& options, const Workload& workload,
                 const ReplayResult& r) {
  return {{"requests", workload.size()},
          {"input_tokens", workload.input_tokens()},
          {"output_tokens", workload.output_tokens()},
          {"loop", options.rate > 0 ? "open" : "closed"},
          {"rate", options.rate},
          {"concurrency", options.concurrency},
          {"model", options.model.name},
          {"layers", options.model.num_layers},
          {"q_heads", options.model.num_q_heads},
          {"kv_heads", options.model.num_kv_heads},
          {"head_size", options.model.head_size},
          {"kv_dtype", DTypeName(options.kv_dtype)},
          {"block_size", options.block_size},
          {"token_budget", options.scheduler.token_budget},
          {"max_seqs", options.scheduler.max_seqs},
          {"owner", OwnerPatternName(options.plan.owner)},
          {"partitions", PartitionModeName(options.plan.partitions)},
          {"workers", r.workers},
          {"simd_target", r.simd_target}};
}

Json PoolToJson(const ReplayResult& r) {
  return {{"blocks", r.sizing.blocks},
          {"budget_blocks", r.sizing.budget_blocks},
          {"workload_blocks", r.sizing.workload_blocks},
          {"reason", r.sizing.reason},
          {"head_shards", r.head_shards},
          {"committed_bytes", r.pool.committed_bytes},
          {"huge_page_bytes", r.pool.huge_page_bytes},
          {"peak_use", r.peak_kv_use},
          {"peak_referenced_blocks", r.pool.peak_referenced_blocks},
          {"use_stride_steps", r.kv_use.stride()},
          {"use", r.kv_use.values()}};
}

Json StepsToJson(const ReplayResult& r) {
  return {{"steps", r.scheduler.steps},
          {"decode_only", r.decode_steps},
          {"mixed", r.mixed_steps},
          {"prefill_only", r.prefill_steps},
          {"prefill_tokens", r.scheduler.prefill_tokens},
          {"decode_tokens", r.scheduler.decode_tokens},
          {"generated_tokens", r.generated_tokens},
          {"submitted", r.submitted},
          {"finished", r.ended},
          {"never_fit", r.never_fit},
          {"preemptions", r.scheduler.preemptions},
          {"recomputed_tokens", r.scheduler.recomputed_tokens},
          {"tokens_per_step", ToJson(r.step_tokens)},
          {"seqs_per_step", ToJson(r.step_seqs)}};
}

Json PrefixesToJson(const ReplayOptions& options, const ReplayResult& r) {
  return {{"enabled", options.prefix_cache},
          {"started_tokens", r.scheduler.started_tokens},
          {"cached_tokens", r.scheduler.cached_tokens},
          {"hit_rate", HitRate(r)},
          {"lookups", r.prefixes.lookups},
          {"lookup_blocks", r.prefixes.lookup_blocks},
          {"hit_blocks", r.prefixes.hit_blocks},
          {"partial_hits", r.prefixes.partial_hits},
          {"copied_blocks", r.prefixes.copied_blocks},
          {"inserted_blocks", r.prefixes.inserted_blocks},
          {"duplicate_blocks", r.prefixes.duplicate_blocks},
          {"evicted_blocks", r.prefixes.evicted_blocks}};
}

Json LaunchesToJson(const ReplayResult& r) {
  const Rates rates = RatesOf(r);
  return {{"launches", r.num_launches},
          {"spread_launches", r.spread_launches},
          {"threadgroups", r.launches.threadgroups},
          {"surplus_threadgroups", r.launches.surplus_threadgroups},
          {"owner_searches", r.launches.owner_searches},
          {"owner_lookups", r.launches.owner_lookups},
          {"owner_planned", r.launches.owner_planned},
          {"owner_padded", r.launches.owner_padded},
          {"spread_partitions", r.launches.spread_partitions},
          {"merges", r.launches.merges},
          {"home_threadgroups", r.launches.home_threadgroups},
          {"stolen_threadgroups", r.launches.stolen_threadgroups},
          {"local_bytes", r.launches.local_bytes},
          {"remote_bytes", r.launches.remote_bytes},
          {"kv_bytes", r.launches.kv_bytes},
          {"flops", r.launches.flops},
          {"seconds", r.launches.seconds},
          {"gb_per_s", rates.gb},
          {"gflop_per_s", rates.gflop}};
}

}  // namespace

std::string ReplayText(const ReplayOptions& options, const Workload& workload,
                       const ReplayResult& result) {
  const Rates rates = RatesOf(result);
  return fmt::format(
      "{}\nServed\n{}\n"
      "Throughput: {} prefill tokens/s, {} decode tokens/s, {:.2f} requests/s\n"
      "Attention:  {:.1f} GB/s of K/V read, {:.1f} GFLOP/s\n\n"
      "Latency\n{}\nTime\n{}{}\nVerification\n{}",
      SetUpText(options, workload, result), BatchText(options, result),
      FormatCount(static_cast<int64_t>(rates.prefill_tokens)),
      FormatCount(static_cast<int64_t>(rates.decode_tokens)), rates.requests,
      rates.gb, rates.gflop, LatencyText(result), TimeText(result),
      PressureText(result), VerifyText(options, result));
}

Json ReplayJson(const ReplayOptions& options, const Workload& workload,
                const ReplayResult& r) {
  const PhaseSeconds& s = r.seconds;
  const Rates rates = RatesOf(r);
  return {{"setup", SetUpToJson(options, workload, r)},
          {"pool", PoolToJson(r)},
          {"steps", StepsToJson(r)},
          {"prefix_cache", PrefixesToJson(options, r)},
          {"throughput",
           {{"prefill_tokens_per_s", rates.prefill_tokens},
            {"decode_tokens_per_s", rates.decode_tokens},
            {"requests_per_s", rates.requests}}},
          {"latency_seconds",
           {{"ttft", ToJson(r.ttft)},
            {"tpot", ToJson(r.tpot)},
            {"step", ToJson(r.step_seconds)}}},
          {"attention", LaunchesToJson(r)},
          {"seconds",
           {{"wall", s.wall},
            {"serving", s.serving()},
            {"attention", s.attention},
            {"write_kv", s.write_kv},
            {"schedule", s.schedule},
            {"plan", s.plan},
            {"resize", s.resize},
            {"idle", s.idle},
            {"generate", s.generate},
            {"verify", s.verify}}},
          {"pressure", PressureToJson(r)},
          {"verification",
           {{"share", options.verify_share},
            {"rows", r.verify.rows},
            {"failed_rows", r.verify.failed_rows},
            {"worst_error_over_bound", r.verify.worst_ratio},
            {"worst_error", r.verify.worst_error},
            {"worst_lse_error", r.verify.worst_lse_error},
            {"first_failure", r.verify.first_failure}}}};
}

}  // namespace varlane::tools
