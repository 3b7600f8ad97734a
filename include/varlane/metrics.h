// Metrics: one snapshot of everything that serves, and its Prometheus text.
//
// Taken while the service runs; each part is consistent in itself, the parts
// are read one after the other. Every metric: docs/metrics.md. Layer 4.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_METRICS_H_
#define VARLANE_METRICS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "varlane/export.h"
#include "varlane/kv_pool.h"
#include "varlane/memory_account.h"
#include "varlane/scheduler.h"
#include "varlane/serving_pressure.h"
#include "varlane/status.h"
#include "varlane/swap.h"

namespace varlane {

// What to ask; null = not there. They must live for the call only.
struct MetricsSources {
  const KvPool* pool = nullptr;
  const Scheduler* scheduler = nullptr;
  const SequenceSwapper* swapper = nullptr;
  const ServingPressure* pressure = nullptr;
  const MemoryAccount* account = nullptr;
  // Also ask the kernel where each page of the pool is: 25 ms a GiB.
  bool placement = false;
};

struct KvPoolMetrics {
  KvPoolStats stats;
  int64_t block_bytes = 0;
  int64_t lent_blocks = 0;  // given back for a while
  std::vector<KvNodeStats> nodes;
  std::vector<KvPlacement> placement;  // by node; empty: not asked for
  std::vector<KvTenant> tenants;       // by id
  PrefixCacheStats prefixes;           // all 0 without a prefix cache
};

struct PressureMetrics {
  ServingPressureStats stats;
  PressureListenerUse listener;
};

// A value; what was not asked is empty.
struct Metrics {
  std::optional<KvPoolMetrics> pool;
  std::optional<SchedulerStats> scheduler;
  std::optional<SwapStats> swap;
  std::optional<PressureMetrics> pressure;
  std::optional<MemoryAccountReport> account;
};

// Errors: kResourceExhausted (heap); those of MemoryAccount::Report.
// Threads: safe from any, whatever runs on the sources meanwhile.
// Cost: microseconds, and some milliseconds with an account, which reads the
//       limits anew.
VARLANE_EXPORT Result<Metrics> TakeMetrics(const MetricsSources& sources);

// Added to every sample: {"replica", "3"}.
struct MetricsLabel {
  std::string name;
  std::string value;
};

// The text exposition format, version 0.0.4: answer it as "text/plain;
// version=0.0.4; charset=utf-8". Bytes that are no UTF-8 become U+FFFD.
// Errors: kInvalidArgument for a label whose name is none, is repeated or is
//         one of ours; kResourceExhausted (heap).
VARLANE_EXPORT Result<std::string> PrometheusText(
    const Metrics& metrics, std::span<const MetricsLabel> labels = {});

}  // namespace varlane

#endif  // VARLANE_METRICS_H_
