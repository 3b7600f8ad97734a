// TakeMetrics: asks every part once.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/metrics.h"

#include <new>
#include <utility>

#include "base/check.h"

namespace varlane {
namespace {

KvPoolMetrics TakePoolMetrics(const KvPool& pool, bool placement) {
  KvPoolMetrics metrics;
  metrics.stats = pool.stats();
  metrics.block_bytes = pool.layout().block_bytes();
  metrics.lent_blocks = pool.lent_blocks();
  for (int node = 0; node < pool.num_nodes(); ++node) {
    metrics.nodes.push_back(pool.node_stats(node));
    if (placement) metrics.placement.push_back(pool.MeasurePlacement(node));
  }
  metrics.tenants = pool.tenants();
  metrics.prefixes = pool.prefix_stats();
  return metrics;
}

}  // namespace

Result<Metrics> TakeMetrics(const MetricsSources& sources) try {
  Metrics metrics;
  if (sources.pool != nullptr) {
    metrics.pool = TakePoolMetrics(*sources.pool, sources.placement);
  }
  if (sources.scheduler != nullptr) {
    metrics.scheduler = sources.scheduler->stats();
  }
  if (sources.swapper != nullptr) metrics.swap = sources.swapper->stats();
  if (sources.pressure != nullptr) {
    metrics.pressure = PressureMetrics{sources.pressure->stats(),
                                       sources.pressure->listener_use()};
  }
  if (sources.account != nullptr) {
    Result<MemoryAccountReport> report = sources.account->Report();
    VARLANE_RETURN_IF_ERROR(report.status());
    metrics.account = *std::move(report);
  }
  return metrics;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory for the metrics");
}

}  // namespace varlane
