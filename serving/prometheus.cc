// PrometheusText: which metric is what. docs/metrics.md has the same list.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/strings.h"
#include "serving/exposition.h"
#include "varlane/metrics.h"

namespace varlane {
namespace {

// Labels that samples have of their own.
constexpr std::array<std::string_view, 11> kOwnLabels = {
    "state",   "node", "tenant", "limit", "direction", "source",
    "outcome", "use",  "name",   "le",    "quantile"};

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

void WriteBlocks(const KvPoolMetrics& pool, Exposition* out) {
  const KvPoolStats& stats = pool.stats;
  out->Gauge("varlane_kv_blocks",
             "KV blocks of the pool by state; free + cached + referenced is "
             "its capacity.");
  out->Sample({{"state", "free"}}, stats.free_blocks);
  out->Sample({{"state", "cached"}}, stats.cached_blocks);
  out->Sample({{"state", "referenced"}}, stats.referenced_blocks);
  out->Gauge("varlane_kv_capacity_blocks", "KV blocks of the pool.",
             stats.capacity_blocks);
  out->Gauge("varlane_kv_lent_blocks",
             "KV blocks given back to the system for a while.",
             pool.lent_blocks);
  out->Gauge("varlane_kv_block_bytes", "Size of a KV block.", pool.block_bytes);
  out->Gauge("varlane_kv_references", "Block table entries.", stats.references);
  out->Gauge("varlane_kv_peak_referenced_blocks",
             "Most KV blocks ever referenced at once.",
             stats.peak_referenced_blocks);
  out->Gauge("varlane_kv_sequences", "Sequences of the pool.", stats.sequences);
  out->Counter("varlane_kv_cow_copies_total",
               "Shared blocks copied by the first write to them.",
               stats.cow_copies);
  out->Counter("varlane_kv_evicted_blocks_total",
               "Cached blocks that became free.", stats.evicted_blocks);
  out->Counter("varlane_kv_spilled_blocks_total",
               "Blocks taken from another node than the sequence's.",
               stats.spilled_blocks);
  out->Counter("varlane_kv_refusals_total",
               "Appends that had to wait, by what bound them.");
  out->Sample({{"limit", "quota"}}, stats.quota_refusals);
  out->Sample({{"limit", "watermark"}}, stats.watermark_refusals);
  out->Counter("varlane_kv_compactions_total",
               "Changes of the pool that moved blocks.", stats.compactions);
  out->Counter("varlane_kv_moved_blocks_total", "Blocks moved by these.",
               stats.moved_blocks);
}

void WriteSlabs(const KvPoolStats& stats, Exposition* out) {
  out->Gauge("varlane_kv_committed_bytes",
             "Memory the pool has taken from the system.",
             stats.committed_bytes);
  out->Gauge("varlane_kv_reserved_bytes",
             "Address space reserved for the pool.", stats.reserved_bytes);
  out->Gauge("varlane_kv_limit_bytes",
             "Most memory the pool may take (KvPool::SetLimit).",
             stats.limit_bytes);
  out->Gauge("varlane_kv_huge_page_bytes",
             "Of the pool's memory, on huge pages as of the last growth.",
             stats.huge_page_bytes);
  out->Gauge("varlane_kv_locked_bytes", "Of the pool's memory, locked (mlock).",
             stats.locked_bytes);
  out->Gauge("varlane_kv_slab_bytes", "Size of a slab.", stats.slab_bytes);
  const int64_t slabs =
      stats.slab_bytes > 0
          ? (stats.reserved_bytes + stats.slab_bytes - 1) / stats.slab_bytes
          : 0;
  out->Gauge("varlane_kv_slabs", "Slabs of the pool by state.");
  out->Sample({{"state", "committed"}}, stats.num_slabs);
  out->Sample({{"state", "reserved"}},
              std::max<int64_t>(0, slabs - stats.num_slabs));
  out->Counter("varlane_kv_released_slabs_total",
               "Slabs given back to the system.", stats.slabs_released);
  out->Counter("varlane_kv_regained_slabs_total",
               "Of these, taken from it again.", stats.slabs_regained);
}

void WriteNodes(const KvPoolMetrics& pool, Exposition* out) {
  out->Gauge("varlane_kv_node_blocks",
             "KV blocks of a NUMA node's memory by state.");
  for (size_t i = 0; i < pool.nodes.size(); ++i) {
    const std::string node = StrCat(i);
    const KvNodeStats& stats = pool.nodes[i];
    out->Sample({{"node", node}, {"state", "free"}}, stats.free_blocks);
    out->Sample({{"node", node}, {"state", "cached"}}, stats.cached_blocks);
    out->Sample({{"node", node}, {"state", "referenced"}},
                stats.referenced_blocks);
  }
  out->Gauge("varlane_kv_node_committed_bytes",
             "Memory the pool has taken from a NUMA node.");
  for (size_t i = 0; i < pool.nodes.size(); ++i) {
    out->Sample({{"node", StrCat(i)}}, pool.nodes[i].committed_bytes);
  }
  out->Gauge("varlane_kv_node_placement_bytes",
             "Where the pages of a NUMA node's blocks are: there (local), on "
             "another node (remote), not taken yet (absent) or unknown.");
  for (size_t i = 0; i < pool.placement.size(); ++i) {
    const std::string node = StrCat(i);
    const KvPlacement& placement = pool.placement[i];
    out->Sample({{"node", node}, {"state", "local"}}, placement.local_bytes);
    out->Sample({{"node", node}, {"state", "remote"}}, placement.remote_bytes);
    out->Sample({{"node", node}, {"state", "absent"}}, placement.absent_bytes);
    out->Sample({{"node", node}, {"state", "unknown"}},
                placement.unknown_bytes);
  }
}

void WriteTenants(const KvPoolMetrics& pool, Exposition* out) {
  const auto family = [&](auto value) {
    for (const KvTenant& tenant : pool.tenants) {
      out->Sample({{"tenant", StrCat(tenant.id)}}, value(tenant.stats));
    }
  };
  out->Gauge("varlane_tenant_used_blocks", "KV blocks a tenant references.");
  family([](const KvTenantStats& stats) { return stats.used_blocks; });
  out->Gauge("varlane_tenant_quota_blocks",
             "KV blocks a tenant may reference; -1 = no quota.");
  family([](const KvTenantStats& stats) { return stats.quota_blocks; });
  out->Gauge("varlane_tenant_sequences", "Sequences of a tenant.");
  family([](const KvTenantStats& stats) { return stats.sequences; });
  out->Counter("varlane_tenant_refusals_total",
               "Appends that a tenant's quota made wait.");
  family([](const KvTenantStats& stats) { return stats.refusals; });
}

void WritePrefixes(const PrefixCacheStats& stats, Exposition* out) {
  out->Counter("varlane_prefix_lookups_total",
               "Prompts looked up in the prefix cache.", stats.lookups);
  out->Counter("varlane_prefix_lookup_blocks_total",
               "Full blocks of these prompts.", stats.lookup_blocks);
  out->Counter("varlane_prefix_hit_blocks_total", "Of these blocks, found.",
               stats.hit_blocks);
  out->Counter("varlane_prefix_copied_blocks_total",
               "Blocks copied for their first tokens.", stats.copied_blocks);
  out->Counter("varlane_prefix_inserted_blocks_total",
               "Blocks that can be found, or could be.", stats.inserted_blocks);
  out->Counter("varlane_prefix_duplicate_blocks_total",
               "Blocks that two computed, kept once.", stats.duplicate_blocks);
  out->Counter("varlane_prefix_collisions_total",
               "Equal hashes of different prefixes, met and told apart.",
               stats.collisions);
  out->Gauge("varlane_prefix_indexed_blocks", "Blocks that can be found.",
             stats.indexed_blocks);
  out->Gauge("varlane_prefix_pinned_blocks", "Of these, pinned.",
             stats.pinned_blocks);
  out->Gauge("varlane_prefix_evictable_blocks",
             "Of these, neither referenced nor pinned.",
             stats.evictable_blocks);
}

void WriteScheduler(const SchedulerStats& stats, Exposition* out) {
  out->Gauge("varlane_requests", "Requests that have not ended, by state.");
  out->Sample({{"state", "waiting"}}, stats.waiting);
  out->Sample({{"state", "running"}}, stats.running);
  out->Counter("varlane_requests_total", "Requests that are gone, by outcome.");
  out->Sample({{"outcome", "finished"}}, stats.finished);
  out->Sample({{"outcome", "cancelled"}}, stats.cancelled);
  out->Sample({{"outcome", "refused"}}, stats.refused);
  out->Gauge("varlane_takes_work",
             "1 while new requests are taken, 0 while they are refused.",
             stats.takes_work ? 1 : 0);
  out->Counter("varlane_steps_total", "Steps scheduled.", stats.steps);
  out->Counter("varlane_prefill_tokens_total",
               "Prefill tokens scheduled, recomputed ones included.",
               stats.prefill_tokens);
  out->Counter("varlane_decode_tokens_total", "Decode tokens scheduled.",
               stats.decode_tokens);
  out->Counter("varlane_recomputed_tokens_total",
               "Tokens computed again after a preemption.",
               stats.recomputed_tokens);
  out->Counter("varlane_started_tokens_total",
               "Tokens that starting requests had to catch up with.",
               stats.started_tokens);
  out->Counter("varlane_cached_tokens_total",
               "Of these, found in the prefix cache.", stats.cached_tokens);
  out->Counter("varlane_preemptions_total", "Running requests sent back.",
               stats.preemptions);
  out->Counter("varlane_preemption_swaps_total",
               "Preempted requests that went through the swap file, by "
               "outcome.");
  out->Sample({{"outcome", "swapped_out"}}, stats.swapped_out);
  out->Sample({{"outcome", "swapped_in"}}, stats.swapped_in);
  out->Sample({{"outcome", "lost"}}, stats.swap_losses);
}

void WriteSwap(const SwapStats& stats, Exposition* out) {
  out->Counter("varlane_swap_sequences_total",
               "Sequences written to the swap file and read back.");
  out->Sample({{"direction", "out"}}, stats.swapped_out);
  out->Sample({{"direction", "in"}}, stats.swapped_in);
  out->Counter("varlane_swap_bytes_total", "K/V bytes of these.");
  out->Sample({{"direction", "out"}}, stats.bytes_written);
  out->Sample({{"direction", "in"}}, stats.bytes_read);
  out->Counter("varlane_swap_failures_total",
               "Sequences that could not be written or read.");
  out->Sample({{"direction", "out"}}, stats.write_failures);
  out->Sample({{"direction", "in"}}, stats.read_failures);
  out->Gauge("varlane_swap_blocks", "Blocks of the swap file by state.");
  out->Sample({{"state", "stored"}}, stats.stored_blocks);
  out->Sample({{"state", "free"}}, stats.capacity_blocks - stats.stored_blocks);
  out->Gauge("varlane_swap_pending_blocks",
             "KV blocks that come free once they are written.",
             stats.pending_blocks);
  out->Gauge("varlane_swap_file_bytes", "Size of the swap file.",
             stats.file_bytes);
}

void WriteSources(const std::vector<PressureSource>& sources, Exposition* out) {
  out->Gauge("varlane_pressure_source_active",
             "1 where a source of pressure events is listened to.");
  for (const PressureSource& source : sources) {
    out->Sample({{"source", source.name}}, int64_t{source.active});
  }
  out->Counter("varlane_pressure_source_events_total", "Events of a source.");
  for (const PressureSource& source : sources) {
    out->Sample({{"source", source.name}}, source.events);
  }
}

void WritePressure(const PressureMetrics& pressure, Exposition* out) {
  const ServingPressureStats& stats = pressure.stats;
  const PressureStats& ladder = stats.ladder;
  out->Gauge("varlane_pressure_level",
             "Memory pressure: 0 none, 1 low, 2 medium, 3 critical.",
             static_cast<int64_t>(ladder.level));
  out->Gauge("varlane_pressure_rung",
             "What is done about it: 0 nothing, 1 no growth, 2 cached prefixes "
             "dropped, 3 compacted, 4 preempted, 5 new work refused.",
             static_cast<int64_t>(ladder.rung));
  out->Counter("varlane_pressure_climbs_total", "Rungs climbed.",
               ladder.climbs);
  out->Counter("varlane_pressure_descents_total", "Rungs descended.",
               ladder.descents);
  out->Counter("varlane_pressure_released_bytes_total",
               "Memory given back to the system under pressure.",
               ladder.released_bytes);
  out->Counter("varlane_pressure_regained_bytes_total",
               "Memory taken again after it.", ladder.regained_bytes);
  out->Gauge("varlane_pressure_available_bytes",
             "What the tightest limit had available when last acted upon.",
             stats.last.available_bytes);
  out->Gauge("varlane_pressure_reserve_bytes",
             "What of this should stay untouched.", stats.last.reserve_bytes);
  out->Counter("varlane_pressure_updates_total",
               "Times the engine acted upon news.", stats.updates);
  out->Counter("varlane_pressure_update_seconds_total",
               "Time the engine spent on it.");
  out->Sample({}, Seconds(stats.total_update_ns));
  out->Gauge("varlane_pressure_longest_update_seconds",
             "The longest of these.");
  out->Sample({}, Seconds(stats.longest_update_ns));
  out->Counter("varlane_pressure_wakeups_total",
               "Times the monitor woke and measured.",
               pressure.listener.wakeups);
  WriteSources(stats.sources, out);
}

void WriteAccount(const MemoryAccountReport& report, Exposition* out) {
  const auto limits = [&](auto value) {
    for (const MemoryAccountLine& line : report.lines) {
      out->Sample({{"limit", line.limit.name}}, value(line));
    }
  };
  using Line = MemoryAccountLine;
  out->Gauge("varlane_memory_limit_bytes", "A bound on the process's memory.");
  limits([](const Line& line) { return line.limit.limit_bytes; });
  out->Gauge("varlane_memory_used_bytes",
             "Use that cannot be reclaimed, counted against a limit.");
  limits([](const Line& line) { return line.limit.used_bytes; });
  out->Gauge("varlane_memory_room_bytes",
             "What a limit has left for claims: available, less its reserve "
             "and what is promised.");
  limits([](const Line& line) { return line.room_bytes; });
  // Claims of one use and name may be several: a series has one value.
  std::vector<MemoryClaimRequest> claims;
  for (const MemoryClaimRequest& claim : report.claims) {
    const auto same = std::find_if(
        claims.begin(), claims.end(), [&](const MemoryClaimRequest& other) {
          return other.use == claim.use && other.name == claim.name;
        });
    if (same == claims.end()) {
      claims.push_back(claim);
    } else {
      same->bytes += claim.bytes;
    }
  }
  out->Gauge("varlane_memory_claim_bytes", "Memory promised, by use and name.");
  for (const MemoryClaimRequest& claim : claims) {
    out->Sample({{"use", MemoryUseName(claim.use)}, {"name", claim.name}},
                claim.bytes);
  }
}

Status ValidateLabels(std::span<const MetricsLabel> labels) {
  for (size_t i = 0; i < labels.size(); ++i) {
    const std::string& name = labels[i].name;
    VARLANE_REQUIRE_ARG(Exposition::IsLabelName(name), "labels[", i,
                        "].name = \"", name,
                        "\", but must be letters, digits and underscores");
    VARLANE_REQUIRE_ARG(std::find(kOwnLabels.begin(), kOwnLabels.end(), name) ==
                            kOwnLabels.end(),
                        "labels[", i, "].name = \"", name,
                        "\", but samples use it themselves");
    for (size_t j = 0; j < i; ++j) {
      VARLANE_REQUIRE_ARG(labels[j].name != name, "labels[", i, "].name = \"",
                          name, "\", as has labels[", j, "]");
    }
  }
  return {};
}

}  // namespace

Result<std::string> PrometheusText(const Metrics& metrics,
                                   std::span<const MetricsLabel> labels) try {
  VARLANE_RETURN_IF_ERROR(ValidateLabels(labels));
  Exposition out(labels);
  if (metrics.pool) {
    WriteBlocks(*metrics.pool, &out);
    WriteSlabs(metrics.pool->stats, &out);
    WriteNodes(*metrics.pool, &out);
    WriteTenants(*metrics.pool, &out);
    WritePrefixes(metrics.pool->prefixes, &out);
  }
  if (metrics.scheduler) WriteScheduler(*metrics.scheduler, &out);
  if (metrics.swap) WriteSwap(*metrics.swap, &out);
  if (metrics.pressure) WritePressure(*metrics.pressure, &out);
  if (metrics.account) WriteAccount(*metrics.account, &out);
  return out.text();
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory for the metrics' text");
}

}  // namespace varlane
