// SPDX-License-Identifier: Apache-2.0

#include "memory/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/check.h"
#include "base/os_calls.h"
#include "base/strings.h"

namespace varlane {
namespace {

StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return StatusCode::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS:
      return StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return StatusCode::kResourceExhausted;
    default:
      return StatusCode::kUnavailable;
  }
}

}  // namespace

Status FileError(const char* verb, const std::string& path, int error) {
  return {CodeOf(error), StrCat(verb, " ", path, ": ", ErrnoText(error))};
}

Result<File> File::Open(const std::string& path, int flags, unsigned int mode) {
  File file;
  file.path_ = path;
  file.fd_ = os::Open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK,
                      static_cast<mode_t>(mode));
  if (file.fd_ < 0) return FileError("cannot open", path, errno);
  struct stat status = {};
  if (os::Fstat(file.fd_, &status) != 0) {
    const int error = errno;
    if ((flags & O_EXCL) != 0) (void)os::Unlink(path.c_str());  // it is ours
    return FileError("cannot look at", path, error);
  }
  VARLANE_REQUIRE_ARG(S_ISREG(status.st_mode), path, " is no regular file");
  return file;
}

File& File::operator=(File&& other) noexcept {
  if (this == &other) return *this;
  Close();
  fd_ = std::exchange(other.fd_, -1);
  path_ = std::move(other.path_);
  return *this;
}

void File::Close() noexcept {
  if (fd_ >= 0) (void)os::Close(std::exchange(fd_, -1));
}

Result<int64_t> File::Size() const {
  struct stat status = {};
  if (os::Fstat(fd_, &status) != 0) {
    return FileError("cannot look at", path_, errno);
  }
  return static_cast<int64_t>(status.st_size);
}

Status File::ReadAt(int64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t count = os::Pread(fd_, to.data(), to.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError("cannot read", path_, errno);
    VARLANE_REQUIRE(count > 0, StatusCode::kOutOfRange, path_, " ends at byte ",
                    offset, ", ", to.size(), " bytes too early");
    offset += count;
    to = to.subspan(static_cast<size_t>(count));
  }
  return {};
}

Status File::WriteAt(int64_t offset, std::span<const std::byte> from) const {
  while (!from.empty()) {
    const ssize_t count = os::Pwrite(fd_, from.data(), from.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError("cannot write", path_, errno);
    // A regular file writes something or says why not.
    if (count == 0) return FileError("cannot write", path_, EIO);
    offset += count;
    from = from.subspan(static_cast<size_t>(count));
  }
  return {};
}

Status File::Allocate(int64_t bytes) const {
  int result = 0;
  do {
    result = os::Fallocate(fd_, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return {};
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    return FileError(StrCat("cannot take ", FormatBytes(bytes), " for").c_str(),
                     path_, errno);
  }
  if (os::Ftruncate(fd_, bytes) == 0) return {};
  return FileError("cannot extend", path_, errno);
}

Status File::Sync() const {
  if (os::Fsync(fd_) == 0) return {};
  return FileError("cannot sync", path_, errno);
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace varlane
