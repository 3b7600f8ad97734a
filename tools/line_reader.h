// LineReader: the lines of a text file, one at a time, numbered from 1.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_LINE_READER_H_
#define VARLANE_TOOLS_LINE_READER_H_

#include <cstdint>
#include <fstream>
#include <string>

#include "varlane/status.h"

namespace varlane::tools {

// The longest line that is read; a file of one endless line is refused instead
// of filling memory.
inline constexpr size_t kMaxLineBytes = size_t{16} << 20;

class LineReader {
 public:
  // Errors: kNotFound naming path and reason (missing, a directory, no right).
  static Result<LineReader> Open(const std::string& path);

  // Reads the next line without its LF or CRLF; false at the end of the file.
  // Errors: kInvalidArgument (line too long), kUnavailable (read failed).
  Result<bool> Next();

  const std::string& line() const { return line_; }
  int64_t number() const { return number_; }
  const std::string& path() const { return path_; }

 private:
  explicit LineReader(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::ifstream file_;
  std::string line_;
  int64_t number_ = 0;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_LINE_READER_H_
