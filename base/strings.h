// Small string building for error messages and reports; cold path only.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_STRINGS_H_
#define VARLANE_BASE_STRINGS_H_

#include <cstdint>
#include <new>
#include <sstream>
#include <string>
#include <utility>

namespace varlane {

// Concatenates as operator<< would print: StrCat("x = ", 3) == "x = 3".
// Throws std::bad_alloc where there is no memory: a stream would cut the text
// short without a word, and a path cut short is another path.
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  if (!out) throw std::bad_alloc();
  return std::move(out).str();
}

// StrCat for messages: empty rather than thrown, so that an error can be told
// even where there is no memory to say what it is.
template <typename... Args>
std::string MessageCat(const Args&... args) noexcept try {
  return StrCat(args...);
} catch (...) {
  return {};
}

// What the system calls an errno, e.g. "No such file or directory". Unlike
// strerror, safe in threads.
std::string ErrnoText(int error);

// "1.50 GiB", "64 KiB", "17 B": binary units, at most two decimals.
std::string FormatBytes(int64_t bytes);

}  // namespace varlane

#endif  // VARLANE_BASE_STRINGS_H_
