// File: an open file that is closed at its end, read and written at offsets.
//
// Every system call goes through base/os_calls.h. Interrupted and short
// transfers are continued; what still cannot be transferred is an error that
// names path, offset and the system's reason. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_FILE_H_
#define VARLANE_MEMORY_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "varlane/status.h"

namespace varlane {

// "verb path: reason" with the code that suits errno: kNotFound,
// kPermissionDenied, kResourceExhausted (disk, quota, descriptors) or
// kUnavailable.
Status FileError(const char* verb, const std::string& path, int error);

// Threads: ReadAt and WriteAt from any thread at once; the rest from one.
class File {
 public:
  // `flags` as open(2); O_CLOEXEC and O_NONBLOCK are added, so that a FIFO is
  // refused instead of waited for. Errors: FileError's; kInvalidArgument for
  // what is not a regular file.
  static Result<File> Open(const std::string& path, int flags,
                           unsigned int mode = 0);

  File() = default;  // no file
  ~File() { Close(); }
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  Result<int64_t> Size() const;  // bytes

  // All of it, or an error. Errors: kOutOfRange where the file ends before;
  // FileError's.
  Status ReadAt(int64_t offset, std::span<std::byte> to) const;
  Status WriteAt(int64_t offset, std::span<const std::byte> from) const;
  // Makes the file `bytes` long with its disk space taken, where the file
  // system can do that, else with holes.
  Status Allocate(int64_t bytes) const;
  // Until the contents are on the disk.
  Status Sync() const;
  void Close() noexcept;

 private:
  int fd_ = -1;
  std::string path_;
};

// The folder that `path` stands in: "." where it names none.
std::string FolderOf(const std::string& path);

}  // namespace varlane

#endif  // VARLANE_MEMORY_FILE_H_
