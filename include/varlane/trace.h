// Tracer: what each worker did when, for Chrome's and Perfetto's trace viewers.
//
// Each worker is a track, each threadgroup a slice; launches, host functions
// and counters stand beside them. Attached to a Runtime (Runtime::SetTracer),
// it records into a ring of slices for each thread, without locks; nothing is
// formatted before ToJson or WriteJson. Layer 1; docs/tracing.md.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TRACE_H_
#define VARLANE_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "varlane/export.h"
#include "varlane/status.h"

namespace varlane {

struct TraceOptions {
  // Slices kept for each thread, 64 bytes each; older ones are overwritten.
  size_t slices_per_thread = size_t{1} << 16;
};

// What a threadgroup says of its slice; -1 = not said.
struct TraceNote {
  int64_t sequence = -1;
  int32_t head = -1;  // the first, where there are several
  int32_t partition_begin = -1;
  int32_t partition_end = -1;
  int64_t bytes = 0;  // read
};

struct TraceStats {
  int64_t slices = 0;       // recorded, counters included
  int64_t overwritten = 0;  // of those: lost to newer ones
  int num_threads = 0;
};

// Threads: every member is safe from any thread, also while launches record;
//          ToJson then has what was complete when it came by.
class VARLANE_EXPORT Tracer {
 public:
  // Errors: kInvalidArgument (no slices), kResourceExhausted.
  static Result<std::unique_ptr<Tracer>> Create(
      const TraceOptions& options = {});
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // A point of the counter track `name`, now. Lost where memory is short.
  void Counter(std::string_view name, double value) noexcept;

  TraceStats stats() const noexcept;

  // {"traceEvents": [...]}: the JSON object format of Chrome's trace viewer,
  // which ui.perfetto.dev reads too. Times are microseconds since Create.
  // Errors: kResourceExhausted; WriteJson kUnavailable naming the file.
  Result<std::string> ToJson() const;
  Status WriteJson(const std::string& path) const;

  class Impl;  // private to the library
  Impl* impl() const noexcept { return impl_.get(); }

 private:
  explicit Tracer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_TRACE_H_
