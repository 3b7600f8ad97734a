// SPDX-License-Identifier: Apache-2.0

#include "tools/trace_file.h"

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <utility>

#include "tools/report.h"
#include "tools/status_util.h"

namespace varlane::tools {

Result<std::unique_ptr<TraceFile>> TraceFile::Start(const std::string& path,
                                                    Runtime* runtime) {
  std::unique_ptr<TraceFile> file(new TraceFile(path, runtime));
  if (path.empty()) return file;
  if (!std::ofstream(path, std::ios::binary).good()) {
    return Fail(StatusCode::kUnavailable, "{} cannot be written", path);
  }
  // 16 MiB a thread: a few minutes of small steps.
  VARLANE_TOOLS_ASSIGN(file->tracer_,
                       Tracer::Create({.slices_per_thread = size_t{1} << 18}));
  runtime->SetTracer(file->tracer_.get());
  return file;
}

TraceFile::~TraceFile() {
  if (tracer_ != nullptr) runtime_->SetTracer(nullptr);
}

Status TraceFile::Finish() {
  if (tracer_ == nullptr) return {};
  runtime_->SetTracer(nullptr);
  VARLANE_TOOLS_TRY(tracer_->WriteJson(path_));
  const TraceStats stats = tracer_->stats();
  fmt::print(
      stderr, "trace: {} slices of {} threads in {}{}\n",
      FormatCount(stats.slices - stats.overwritten), stats.num_threads, path_,
      stats.overwritten == 0 ? ""
                             : fmt::format("; {} older ones were overwritten",
                                           FormatCount(stats.overwritten)));
  return {};
}

}  // namespace varlane::tools
