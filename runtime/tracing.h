// Tracer's inside: rings of slices, and what records into them.
//
// A ring has one writer, its thread. Readers copy what lies before the head and
// then look at the head again: what the writer may have reached meanwhile does
// not count. The words are atomics, which cost what plain stores do.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_TRACING_H_
#define VARLANE_RUNTIME_TRACING_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/trace_clock.h"
#include "varlane/runtime.h"
#include "varlane/trace.h"

namespace varlane {

enum class SliceKind : uint8_t {
  kThreadgroup,
  kLaunch,
  kHost,
  kCounter,   // a point: its value is bit-cast to note.bytes
  kReadRate,  // note.bytes over the time from begin to end
};

struct Slice {
  int64_t begin = 0;  // ticks of the tracer's clock
  int64_t end = 0;
  uint16_t name = 0;  // Tracer::Impl::Intern
  SliceKind kind = SliceKind::kThreadgroup;
  int32_t worker = 0;
  int64_t index = 0;  // threadgroup; of a launch: how many
  TraceNote note;
  // A launch's note.sequence counts its surplus threadgroups.
};

class TraceRing {
 public:
  static constexpr size_t kWords = 8;
  // Throws std::bad_alloc.
  explicit TraceRing(size_t num_slices);

  // By the ring's thread only.
  void Push(const Slice& slice) noexcept;
  // Appends what is complete; throws std::bad_alloc.
  void Read(std::vector<Slice>* slices) const;
  int64_t num_pushed() const noexcept {
    return static_cast<int64_t>(tail_.load(std::memory_order_acquire));
  }
  int64_t num_lost() const noexcept;

 private:
  // A cache line, so that a push waits for one at most.
  struct alignas(64) Words {
    std::array<std::atomic<uint64_t>, kWords> word;
  };
  // One line: a body has driven all of this from the nearest cache by the next
  // push.
  alignas(64) size_t num_slices_;
  std::unique_ptr<Words[]> slots_;  // [num_slices_]
  size_t next_slot_ = 0;            // of the writer, who need not divide
  std::atomic<uint64_t> head_ = 0;  // slices ever begun to be written
  std::atomic<uint64_t> tail_ = 0;  // slices ever complete
};

class Tracer::Impl {
 public:
  static constexpr uint16_t kReadRateName = 1;

  explicit Impl(const TraceOptions& options);

  const TraceClock& clock() const noexcept { return clock_; }
  // The calling thread's ring, made on first use; null when memory is short.
  TraceRing* Ring() noexcept;
  // A number for `name`, the same for the same name; 0 ("?") when there is no
  // more room.
  uint16_t Intern(std::string_view name) noexcept;

  TraceStats stats() const noexcept;
  std::string ToJson() const;

 private:
  const uint64_t id_;  // no other tracer of the process has it
  const size_t slices_per_thread_;
  const TraceClock clock_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::unique_ptr<TraceRing>> rings_;
  std::vector<std::string> names_;
};

// What a traced launch, or a node of a traced graph, adds up.
struct LaunchTrace {
  Tracer::Impl* tracer = nullptr;  // null: not traced
  uint16_t name = 0;
  int64_t begin = 0;  // ticks
  std::atomic<int64_t> bytes = 0;
  std::atomic<int64_t> surplus = 0;

  void Begin(Tracer::Impl* with, std::string_view launch_name) noexcept;
  // A launch's own slice, on the calling thread's track, and its bandwidth.
  void EndLaunch(int worker, int64_t num_threadgroups) noexcept;
  void CountBandwidth() noexcept;
};

// Records the threadgroups that one participant runs; lives on its stack.
class TraceRecorder {
 public:
  TraceRecorder(LaunchTrace* launch, int worker) noexcept;
  ~TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  void Begin() noexcept {
    note_ = {};
    is_surplus_ = false;
  }
  void End(int64_t index) noexcept;

  // The time after the last End, in ticks. Known already, unless that was
  // surplus; what comes next begins then.
  int64_t TimeAfter() noexcept {
    if (!is_timed_) last_ = std::max(last_, clock_.Now());
    is_timed_ = true;
    return last_;
  }
  int64_t TicksIn(std::chrono::nanoseconds time) const noexcept {
    return clock_.TicksIn(time);
  }

 private:
  friend class Threadgroup;
  // What an End needs is in two lines of its own.
  alignas(64) TraceRing* ring_;  // null where memory was short
  const TraceClock clock_;
  int64_t last_;  // where the next slice begins
  uint16_t name_;
  bool is_surplus_ = false;
  bool is_timed_ = true;  // last_ is the time after the last End
  int worker_;
  TraceNote note_;
  int64_t bytes_ = 0;
  int64_t surplus_ = 0;
  LaunchTrace* launch_;
  TraceRecorder* outer_;  // of the thread, around this one
};

// A host function's slice.
class TraceScope {
 public:
  TraceScope(const LaunchTrace& launch, int worker) noexcept;
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  const LaunchTrace& launch_;
  int worker_;
  int64_t begin_ = 0;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_TRACING_H_
