// SPDX-License-Identifier: Apache-2.0

#include "tools/stress_pressure.h"

#include <algorithm>

#include "tools/clock.h"
#include "tools/process_memory.h"
#include "tools/status_util.h"

namespace varlane::tools {

StressPressure::Before StressPressure::Look(const KvPool& pool) {
  Before before;
  before.pool = pool.stats();
  before.rss_bytes = ResidentBytes();
  before.time_ns = NowNs();
  return before;
}

bool StressPressure::Count(const Before& before, const KvPool& pool) {
  const double took = static_cast<double>(NowNs() - before.time_ns) * 1e-9;
  const int64_t rss_bytes = ResidentBytes();
  const KvPoolStats now = pool.stats();
  const int64_t blocks = now.capacity_blocks - before.pool.capacity_blocks;
  const int64_t bytes = now.committed_bytes - before.pool.committed_bytes;
  const int64_t moved = now.moved_blocks - before.pool.moved_blocks;
  counts_.moved_blocks += moved;
  if (bytes < 0) {
    ++counts_.shrinks;
    counts_.blocks_given_back -= blocks;
    counts_.bytes_released -= bytes;
    counts_.rss_fell_bytes += before.rss_bytes - rss_bytes;
    counts_.shrink_seconds.push_back(took);
  } else if (bytes > 0) {
    ++counts_.growths;
    counts_.blocks_regained += blocks;
    counts_.bytes_regained += bytes;
    counts_.growth_seconds.push_back(took);
  }
  return bytes != 0 || blocks != 0 || moved != 0;
}

// --- a schedule of limits ----------------------------------------------------

Status LimitSchedule::BetweenSteps() {
  if (++steps_ < period_) return {};
  if (is_small_) return Resize(full_blocks_);
  // Small ones rather than large ones.
  const double share = random_.Uniform();
  return Resize(
      least_blocks_ +
      static_cast<int64_t>(share * share *
                           static_cast<double>(full_blocks_ - least_blocks_)));
}

Status LimitSchedule::Stop() {
  return is_small_ ? Resize(full_blocks_) : Status();
}

Status LimitSchedule::Resize(int64_t blocks) {
  const Before before = Look(*pool_);
  // A limit counts whole slabs: one more wherever blocks are, or the last
  // request might not fit any more. A slab of sharded heads is of all nodes.
  const int places = pool_->num_nodes() / pool_->num_shards();
  int64_t bytes =
      blocks * pool_->layout().block_bytes() + before.pool.slab_bytes * places;
  // What running requests hold is not ours to take.
  if (blocks < full_blocks_) bytes = std::max(bytes, pool_->MinLimitBytes());
  const Result<KvResize> resize = pool_->SetLimit(bytes);
  if (!resize.ok()) {
    const StatusCode code = resize.status().code();
    if (code != StatusCode::kFailedPrecondition &&
        code != StatusCode::kResourceExhausted) {
      return resize.status();
    }
    CountPostponed();
    return {};
  }
  steps_ = 0;
  is_small_ = blocks < full_blocks_;
  (void)Count(before, *pool_);
  return {};
}

}  // namespace varlane::tools
