// SPDX-License-Identifier: Apache-2.0

#include "base/log.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "base/strings.h"

namespace varlane {
namespace {

constexpr std::array<const char*, 5> kLevelNames = {"debug", "info", "warning",
                                                    "error", "off"};

std::atomic<LogLevel> least_level = LogLevel::kOff;

// Shared by those that run the callback, so that whoever replaces it waits for
// them. Never destroyed: statics may log on their way out.
struct Sink {
  std::shared_mutex mutex;
  LogCallback callback;  // guarded by mutex
};
Sink& TheSink() {
  static auto* const sink = new Sink;
  return *sink;
}

// A callback that logs would ask for the lock it holds.
constinit thread_local bool is_inside = false;

}  // namespace

const char* LogLevelName(LogLevel level) {
  const auto index = static_cast<size_t>(level);
  return index < kLevelNames.size() ? kLevelNames[index] : "unknown";
}

std::string FormatLogRecord(const LogRecord& record) {
  std::string text = StrCat(record.event, ": ", record.message);
  const char* before = " [";
  for (const LogField& field : record.fields) {
    text += StrCat(before, field.key, "=");
    std::visit([&](const auto& value) { text += StrCat(value); }, field.value);
    before = " ";
  }
  if (!record.fields.empty()) text += "]";
  return text;
}

void SetLog(LogCallback callback, LogLevel least) {
  Sink& sink = TheSink();
  {
    const std::lock_guard lock(sink.mutex);
    least_level.store(callback ? least : LogLevel::kOff,
                      std::memory_order_relaxed);
    sink.callback.swap(callback);
  }
  // What the callback before held goes without the lock: it may be anything.
}

bool IsLogged(LogLevel level) noexcept {
  return level >= least_level.load(std::memory_order_relaxed);
}

void Log(LogLevel level, std::string_view event, std::string_view message,
         std::initializer_list<LogField> fields) noexcept {
  if (!IsLogged(level) || is_inside) return;
  is_inside = true;
  try {
    Sink& sink = TheSink();
    const std::shared_lock lock(sink.mutex);
    // Again, since it may have been replaced: IsLogged was only a hint.
    if (sink.callback && IsLogged(level)) {
      sink.callback({level, event, message, {fields.begin(), fields.size()}});
    }
  } catch (...) {
    // A log that fails must not take a service along.
  }
  is_inside = false;
}

}  // namespace varlane
