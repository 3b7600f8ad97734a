// SPDX-License-Identifier: Apache-2.0

#include "tools/ballast.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "varlane/memory_budget.h"

namespace varlane::tools {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 20;
// A tick that comes late does not take all at once what others should have had
// time to see.
constexpr int64_t kLongestTickNs = 50'000'000;

int64_t Nanoseconds(double seconds) {
  return static_cast<int64_t>(seconds * 1e9);
}

void* MapChunk() {
  void* const chunk = mmap(nullptr, kChunkBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (chunk == MAP_FAILED) return nullptr;
  // What is touched is what is taken: not the rest of a huge page.
  (void)madvise(chunk, kChunkBytes, MADV_NOHUGEPAGE);
  std::memset(chunk, 0x5a, kChunkBytes);
  return chunk;
}

}  // namespace

int64_t BallastRoomBytes() {
  const Result<MemoryLimits> limits = MemoryLimits::Detect();
  if (!limits.ok()) return 0;
  int64_t room = std::numeric_limits<int64_t>::max();
  for (const MemoryLimit& limit : limits->limits) {
    // Address space that was given back stays reserved.
    if (limit.name == "RLIMIT_AS") continue;
    // Below a quarter of the reserve pressure is critical: so far and a little
    // farther.
    room = std::min(room, limit.available_bytes - limit.reserve_bytes / 16 * 3);
  }
  return std::max<int64_t>(0, room);
}

void Ballast::Begin(Phase phase, int64_t now_ns) {
  phase_ = phase;
  phase_ns_ = now_ns;
}

void Ballast::EndWait(int64_t now_ns) {
  if (wait_begin_ns_ < 0) return;
  const int64_t waited = now_ns - wait_begin_ns_;
  wait_begin_ns_ = -1;
  state_->wait_ns += waited;
  if (waited > state_->longest_wait_ns) state_->longest_wait_ns = waited;
}

bool Ballast::Take(int64_t bytes) {
  const int64_t room = std::min(bytes, BallastRoomBytes());
  int64_t taken = 0;
  for (; taken + kChunkBytes <= room; taken += kChunkBytes) {
    void* const chunk = MapChunk();
    if (chunk == nullptr) break;
    chunks_.push_back(chunk);
    state_->held_bytes += kChunkBytes;
  }
  state_->peak_bytes =
      std::max<int64_t>(state_->peak_bytes, state_->held_bytes);
  return taken + kChunkBytes > bytes;
}

void Ballast::ReleaseTo(int64_t bytes) {
  while (static_cast<int64_t>(chunks_.size()) * kChunkBytes > bytes) {
    munmap(chunks_.back(), kChunkBytes);
    chunks_.pop_back();
    state_->held_bytes -= kChunkBytes;
  }
}

void Ballast::Grow(int64_t now_ns, int64_t elapsed_ns) {
  const double per_ns = static_cast<double>(state_->most_bytes) /
                        std::max(1.0, times_.grow_s * 1e9);
  const auto share =
      static_cast<int64_t>(per_ns * static_cast<double>(elapsed_ns));
  const int64_t missing = height_bytes_ - state_->held_bytes;
  const bool got = Take(std::min(missing, std::max(share, kChunkBytes)));
  if (got) {
    EndWait(now_ns);
  } else if (wait_begin_ns_ < 0) {
    wait_begin_ns_ = now_ns;
    ++state_->waits;
  }
  if (height_bytes_ - state_->held_bytes < kChunkBytes) {
    ++state_->waves;
    Begin(Phase::kHold, now_ns);
  } else if (wait_begin_ns_ >= 0 &&
             now_ns - wait_begin_ns_ > Nanoseconds(times_.patience_s)) {
    EndWait(now_ns);
    ++state_->starved;
    Begin(Phase::kHold, now_ns);
  }
}

void Ballast::Tick(int64_t now_ns) {
  const int64_t elapsed_ns = std::min(now_ns - last_ns_, kLongestTickNs);
  last_ns_ = now_ns;
  if (!state_->presses) {
    EndWait(now_ns);
    ReleaseTo(0);
    phase_ = Phase::kIdle;
    return;
  }
  switch (phase_) {
    case Phase::kIdle:
    case Phase::kHold:
      if (phase_ == Phase::kHold &&
          now_ns - phase_ns_ < Nanoseconds(times_.hold_s)) {
        return;
      }
      ReleaseTo(0);
      rest_ns_ = Nanoseconds(times_.rest_s * (0.5 + random_.Uniform()));
      Begin(Phase::kRest, now_ns);
      return;
    case Phase::kRest: {
      if (now_ns - phase_ns_ < rest_ns_) return;
      const int64_t least = state_->least_bytes;
      const int64_t span = state_->most_bytes - least;
      height_bytes_ = least + static_cast<int64_t>(random_.Uniform() *
                                                   static_cast<double>(span));
      Begin(Phase::kGrow, now_ns);
      return;
    }
    case Phase::kGrow:
      Grow(now_ns, elapsed_ns);
      return;
  }
}

}  // namespace varlane::tools
