// The system calls that memory and files are made of, each able to fail on
// demand.
//
// memory/ and runtime/numa_memory take memory, map it and read files through
// these wrappers only, so that a test can fail every one of them, once each, at
// every index of a scenario (OsFaults::FailAfter). The injector is compiled in
// always: one relaxed load beside a system call costs nothing that can be
// measured, and what is tested is the library that is shipped. A link-time seam
// would need a second library. Layer 0.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_OS_CALLS_H_
#define VARLANE_BASE_OS_CALLS_H_

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace varlane {

// Makes wrapped calls fail, in every thread of the process.
//
// Threads: the calls of all threads are counted in one sequence; arm and disarm
//          from one thread at a time.
class OsFaults {
 public:
  // Counts the calls from now on: number `first` (0 = the next) and the
  // `count` - 1 after it return failure with errno = `error`, having done
  // nothing - but Close, which closes all the same, as Linux does.
  static void FailAfter(int64_t first, int error, int64_t count = 1) noexcept;
  static void Disarm() noexcept;
  // In between calls neither count nor fail.
  static void Pause() noexcept { Disarm(); }
  static void Resume() noexcept;
  static int64_t calls() noexcept;   // since armed
  static int64_t failed() noexcept;  // of these, made to
};

// As the calls of their names, errno included. A call that EINTR can interrupt
// is not repeated.
namespace os {

void* Mmap(void* address, size_t size, int protection, int flags, int fd,
           off_t offset) noexcept;
int Munmap(void* address, size_t size) noexcept;
int Mprotect(void* address, size_t size, int protection) noexcept;
int Madvise(void* address, size_t size, int advice) noexcept;
int Mlock(const void* address, size_t size) noexcept;
int Munlock(const void* address, size_t size) noexcept;
// The C library has no wrapper for these two: mbind(2), move_pages(2) of this
// process.
int Mbind(void* address, size_t size, int mode, const unsigned long* nodes,
          unsigned long num_bits) noexcept;
int QueryPages(size_t count, void** pages, int* nodes) noexcept;

int MemfdCreate(const char* name, unsigned int flags) noexcept;
int Open(const char* path, int flags, mode_t mode = 0) noexcept;
int Close(int fd) noexcept;
ssize_t Read(int fd, void* data, size_t size) noexcept;
ssize_t Write(int fd, const void* data, size_t size) noexcept;
ssize_t Pread(int fd, void* data, size_t size, off_t offset) noexcept;
ssize_t Pwrite(int fd, const void* data, size_t size, off_t offset) noexcept;
int Ftruncate(int fd, off_t size) noexcept;
int Fallocate(int fd, int mode, off_t offset, off_t size) noexcept;
int Fsync(int fd) noexcept;
int Fdatasync(int fd) noexcept;
int Fstat(int fd, struct stat* result) noexcept;
int Rename(const char* from, const char* to) noexcept;
int Unlink(const char* path) noexcept;

int Poll(struct pollfd* fds, nfds_t count, int timeout_ms) noexcept;
int Eventfd(unsigned int value, int flags) noexcept;
int Socket(int domain, int type, int protocol) noexcept;
int Connect(int fd, const struct sockaddr* address, socklen_t size) noexcept;
int Getrlimit(int resource, struct rlimit* limit) noexcept;

}  // namespace os
}  // namespace varlane

#endif  // VARLANE_BASE_OS_CALLS_H_
