// Timestamps as traces write them: UTC, "2023-11-16 18:15:46.6805900".
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_TIMESTAMP_H_
#define VARLANE_TOOLS_TIMESTAMP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace varlane::tools {

// Nanoseconds since 1970 of a date in the years 1970 to 2200; up to nine
// fractional digits, a "T" for the blank, a "Z" or "+00:00" at the end.
// Nothing where the text is no such date.
std::optional<int64_t> ParseTimestampNs(std::string_view text);

// With seven fractional digits. Requires: ns >= 0.
std::string FormatTimestamp(int64_t ns);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_TIMESTAMP_H_
