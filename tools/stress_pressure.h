// StressPressure: what makes a pool smaller and larger between steps, and the
// account of what that took.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_STRESS_PRESSURE_H_
#define VARLANE_TOOLS_STRESS_PRESSURE_H_

#include <cstdint>
#include <vector>

#include "tools/random.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane::tools {

struct StressCounts {
  int64_t shrinks = 0;    // times that slabs were given back
  int64_t growths = 0;    // times that some were regained
  int64_t postponed = 0;  // asked again later: a transfer held the blocks, or
                          // running requests needed them
  int64_t blocks_given_back = 0;
  int64_t blocks_regained = 0;
  int64_t bytes_released = 0;
  int64_t bytes_regained = 0;
  int64_t rss_fell_bytes = 0;  // over the shrinks: what the system really got
  int64_t moved_blocks = 0;
  std::vector<double> shrink_seconds;  // [shrinks]
  std::vector<double> growth_seconds;  // [growths]
};

// Threads: one, the engine's.
class StressPressure {
 public:
  virtual ~StressPressure() = default;
  // Errors: those of the pool that do not say "not now".
  virtual Status BetweenSteps() = 0;
  // No more pressure from now on: what was given back comes again, at once or
  // with the next calls of BetweenSteps.
  virtual Status Stop() = 0;
  const StressCounts& counts() const { return counts_; }

 protected:
  // The pool and the process before something that may change their size.
  struct Before {
    KvPoolStats pool;
    int64_t rss_bytes = 0;
    int64_t time_ns = 0;
  };
  static Before Look(const KvPool& pool);
  // Counts what has changed since. Returns whether anything has.
  bool Count(const Before& before, const KvPool& pool);

 private:
  StressCounts counts_;

 protected:
  void CountPostponed() { ++counts_.postponed; }
};

// Sets the pool's limit every `period` steps: down to a random size of at least
// `least_blocks`, so that every request can still end, then back to
// `full_blocks`.
class LimitSchedule final : public StressPressure {
 public:
  // Lifetime: `pool` must outlive it.
  LimitSchedule(KvPool* pool, int64_t period, int64_t least_blocks,
                uint64_t seed)
      : pool_(pool),
        period_(period),
        least_blocks_(least_blocks),
        full_blocks_(pool->capacity_blocks()),
        random_(seed) {}

  Status BetweenSteps() override;
  Status Stop() override;

 private:
  Status Resize(int64_t blocks);

  KvPool* const pool_;
  const int64_t period_;
  const int64_t least_blocks_;
  const int64_t full_blocks_;
  SplitMix64 random_;
  int64_t steps_ = 0;
  bool is_small_ = false;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_STRESS_PRESSURE_H_
