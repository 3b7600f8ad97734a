// Prefix hits: what a prefix cache of so many blocks would find of a trace.
//
// Runs a trace's hash_ids through a pool's real prefix cache, one block an id,
// requests one after another: match, append the rest, commit, free. No K/V is
// computed, so a day of traffic takes seconds. docs/prefix_cache.md
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_PREFIX_HITS_H_
#define VARLANE_TOOLS_PREFIX_HITS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tools/trace.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::tools {

struct PrefixHits {
  int64_t capacity_blocks = 0;
  int64_t blocks = 0;              // asked for: hash_ids of all requests
  int64_t hit_blocks = 0;          // of these, found
  int64_t evicted_blocks = 0;      // dropped to make room
  int64_t too_large_requests = 0;  // with more blocks than the pool: not run
  double seconds = 0;              // in the pool's calls

  double rate() const {
    return blocks > 0
               ? static_cast<double>(hit_blocks) / static_cast<double>(blocks)
               : 0;
  }
};

// How many different hash_ids the trace has: a cache of so many blocks never
// evicts.
int64_t DistinctHashIds(const Trace& trace);

// Called after each request with the totals so far.
using OnPrefixHits = std::function<void(const PrefixHits&)>;

// A pool of `capacity_blocks` blocks, 512 bytes each, serves the trace.
// Requires: capacity_blocks >= 1.
// Errors: kInvalidArgument (a trace without hash_ids); kResourceExhausted
//         (memory for the pool); kInternal where the pool's own count of hits
//         is another one.
Result<PrefixHits> MeasurePrefixHits(const Trace& trace,
                                     int64_t capacity_blocks, Runtime* runtime,
                                     const OnPrefixHits& on_request = nullptr);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_PREFIX_HITS_H_
