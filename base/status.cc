// SPDX-License-Identifier: Apache-2.0

#include "varlane/status.h"

namespace varlane {

const char* StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kCancelled:
      return "CANCELLED";
    case StatusCode::kUnknown:
      return "UNKNOWN";
    case StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case StatusCode::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case StatusCode::kNotFound:
      return "NOT_FOUND";
    case StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case StatusCode::kPermissionDenied:
      return "PERMISSION_DENIED";
    case StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case StatusCode::kAborted:
      return "ABORTED";
    case StatusCode::kOutOfRange:
      return "OUT_OF_RANGE";
    case StatusCode::kUnimplemented:
      return "UNIMPLEMENTED";
    case StatusCode::kInternal:
      return "INTERNAL";
    case StatusCode::kUnavailable:
      return "UNAVAILABLE";
  }
  return "UNKNOWN";
}

Status::Status(StatusCode code, std::string_view message) noexcept
    : code_(code) {
  if (code == StatusCode::kOk) return;
  try {
    message_ = std::make_shared<const std::string>(message);
  } catch (...) {
    message_ = nullptr;  // the code alone must do
  }
}

std::string_view Status::message() const noexcept {
  return message_ ? std::string_view(*message_) : std::string_view();
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  std::string text = StatusCodeName(code_);
  text += ": ";
  text += message();
  return text;
}

}  // namespace varlane
