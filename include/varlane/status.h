// Status and Result<T>: errors are values; nothing here throws or aborts.
//
// Codes have the names and numbers of absl::StatusCode and gRPC, so services
// can cast them. A message names the argument, its value and the limit, e.g.
// "block_tables[3][17] = 90210, but the pool has 4096 blocks".
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_STATUS_H_
#define VARLANE_STATUS_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "varlane/export.h"

namespace varlane {

enum class StatusCode : int {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

// "INVALID_ARGUMENT" etc.; a static string.
VARLANE_EXPORT const char* StatusCodeName(StatusCode code);

// A code and, unless ok, one sentence that says what to change.
//
// Cost:    24 bytes; an OK status allocates nothing. Copies share the message.
// Errors:  if the message cannot be allocated the code survives without it.
// Threads: values; as safe as an int.
class [[nodiscard]] VARLANE_EXPORT Status {
 public:
  Status() noexcept = default;  // ok
  Status(StatusCode code, std::string_view message) noexcept;

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  // Empty when ok. Valid as long as any copy of this status lives.
  std::string_view message() const noexcept;
  // "INVALID_ARGUMENT: head_size = 7 ..." or "OK".
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::shared_ptr<const std::string> message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(*explicit*)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(*explicit*)
    if (status_.ok()) {
      status_ = Status(StatusCode::kInternal, "Result made from an OK status");
    }
  }

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }

  // Requires: ok().
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace varlane

#endif  // VARLANE_STATUS_H_
