// SPDX-License-Identifier: Apache-2.0

#include "base/strings.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <system_error>

namespace varlane {

std::string ErrnoText(int error) {
  return std::generic_category().message(error);
}

std::string FormatBytes(int64_t bytes) {
  static constexpr std::array<const char*, 6> kUnits = {"B",   "KiB", "MiB",
                                                        "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  const bool whole = value == std::floor(value);
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), whole ? "%.0f %s" : "%.2f %s", value,
                kUnits[unit]);
  return text.data();
}

}  // namespace varlane
