// SPDX-License-Identifier: Apache-2.0

#include "tools/prefix_hits.h"

#include <limits>
#include <memory>
#include <unordered_map>

#include "tools/clock.h"
#include "tools/status_util.h"
#include "varlane/kv_pool.h"

namespace varlane::tools {
namespace {

// The least that a pool has.
constexpr KvLayout kLayout = {.dtype = DType::kBF16,
                              .num_layers = 1,
                              .num_kv_heads = 1,
                              .head_size = 8,
                              .v_head_size = 8,
                              .block_size = 16};

// A number for each hash_id, in order of appearance: what its block's tokens
// are. Different blocks differ in their first token, so nothing is found but
// whole blocks.
class TokenNumbers {
 public:
  int32_t Of(int64_t hash_id) {
    return numbers_.try_emplace(hash_id, static_cast<int32_t>(numbers_.size()))
        .first->second;
  }

 private:
  std::unordered_map<int64_t, int32_t> numbers_;
};

class PrefixSimulation {
 public:
  explicit PrefixSimulation(KvPool* pool) : pool_(pool) {
    hits_.capacity_blocks = pool->capacity_blocks();
  }

  Status Run(const TraceRequest& request) {
    const auto num_blocks = static_cast<int64_t>(request.hash_ids.size());
    hits_.blocks += num_blocks;
    tokens_.clear();
    for (const int64_t hash_id : request.hash_ids) {
      tokens_.insert(tokens_.end(), size_t{kLayout.block_size},
                     numbers_.Of(hash_id));
    }
    // A match leaves a token to sample from: one more than the trace says, so
    // that the last block can be found too.
    tokens_.push_back(-1);
    const auto start = Clock::now();
    VARLANE_TOOLS_TRY(Serve(num_blocks * kLayout.block_size));
    hits_.seconds += SecondsSince(start);
    return {};
  }

  // Errors: kInternal where the pool counted something else.
  Result<PrefixHits> Finish() {
    const PrefixCacheStats stats = pool_->prefix_stats();
    hits_.evicted_blocks = stats.evicted_blocks;
    if (stats.hit_blocks != hits_.hit_blocks ||
        stats.lookup_blocks != hits_.blocks) {
      return Fail(StatusCode::kInternal,
                  "{} of {} blocks were found, but the pool counted {} of {}",
                  hits_.hit_blocks, hits_.blocks, stats.hit_blocks,
                  stats.lookup_blocks);
    }
    return hits_;
  }

  const PrefixHits& hits() const { return hits_; }

 private:
  Status Serve(int64_t num_tokens) {
    VARLANE_TOOLS_ASSIGN(const PrefixMatch match,
                         pool_->MatchPrefix({}, tokens_));
    hits_.hit_blocks += match.shared_blocks;
    VARLANE_TOOLS_ASSIGN(const Admission room,
                         pool_->Append(match.seq, num_tokens - match.tokens));
    if (room.admitted()) {
      const std::span<const int32_t> tokens(tokens_);
      VARLANE_TOOLS_TRY(pool_->CommitTokens(
          match.seq, match.tokens,
          tokens.subspan(static_cast<size_t>(match.tokens),
                         static_cast<size_t>(num_tokens - match.tokens))));
    } else {
      ++hits_.too_large_requests;
    }
    return pool_->Free(match.seq);
  }

  KvPool* pool_;
  TokenNumbers numbers_;
  std::vector<int32_t> tokens_;
  PrefixHits hits_;
};

}  // namespace

int64_t DistinctHashIds(const Trace& trace) {
  std::unordered_map<int64_t, bool> seen;
  for (const TraceRequest& request : trace.requests) {
    for (const int64_t hash_id : request.hash_ids) seen[hash_id] = true;
  }
  return static_cast<int64_t>(seen.size());
}

Result<PrefixHits> MeasurePrefixHits(const Trace& trace,
                                     int64_t capacity_blocks, Runtime* runtime,
                                     const OnPrefixHits& on_request) {
  if (DistinctHashIds(trace) == 0) {
    return BadArgument("{} has no hash_ids: only Mooncake's format has",
                       trace.source);
  }
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<KvPool> pool,
                       KvPool::Create({.layout = kLayout,
                                       .num_blocks = capacity_blocks,
                                       .prefix_cache = true},
                                      runtime));
  PrefixSimulation simulation(pool.get());
  for (const TraceRequest& request : trace.requests) {
    VARLANE_TOOLS_TRY(simulation.Run(request));
    if (on_request) on_request(simulation.hits());
  }
  return simulation.Finish();
}

}  // namespace varlane::tools
