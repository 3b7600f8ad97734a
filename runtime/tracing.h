// Tracer's inside: rings of slices, and what records into them.
//
// A ring has one writer, its thread. Readers copy what lies before the head and
// then look at the head again: what the writer may have reached meanwhile does
// not count. The words are atomics, which cost what plain stores do.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_TRACING_H_
#define VARLANE_RUNTIME_TRACING_H_

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

#include "varlane/runtime.h"
#include "varlane/trace.h"

namespace varlane {

enum class SliceKind : uint8_t { kThreadgroup, kLaunch, kHost, kCounter };

struct Slice {
  int64_t begin_ns = 0;  // since the tracer was made
  int64_t end_ns = 0;
  uint16_t name = 0;  // Tracer::Impl::Intern
  SliceKind kind = SliceKind::kThreadgroup;
  int32_t worker = 0;
  int64_t index = 0;  // threadgroup; of a launch: how many
  TraceNote note;
  // A launch's note.sequence counts its surplus threadgroups; a counter's value
  // is bit-cast to note.bytes.
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
  size_t num_slices_;
  std::unique_ptr<Words[]> slots_;  // [num_slices_]
  std::atomic<uint64_t> head_ = 0;  // slices ever begun to be written
  std::atomic<uint64_t> tail_ = 0;  // slices ever complete
};

class Tracer::Impl {
 public:
  explicit Impl(const TraceOptions& options);

  std::chrono::steady_clock::time_point TimeOf(int64_t ns) const noexcept {
    return start_ + std::chrono::nanoseconds(ns);
  }
  int64_t Now() const noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now() - start_)
        .count();
  }
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
  const std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::unique_ptr<TraceRing>> rings_;
  std::vector<std::string> names_;
};

// What a traced launch, or a node of a traced graph, adds up.
struct LaunchTrace {
  Tracer::Impl* tracer = nullptr;  // null: not traced
  uint16_t name = 0;
  int64_t begin_ns = 0;
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

  // The time after the last End. Known already, unless that was surplus: clocks
  // cost as much as the rest of a slice.
  std::chrono::steady_clock::time_point TimeAfter() const noexcept {
    return is_timed_ ? launch_->tracer->TimeOf(last_ns_)
                     : std::chrono::steady_clock::now();
  }

 private:
  friend class Threadgroup;
  LaunchTrace* launch_;
  TraceRing* ring_;
  int worker_;
  int64_t last_ns_;
  int64_t bytes_ = 0;
  int64_t surplus_ = 0;
  bool is_surplus_ = false;
  bool is_timed_ = false;
  TraceNote note_;
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
  int64_t begin_ns_ = 0;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_TRACING_H_
