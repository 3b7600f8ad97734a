// LineReader: the lines of a text file.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/line_reader.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "tools/status_util.h"

namespace varlane::tools {

Result<LineReader> LineReader::Open(const std::string& path) {
  LineReader reader(path);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return Fail(StatusCode::kNotFound, "{} cannot be read: it is a directory",
                path);
  }
  errno = 0;
  reader.file_.open(path, std::ios::binary);
  if (!reader.file_) {
    return Fail(StatusCode::kNotFound, "{} cannot be read: {}", path,
                std::strerror(errno));
  }
  return reader;
}

Result<bool> LineReader::Next() {
  line_.clear();
  std::streambuf* const buffer = file_.rdbuf();
  int c = buffer->sbumpc();
  if (c == std::char_traits<char>::eof()) return false;
  ++number_;
  for (; c != std::char_traits<char>::eof() && c != '\n';
       c = buffer->sbumpc()) {
    if (line_.size() == kMaxLineBytes) {
      return BadArgument("{}:{}: the line is longer than {} bytes", path_,
                         number_, kMaxLineBytes);
    }
    line_.push_back(static_cast<char>(c));
  }
  if (!line_.empty() && line_.back() == '\r') line_.pop_back();
  return true;
}

}  // namespace varlane::tools
