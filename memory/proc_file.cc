// SPDX-License-Identifier: Apache-2.0

#include "memory/proc_file.h"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <limits>

#include "base/math.h"
#include "base/os_calls.h"
#include "base/strings.h"

namespace varlane {
namespace {

class ClosesAtEnd {
 public:
  explicit ClosesAtEnd(int fd) : fd_(fd) {}
  ~ClosesAtEnd() { (void)os::Close(fd_); }
  ClosesAtEnd(const ClosesAtEnd&) = delete;
  ClosesAtEnd& operator=(const ClosesAtEnd&) = delete;

 private:
  const int fd_;
};

Status FileError(const std::string& path, int error) {
  StatusCode code = StatusCode::kUnavailable;
  if (error == ENOENT || error == ENOTDIR) code = StatusCode::kNotFound;
  if (error == EACCES || error == EPERM) code = StatusCode::kPermissionDenied;
  if (error == ENOMEM || error == EMFILE || error == ENFILE) {
    code = StatusCode::kResourceExhausted;
  }
  return {code, StrCat(path, ": ", ErrnoText(error))};
}

}  // namespace

Result<std::string> ReadProcFile(const std::string& path) {
  const int fd = os::Open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(path, errno);
  const ClosesAtEnd closes(fd);
  std::string text;
  std::array<char, 4096> buffer;
  ssize_t got = 0;
  int error = 0;
  do {
    got = os::Read(fd, buffer.data(), buffer.size());
    if (got > 0) text.append(buffer.data(), static_cast<size_t>(got));
    error = got < 0 ? errno : 0;
  } while (got > 0 || error == EINTR);
  if (error != 0) return FileError(path, error);
  return text;
}

std::optional<int64_t> ParseCount(std::string_view text) {
  const size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  text.remove_prefix(start);
  text = text.substr(0, text.find_first_of(" \t\n"));
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (stop != end || text.front() == '-') return std::nullopt;
  if (error == std::errc::result_out_of_range) {
    return std::numeric_limits<int64_t>::max();
  }
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::optional<int64_t> FindCount(std::string_view text, std::string_view key) {
  for (const std::string_view line : Split(text, '\n')) {
    if (line.size() > key.size() && line.substr(0, key.size()) == key &&
        (line[key.size()] == ' ' || line[key.size()] == '\t')) {
      return ParseCount(line.substr(key.size()));
    }
  }
  return std::nullopt;
}

std::optional<int64_t> FindKilobytes(std::string_view text,
                                     std::string_view key) {
  const std::optional<int64_t> kilobytes = FindCount(text, key);
  if (!kilobytes) return std::nullopt;
  return CheckedMul(*kilobytes, 1024)
      .value_or(std::numeric_limits<int64_t>::max());
}

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (;;) {
    const size_t end = text.find(separator);
    pieces.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return pieces;
    text.remove_prefix(end + 1);
  }
}

}  // namespace varlane
