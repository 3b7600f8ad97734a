// What a stress run has shown: for people, for programs, and as a verdict.
//
// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>

#include "tools/parse.h"
#include "tools/stress.h"

namespace varlane::tools {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kRssTells = false;  // a sanitizer keeps what was freed
#else
constexpr bool kRssTells = true;
#endif

// What the heap and the libraries may keep once the pool is gone.
constexpr int64_t kRssSlackBytes = int64_t{48} << 20;

}  // namespace

std::vector<std::string> StressResult::Failures(
    const StressOptions& options) const {
  std::vector<std::string> failures;
  if (wrong_rows > 0) {
    failures.push_back(fmt::format(
        "{} of {} rows have not the bits of the unpressured run (the first: "
        "{})",
        wrong_rows, rows, first_wrong));
  }
  if (!empty.ok()) failures.emplace_back(empty.message());
  if (swap.write_failures + swap.read_failures > 0) {
    failures.push_back(
        fmt::format("the swap file failed: {} sequences written, {} read",
                    swap.write_failures, swap.read_failures));
  }
  if (limit && limit->oom_kills > 0) {
    failures.push_back(
        fmt::format("the kernel killed {} processes in the "
                    "cgroup",
                    limit->oom_kills));
  }
  if (pressure.shrinks < options.min_shrinks) {
    failures.push_back(fmt::format("the pool shrank {} times, expected {}",
                                   pressure.shrinks, options.min_shrinks));
  }
  if (final_blocks < sizing.blocks) {
    failures.push_back(fmt::format(
        "the pool has regained {} of its {} blocks since the pressure ended",
        final_blocks, sizing.blocks));
  }
  if (!kRssTells) return failures;
  if (pressure.rss_fell_bytes < pressure.bytes_released / 10 * 8) {
    failures.push_back(
        fmt::format("{} were given back, but resident memory fell by {}",
                    FormatBytes(pressure.bytes_released),
                    FormatBytes(pressure.rss_fell_bytes)));
  }
  if (rss_after_bytes > rss_before_bytes + kRssSlackBytes) {
    failures.push_back(fmt::format(
        "{} were resident before there was a pool, {} after it",
        FormatBytes(rss_before_bytes), FormatBytes(rss_after_bytes)));
  }
  return failures;
}

namespace {

std::string Verified(const StressResult& r) {
  if (r.wrong_rows > 0) {
    return fmt::format("WRONG: {} of {} rows ({})", r.wrong_rows, r.rows,
                       r.first_wrong);
  }
  return fmt::format("{} rows, all the bits of an unpressured run",
                     FormatCount(r.rows));
}

void AddLimitRows(const StressLimit& limit, Table* table) {
  const PressureStats& ladder = limit.ladder.ladder;
  table->AddRow(
      {"ballast",
       fmt::format("{} waves of up to {}, {} starved; waited for room {} "
                   "times, {} at most",
                   limit.waves, FormatBytes(limit.ballast_peak_bytes),
                   limit.starved, limit.waits,
                   FormatSeconds(limit.longest_wait_seconds))});
  table->AddRow(
      {"pressure",
       fmt::format("{} rungs up, {} down; the last cause: {}",
                   FormatCount(ladder.climbs), FormatCount(ladder.descents),
                   ladder.cause.empty() ? "none" : ladder.cause)});
  if (limit.peak_bytes > 0) {
    table->AddRow(
        {"cgroup", fmt::format("{} at its peak, limit hit {} times, {} "
                               "processes killed",
                               FormatBytes(limit.peak_bytes), limit.limit_hits,
                               limit.oom_kills)});
  }
}

std::string Latency(const std::vector<double>& seconds) {
  const Percentiles p = ComputePercentiles(seconds);
  return fmt::format("median {}, p99 {}, max {}", FormatSeconds(p.p50),
                     FormatSeconds(p.p99), FormatSeconds(p.max));
}

}  // namespace

std::string StressText(const StressOptions& options, const StressResult& r) {
  using Align = Table::Align;
  Table table({Align::kLeft, Align::kLeft});
  table.AddRow(
      {"mode", fmt::format("{}: {}", StressModeName(r.mode), r.mode_reason)});
  table.AddRow(
      {"pool", fmt::format("{} blocks, {}{}; the longest request needs "
                           "{}",
                           FormatCount(r.sizing.blocks), r.sizing.reason,
                           FormatHeadShards(r.head_shards),
                           FormatCount(r.least_blocks))});
  table.AddRow({"run", fmt::format("{} rounds in {}, {} steps, {} requests",
                                   r.rounds, FormatSeconds(r.seconds),
                                   FormatCount(r.scheduler.steps),
                                   FormatCount(r.requests))});
  const double serving = std::max(r.serving_seconds, 1e-9);
  table.AddRow({"throughput", fmt::format("{:.0f} rows/s in {} of serving",
                                          static_cast<double>(r.rows) / serving,
                                          FormatSeconds(r.serving_seconds))});
  const StressCounts& p = r.pressure;
  table.AddRow(
      {"given back", fmt::format("{} blocks, {} slabs, {} in {} shrinks; "
                                 "resident memory fell by {}",
                                 FormatCount(p.blocks_given_back),
                                 FormatCount(r.pool.slabs_released),
                                 FormatBytes(p.bytes_released), p.shrinks,
                                 FormatBytes(p.rss_fell_bytes))});
  table.AddRow({"a shrink took", Latency(p.shrink_seconds)});
  table.AddRow(
      {"regained", fmt::format("{} blocks, {} slabs, {} in {} growths",
                               FormatCount(p.blocks_regained),
                               FormatCount(r.pool.slabs_regained),
                               FormatBytes(p.bytes_regained), p.growths)});
  table.AddRow({"a growth took", Latency(p.growth_seconds)});
  table.AddRow(
      {"moved", fmt::format("{} blocks; {} changes postponed",
                            FormatCount(p.moved_blocks), p.postponed)});
  table.AddRow(
      {"preempted",
       fmt::format("{} times: {} swapped out, {} in, {} lost; {} tokens "
                   "computed again; {} times work was refused",
                   FormatCount(r.scheduler.preemptions),
                   FormatCount(r.scheduler.swapped_out),
                   FormatCount(r.scheduler.swapped_in), r.scheduler.swap_losses,
                   FormatCount(r.scheduler.recomputed_tokens),
                   FormatCount(r.refused))});
  if (r.limit) AddLimitRows(*r.limit, &table);
  table.AddRow({"resident", fmt::format("{} without a pool before, {} after",
                                        FormatBytes(r.rss_before_bytes),
                                        FormatBytes(r.rss_after_bytes))});
  table.AddRow({"verified", Verified(r)});
  for (const std::string& failure : r.Failures(options)) {
    table.AddRow({"FAILED", failure});
  }
  return table.ToString();
}

namespace {

Json LimitJson(const StressOptions& options, const StressLimit& limit) {
  Json sources = Json::array();
  for (const PressureSource& source : limit.ladder.sources) {
    sources.push_back({{"name", source.name},
                       {"active", source.active},
                       {"events", source.events}});
  }
  const PressureStats& ladder = limit.ladder.ladder;
  return {{"limit_bytes", options.limit_bytes},
          {"peak_bytes", limit.peak_bytes},
          {"limit_hits", limit.limit_hits},
          {"oom_kills", limit.oom_kills},
          {"ballast",
           {{"peak_bytes", limit.ballast_peak_bytes},
            {"waves", limit.waves},
            {"starved", limit.starved},
            {"waits", limit.waits},
            {"wait_seconds", limit.wait_seconds},
            {"longest_wait_seconds", limit.longest_wait_seconds}}},
          {"ladder",
           {{"climbs", ladder.climbs},
            {"descents", ladder.descents},
            {"released_bytes", ladder.released_bytes},
            {"regained_bytes", ladder.regained_bytes},
            {"cause", ladder.cause},
            {"sources", sources}}}};
}

Json PressureJson(const StressResult& r) {
  const StressCounts& p = r.pressure;
  return {{"shrinks",
           {{"count", p.shrinks},
            {"blocks", p.blocks_given_back},
            {"slabs", r.pool.slabs_released},
            {"bytes", p.bytes_released},
            {"rss_fell_bytes", p.rss_fell_bytes},
            {"seconds", ToJson(ComputePercentiles(p.shrink_seconds))}}},
          {"growths",
           {{"count", p.growths},
            {"blocks", p.blocks_regained},
            {"slabs", r.pool.slabs_regained},
            {"bytes", p.bytes_regained},
            {"seconds", ToJson(ComputePercentiles(p.growth_seconds))}}},
          {"moved_blocks", p.moved_blocks},
          {"postponed", p.postponed}};
}

}  // namespace

Json StressJson(const StressOptions& options, const StressResult& r) {
  Json json = {{"mode", StressModeName(r.mode)},
               {"mode_reason", r.mode_reason},
               {"model", options.model.name},
               {"pool",
                {{"blocks", r.sizing.blocks},
                 {"least_blocks", r.least_blocks},
                 {"final_blocks", r.final_blocks},
                 {"head_shards", r.head_shards},
                 {"slab_bytes", r.pool.slab_bytes}}},
               {"rounds", r.rounds},
               {"seconds", r.seconds},
               {"serving_seconds", r.serving_seconds},
               {"steps", r.scheduler.steps},
               {"requests", r.requests},
               {"prefill_tokens", r.scheduler.prefill_tokens},
               {"decode_tokens", r.scheduler.decode_tokens},
               {"recomputed_tokens", r.scheduler.recomputed_tokens},
               {"preemptions", r.scheduler.preemptions},
               {"refused", r.refused},
               {"swaps",
                {{"out", r.scheduler.swapped_out},
                 {"in", r.scheduler.swapped_in},
                 {"lost", r.scheduler.swap_losses}}}};
  json.update(PressureJson(r));
  if (r.limit) json["limit"] = LimitJson(options, *r.limit);
  json["rss_bytes"] = {{"before", r.rss_before_bytes},
                       {"after", r.rss_after_bytes}};
  json["verification"] = {
      {"rows", r.rows},
      {"wrong_rows", r.wrong_rows},
      {"skipped_rows", r.skipped_rows},
      {"first_wrong", r.first_wrong},
      {"pool", r.empty.ok() ? "empty, its invariants hold"
                            : std::string(r.empty.message())}};
  json["failures"] = r.Failures(options);
  return json;
}

}  // namespace varlane::tools
