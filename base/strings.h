// Small string building for error messages and reports; cold path only.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_STRINGS_H_
#define VARLANE_BASE_STRINGS_H_

#include <cstdint>
#include <sstream>
#include <string>

namespace varlane {

// Concatenates as operator<< would print: StrCat("x = ", 3) == "x = 3".
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return std::move(out).str();
}

// "1.50 GiB", "64 KiB", "17 B": binary units, at most two decimals.
std::string FormatBytes(int64_t bytes);

}  // namespace varlane

#endif  // VARLANE_BASE_STRINGS_H_
