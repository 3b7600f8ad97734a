// TraceFile: `--trace FILE`, what the workers did as Chrome's JSON.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_TRACE_FILE_H_
#define VARLANE_TOOLS_TRACE_FILE_H_

#include <memory>
#include <string>

#include "varlane/runtime.h"
#include "varlane/status.h"
#include "varlane/trace.h"

namespace varlane::tools {

// Traces a runtime while it lives. Nothing happens without a path.
class TraceFile {
 public:
  // The file is opened at once, so that a bad path fails before the work does.
  static Result<std::unique_ptr<TraceFile>> Start(const std::string& path,
                                                  Runtime* runtime);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  Tracer* tracer() const { return tracer_.get(); }  // null without a path

  // Ends tracing and writes the file; on stderr, how much it holds.
  Status Finish();

 private:
  TraceFile(std::string path, Runtime* runtime)
      : path_(std::move(path)), runtime_(runtime) {}

  std::string path_;
  Runtime* runtime_;
  std::unique_ptr<Tracer> tracer_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_TRACE_FILE_H_
