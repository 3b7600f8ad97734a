// Numbers from text.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/parse.h"

#include <array>
#include <cctype>
#include <cmath>

#include "tools/status_util.h"

namespace varlane::tools {
namespace {

// The factor of "", "B", "kB", "KiB" ... in any case, or 0.
double UnitFactor(std::string_view unit) {
  if (unit.empty() || unit == "B" || unit == "b") return 1;
  static constexpr std::string_view kPrefixes = "KMGTP";
  const char prefix =
      static_cast<char>(std::toupper(static_cast<unsigned char>(unit.front())));
  const size_t power = kPrefixes.find(prefix);
  if (power == std::string_view::npos) return 0;
  unit.remove_prefix(1);
  double base = 1000;
  if (!unit.empty() && (unit.front() == 'i' || unit.front() == 'I')) {
    base = 1024;
    unit.remove_prefix(1);
    if (unit.empty()) return std::pow(base, static_cast<double>(power + 1));
  }
  if (!unit.empty() && unit != "B" && unit != "b") return 0;
  return std::pow(base, static_cast<double>(power + 1));
}

}  // namespace

Result<int64_t> ParseBytes(std::string_view text) {
  size_t digits = 0;
  while (digits < text.size() &&
         (std::isdigit(static_cast<unsigned char>(text[digits])) != 0 ||
          text[digits] == '.')) {
    ++digits;
  }
  const auto value = ParseNumber<double>(text.substr(0, digits));
  std::string_view unit = text.substr(digits);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  const double factor = UnitFactor(unit);
  const bool parts_a_byte =
      factor == 1 && text.find('.') != std::string_view::npos;
  // 2^62 is far above any memory and far below what int64 holds.
  if (!value || factor == 0 || parts_a_byte || !(*value * factor < 4.6e18)) {
    return BadArgument(
        "\"{}\" is not a size; write bytes, 1.2GB (powers of 1000) or 1.2GiB "
        "(powers of 1024)",
        text);
  }
  return static_cast<int64_t>(std::llround(*value * factor));
}

Result<double> ParseFactor(std::string_view text) {
  const size_t slash = text.find('/');
  std::optional<double> value;
  if (slash == std::string_view::npos) {
    value = ParseNumber<double>(text);
  } else {
    const auto above = ParseNumber<double>(text.substr(0, slash));
    const auto below = ParseNumber<double>(text.substr(slash + 1));
    if (above && below && *below != 0) value = *above / *below;
  }
  if (!value || !std::isfinite(*value) || *value <= 0) {
    return BadArgument("\"{}\" is not a positive factor such as 0.25 or 1/16",
                       text);
  }
  return *value;
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
  return unit == 0 ? fmt::format("{} B", bytes)
                   : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace varlane::tools
