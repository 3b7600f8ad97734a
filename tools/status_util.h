// Errors of the tools: formatted Status values and two early-return macros.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_STATUS_UTIL_H_
#define VARLANE_TOOLS_STATUS_UTIL_H_

#include <fmt/format.h>

#include <utility>

#include "varlane/status.h"

namespace varlane::tools {

// Fail(StatusCode::kNotFound, "trace {}: cannot be opened", path)
template <typename... Args>
Status Fail(StatusCode code, fmt::format_string<Args...> format,
            Args&&... args) {
  return {code, fmt::format(format, std::forward<Args>(args)...)};
}

template <typename... Args>
Status BadArgument(fmt::format_string<Args...> format, Args&&... args) {
  return {StatusCode::kInvalidArgument,
          fmt::format(format, std::forward<Args>(args)...)};
}

}  // namespace varlane::tools

// Returns the error of a Status expression, if there is one.
#define VARLANE_TOOLS_TRY(expr)                                        \
  do {                                                                 \
    if (::varlane::Status tools_status = (expr); !tools_status.ok()) { \
      return tools_status;                                             \
    }                                                                  \
  } while (false)

#define VARLANE_TOOLS_CONCAT_(a, b) a##b
#define VARLANE_TOOLS_CONCAT(a, b) VARLANE_TOOLS_CONCAT_(a, b)
#define VARLANE_TOOLS_ASSIGN_(result, lhs, expr) \
  auto result = (expr);                          \
  if (!result.ok()) return result.status();      \
  lhs = std::move(result).value()
// VARLANE_TOOLS_ASSIGN(const int x, Parse(text)): the value, or return.
#define VARLANE_TOOLS_ASSIGN(lhs, expr)                                     \
  VARLANE_TOOLS_ASSIGN_(VARLANE_TOOLS_CONCAT(tools_result_, __LINE__), lhs, \
                        expr)

#endif  // VARLANE_TOOLS_STATUS_UTIL_H_
