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
  switch (slice.kind) {
    case SliceKind::kCounter: {
      const auto value = std::bit_cast<double>(slice.note.bytes);
      char text[40];
      std::snprintf(text, sizeof(text), "%.9g",
                    std::isfinite(value) ? value : 0.0);
      return StrCat("\"value\":", text);
    }
    case SliceKind::kLaunch:
      return StrCat("\"threadgroups\":", slice.index,
                    ",\"surplus\":", slice.note.sequence,
                    ",\"bytes\":", slice.note.bytes);
    case SliceKind::kHost:
      return {};
    case SliceKind::kThreadgroup:
      break;
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
      return "counter";
  }
  return "?";
}

}  // namespace

std::string Tracer::Impl::ToJson() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const std::string& name : names_) names.push_back(Quoted(name));
  Tracks tracks;
  std::string json =
      "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
      "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\","
      "\"args\":{\"name\":\"varlane\"}}";
  for (size_t ring = 0; ring < rings_.size(); ++ring) {
    std::vector<Slice> slices;
    rings_[ring]->Read(&slices);
    for (const Slice& slice : slices) {
      const bool is_counter = slice.kind == SliceKind::kCounter;
      json += StrCat(",\n{\"ph\":\"", is_counter ? "C" : "X",
                     "\",\"pid\":1,\"tid\":",
                     is_counter ? 0 : tracks.Of(slice.worker, ring),
                     ",\"ts\":", Micros(slice.begin_ns));
      if (!is_counter) {
        json += StrCat(",\"dur\":", Micros(slice.end_ns - slice.begin_ns));
      }
      json += StrCat(",\"cat\":\"", CategoryOf(slice.kind),
                     "\",\"name\":", names[slice.name], ",\"args\":{",
                     ArgsOf(slice), "}}");
    }
  }
  return json + tracks.Names() + "\n]}\n";
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
  slice.begin_ns = slice.end_ns = impl_->Now();
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
