// What the library tells a service's log, through one callback.
//
// The library itself writes nowhere. Without a callback nothing is formatted,
// and a record costs one relaxed load. Layer 0; docs/logging.md lists the
// events.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_LOG_H_
#define VARLANE_LOG_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "varlane/export.h"

namespace varlane {

enum class LogLevel : uint8_t {
  kDebug,    // for who works on the library or on its use
  kInfo,     // what an operator may want to know later: sizes, growth
  kWarning,  // works, but worse than it could, or a launch failed
  kError,    // does not work any more
  kOff,      // as a threshold: nothing
};
VARLANE_EXPORT const char* LogLevelName(LogLevel level);  // "warning"

// One fact of a record. Keys are snake_case; units are in the key.
struct LogField {
  std::string_view key;
  std::variant<int64_t, double, std::string_view> value;
};

// Valid during the callback only.
struct LogRecord {
  LogLevel level = LogLevel::kInfo;
  std::string_view event;    // stable, for programs: "launch_failed"
  std::string_view message;  // one sentence, for people
  std::span<const LogField> fields = {};
};

// "launch_failed: the body threw [code=ABORTED threadgroups=64]".
VARLANE_EXPORT std::string FormatLogRecord(const LogRecord& record);

using LogCallback = std::function<void(const LogRecord&)>;

// From now on every record at or above `least` goes to `callback`; an empty one
// ends that. One a process, since pools and runtimes share it. When SetLog
// returns, the callback before is no longer running and never runs again.
//
// Threads: any; the callback is called from whichever thread has something to
//          tell, from several at once. It may use the library, whose records
//          are dropped meanwhile, but must not call SetLog. What it throws is
//          swallowed.
VARLANE_EXPORT void SetLog(LogCallback callback,
                           LogLevel least = LogLevel::kInfo);

}  // namespace varlane

#endif  // VARLANE_LOG_H_
