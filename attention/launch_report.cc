// LaunchReport's arithmetic.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/attention.h"

namespace varlane {

LaunchReport& operator+=(LaunchReport& to, const LaunchReport& other) noexcept {
  to.threadgroups += other.threadgroups;
  to.surplus_threadgroups += other.surplus_threadgroups;
  to.owner_searches += other.owner_searches;
  to.owner_lookups += other.owner_lookups;
  to.owner_planned += other.owner_planned;
  to.owner_padded += other.owner_padded;
  to.spread_partitions += other.spread_partitions;
  to.merges += other.merges;
  to.kv_bytes += other.kv_bytes;
  to.flops += other.flops;
  to.home_threadgroups += other.home_threadgroups;
  to.stolen_threadgroups += other.stolen_threadgroups;
  to.local_bytes += other.local_bytes;
  to.remote_bytes += other.remote_bytes;
  to.seconds += other.seconds;
  to.mean_worker_seconds += other.mean_worker_seconds;
  to.longest_worker_seconds += other.longest_worker_seconds;
  return to;
}

}  // namespace varlane
