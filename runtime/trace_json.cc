// Tracer, and its slices as Chrome's JSON.
//
// SPDX-License-Identifier: Apache-2.0

#include <bit>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/strings.h"
#include "runtime/tracing.h"

namespace varlane {
namespace {

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      quoted += escape;
    } else {
      quoted += c;
    }
  }
  return quoted += '"';
}

// Of microseconds, to the nanosecond.
std::string Micros(int64_t ns) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.3f", static_cast<double>(ns) * 1e-3);
  return text;
}

// Tracks: a worker is one, whichever threads it ran on. Worker 0 is whoever
// calls: several callers at once would overlap, so each thread has its own.
class Tracks {
 public:
  int Of(int worker, size_t ring) {
    const auto key = std::pair(worker, worker == 0 ? ring : 0);
    const auto [at, is_new] = tracks_.try_emplace(key, 0);
    if (is_new) {
      at->second = worker > 0 ? worker + 1
                              : (num_callers_ == 0 ? 1 : 10000 + num_callers_);
      if (worker == 0) ++num_callers_;
    }
    return at->second;
  }

  std::string Names() const {
    std::string json;
    for (const auto& [key, track] : tracks_) {
      std::string name = StrCat("worker ", key.first);
      if (key.first == 0) {
        name +=
            track == 1 ? " (caller)" : StrCat(" (caller ", track - 9999, ")");
      }
      json += StrCat(
          ",\n{\"ph\":\"M\",\"pid\":1,\"tid\":", track,
          ",\"name\":\"thread_name\",\"args\":{\"name\":", Quoted(name), "}}");
      json += StrCat(",\n{\"ph\":\"M\",\"pid\":1,\"tid\":", track,
                     ",\"name\":\"thread_sort_index\",\"args\":"
                     "{\"sort_index\":",
                     track, "}}");
    }
    return json;
  }

 private:
  std::map<std::pair<int, size_t>, int> tracks_;
  int num_callers_ = 0;
};

std::string ArgsOf(const Slice& slice) {
  if (slice.kind == SliceKind::kHost) return {};
  if (slice.kind == SliceKind::kLaunch) {
    return StrCat("\"threadgroups\":", slice.index,
                  ",\"surplus\":", slice.note.sequence,
                  ",\"bytes\":", slice.note.bytes);
  }
  std::string args = StrCat("\"threadgroup\":", slice.index);
  const TraceNote& note = slice.note;
  if (note.sequence >= 0) args += StrCat(",\"sequence\":", note.sequence);
  if (note.head >= 0) args += StrCat(",\"head\":", note.head);
  if (note.partition_begin >= 0) {
    args += StrCat(",\"partition_begin\":", note.partition_begin,
                   ",\"partition_end\":", note.partition_end);
  }
  if (note.bytes > 0) args += StrCat(",\"bytes\":", note.bytes);
  return args;
}

const char* CategoryOf(SliceKind kind) {
  switch (kind) {
    case SliceKind::kThreadgroup:
      return "threadgroup";
    case SliceKind::kLaunch:
      return "launch";
    case SliceKind::kHost:
      return "host";
    case SliceKind::kCounter:
    case SliceKind::kReadRate:
      return "counter";
  }
  return "?";
}

// What reads at the same time adds up: launches of several callers, and nodes
// of a graph, overlap.
class ReadRates {
 public:
  void Add(int64_t begin_ns, int64_t end_ns, int64_t bytes) {
    if (end_ns <= begin_ns) return;
    const double rate =
        static_cast<double>(bytes) / static_cast<double>(end_ns - begin_ns);
    Step& up = steps_[begin_ns];
    up.rate += rate;
    ++up.readers;
    Step& down = steps_[end_ns];
    down.rate -= rate;
    --down.readers;
  }

  // Calls point(ns, rate), in bytes per ns, wherever it changes, in order.
  template <typename Point>
  void ForEach(const Point& point) const {
    Step sum;
    for (const auto& [ns, step] : steps_) {
      sum.rate += step.rate;
      sum.readers += step.readers;
      if (sum.readers == 0) sum.rate = 0;  // but for rounding
      point(ns, sum.rate);
    }
  }

 private:
  struct Step {
    double rate = 0;
    int readers = 0;
  };
  std::map<int64_t, Step> steps_;
};

// Puts the events together.
class Writer {
 public:
  Writer(const TraceClock& clock, const std::vector<std::string>& names)
      : ns_per_tick_(clock.NsPerTick()) {
    for (const std::string& name : names) names_.push_back(Quoted(name));
    json_ =
        StrCat("{\"displayTimeUnit\":\"ns\",\"otherData\":{\"clock\":\"",
               clock.uses_counter() ? "time stamp counter" : "steady_clock",
               "\"},\"traceEvents\":[\n"
               "{\"ph\":\"M\",\"pid\":1,\"tid\":0,\"name\":\"process_name\","
               "\"args\":{\"name\":\"varlane\"}}");
  }

  void Add(const Slice& slice, size_t ring) {
    const int64_t begin = NsOf(slice.begin);
    const int64_t end = NsOf(slice.end);
    if (slice.kind == SliceKind::kReadRate) {
      read_rates_.Add(begin, end, slice.note.bytes);
      return;
    }
    if (slice.kind == SliceKind::kCounter) {
      return AddPoint(begin, names_[slice.name],
                      std::bit_cast<double>(slice.note.bytes));
    }
    json_ += StrCat(
        ",\n{\"ph\":\"X\",\"pid\":1,\"tid\":", tracks_.Of(slice.worker, ring),
        ",\"ts\":", Micros(begin), ",\"dur\":", Micros(end - begin),
        ",\"cat\":\"", CategoryOf(slice.kind),
        "\",\"name\":", names_[slice.name], ",\"args\":{", ArgsOf(slice), "}}");
  }

  std::string Finish() {
    read_rates_.ForEach([this](int64_t ns, double rate) {
      AddPoint(ns, names_[Tracer::Impl::kReadRateName], rate);
    });
    return std::move(json_) + tracks_.Names() + "\n]}\n";
  }

 private:
  int64_t NsOf(int64_t ticks) const {
    return std::llround(static_cast<double>(ticks) * ns_per_tick_);
  }

  void AddPoint(int64_t ns, const std::string& name, double value) {
    char text[40];
    std::snprintf(text, sizeof(text), "%.9g",
                  std::isfinite(value) ? value : 0.0);
    json_ += StrCat(",\n{\"ph\":\"C\",\"pid\":1,\"tid\":0,\"ts\":", Micros(ns),
                    ",\"cat\":\"", CategoryOf(SliceKind::kCounter),
                    "\",\"name\":", name, ",\"args\":{\"value\":", text, "}}");
  }

  double ns_per_tick_;
  std::vector<std::string> names_;  // quoted
  Tracks tracks_;
  ReadRates read_rates_;
  std::string json_;
};

}  // namespace

std::string Tracer::Impl::ToJson() const {
  const std::lock_guard lock(mutex_);
  Writer writer(clock_, names_);
  for (size_t ring = 0; ring < rings_.size(); ++ring) {
    std::vector<Slice> slices;
    rings_[ring]->Read(&slices);
    for (const Slice& slice : slices) writer.Add(slice, ring);
  }
  return writer.Finish();
}

Tracer::Tracer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tracer::~Tracer() = default;

Result<std::unique_ptr<Tracer>> Tracer::Create(const TraceOptions& options) {
  constexpr size_t kMost = size_t{1} << 32;
  VARLANE_REQUIRE_ARG(
      options.slices_per_thread > 0 && options.slices_per_thread <= kMost,
      "slices_per_thread = ", options.slices_per_thread, ", must be in [1, ",
      kMost, "]");
  try {
    return std::unique_ptr<Tracer>(new Tracer(std::make_unique<Impl>(options)));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for a Tracer");
  }
}

void Tracer::Counter(std::string_view name, double value) noexcept {
  TraceRing* const ring = impl_->Ring();
  if (ring == nullptr) return;
  Slice slice;
  slice.kind = SliceKind::kCounter;
  slice.name = impl_->Intern(name);
  slice.begin = slice.end = impl_->clock().Now();
  slice.note.bytes = std::bit_cast<int64_t>(value);
  ring->Push(slice);
}

TraceStats Tracer::stats() const noexcept { return impl_->stats(); }

Result<std::string> Tracer::ToJson() const {
  try {
    return impl_->ToJson();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for a trace");
  }
}

Status Tracer::WriteJson(const std::string& path) const {
  const Result<std::string> json = ToJson();
  VARLANE_RETURN_IF_ERROR(json.status());
  std::ofstream file(path, std::ios::binary);
  file << *json;
  file.close();
  VARLANE_REQUIRE(file.good(), StatusCode::kUnavailable, "cannot write \"",
                  path, "\"");
  return {};
}

}  // namespace varlane
