// Numbers from text: sizes, shares and integers, strict about what is left
// over.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_PARSE_H_
#define VARLANE_TOOLS_PARSE_H_

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "varlane/status.h"

namespace varlane::tools {

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kGiB = int64_t{1} << 30;

// The whole text as a number, or nothing.
template <typename T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// "1.2GB" (powers of 1000), "1.2GiB" (powers of 1024), "512" (bytes).
// Errors: kInvalidArgument quoting the text.
Result<int64_t> ParseBytes(std::string_view text);

// "0.25" or "1/16". Errors: kInvalidArgument quoting the text.
Result<double> ParseFactor(std::string_view text);

// "1.50 GiB", "64.0 KiB", "17 B".
std::string FormatBytes(int64_t bytes);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_PARSE_H_
