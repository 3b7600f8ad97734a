// SPDX-License-Identifier: Apache-2.0

#include "base/os_calls.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

namespace varlane {
namespace {

// Written by who arms; `armed` last and first, so that whoever sees it sees the
// rest. Counted by everybody.
struct Injector {
  std::atomic<bool> armed{false};
  std::atomic<int64_t> first{0};
  std::atomic<int64_t> count{0};
  std::atomic<int> error{0};
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> failed{0};
};
constinit Injector injector;

// Whether this call is to fail; errno is set then.
[[gnu::noinline]] bool CountCall() noexcept {
  std::atomic_thread_fence(std::memory_order_acquire);
  const int64_t index = injector.calls.fetch_add(1, std::memory_order_relaxed);
  const int64_t since = index - injector.first.load(std::memory_order_relaxed);
  if (since < 0 || since >= injector.count.load(std::memory_order_relaxed)) {
    return false;
  }
  injector.failed.fetch_add(1, std::memory_order_relaxed);
  errno = injector.error.load(std::memory_order_relaxed);
  return true;
}

inline bool Fails() noexcept {
  if (!injector.armed.load(std::memory_order_relaxed)) [[likely]]
    return false;
  return CountCall();
}

}  // namespace

void OsFaults::FailAfter(int64_t first, int error, int64_t count) noexcept {
  Disarm();
  injector.first.store(first, std::memory_order_relaxed);
  injector.count.store(count, std::memory_order_relaxed);
  injector.error.store(error, std::memory_order_relaxed);
  injector.calls.store(0, std::memory_order_relaxed);
  injector.failed.store(0, std::memory_order_relaxed);
  Resume();
}

void OsFaults::Resume() noexcept {
  injector.armed.store(true, std::memory_order_release);
}

void OsFaults::Disarm() noexcept {
  injector.armed.store(false, std::memory_order_release);
}

int64_t OsFaults::calls() noexcept {
  return injector.calls.load(std::memory_order_relaxed);
}

int64_t OsFaults::failed() noexcept {
  return injector.failed.load(std::memory_order_relaxed);
}

namespace os {

void* Mmap(void* address, size_t size, int protection, int flags, int fd,
           off_t offset) noexcept {
  if (Fails()) return MAP_FAILED;
  return mmap(address, size, protection, flags, fd, offset);
}

int Munmap(void* address, size_t size) noexcept {
  return Fails() ? -1 : munmap(address, size);
}

int Mprotect(void* address, size_t size, int protection) noexcept {
  return Fails() ? -1 : mprotect(address, size, protection);
}

int Madvise(void* address, size_t size, int advice) noexcept {
  return Fails() ? -1 : madvise(address, size, advice);
}

int Mlock(const void* address, size_t size) noexcept {
  return Fails() ? -1 : mlock(address, size);
}

int Munlock(const void* address, size_t size) noexcept {
  return Fails() ? -1 : munlock(address, size);
}

int Mbind(void* address, size_t size, int mode, const unsigned long* nodes,
          unsigned long num_bits) noexcept {
  if (Fails()) return -1;
  return static_cast<int>(
      syscall(SYS_mbind, address, size, mode, nodes, num_bits, 0U));
}

int QueryPages(size_t count, void** pages, int* nodes) noexcept {
  if (Fails()) return -1;
  return static_cast<int>(
      syscall(SYS_move_pages, 0, count, pages, nullptr, nodes, 0));
}

int MemfdCreate(const char* name, unsigned int flags) noexcept {
  return Fails() ? -1 : memfd_create(name, flags);
}

int Open(const char* path, int flags, mode_t mode) noexcept {
  return Fails() ? -1 : open(path, flags, mode);
}

int Close(int fd) noexcept {
  const int result = close(fd);
  return Fails() ? -1 : result;
}

ssize_t Read(int fd, void* data, size_t size) noexcept {
  return Fails() ? -1 : read(fd, data, size);
}

ssize_t Write(int fd, const void* data, size_t size) noexcept {
  return Fails() ? -1 : write(fd, data, size);
}

ssize_t Pread(int fd, void* data, size_t size, off_t offset) noexcept {
  return Fails() ? -1 : pread(fd, data, size, offset);
}

ssize_t Pwrite(int fd, const void* data, size_t size, off_t offset) noexcept {
  return Fails() ? -1 : pwrite(fd, data, size, offset);
}

int Ftruncate(int fd, off_t size) noexcept {
  return Fails() ? -1 : ftruncate(fd, size);
}

int Fallocate(int fd, int mode, off_t offset, off_t size) noexcept {
  return Fails() ? -1 : fallocate(fd, mode, offset, size);
}

int Fsync(int fd) noexcept { return Fails() ? -1 : fsync(fd); }

int Fdatasync(int fd) noexcept { return Fails() ? -1 : fdatasync(fd); }

int Fstat(int fd, struct stat* result) noexcept {
  return Fails() ? -1 : fstat(fd, result);
}

int Rename(const char* from, const char* to) noexcept {
  return Fails() ? -1 : rename(from, to);
}

int Unlink(const char* path) noexcept { return Fails() ? -1 : unlink(path); }

int Poll(struct pollfd* fds, nfds_t count, int timeout_ms) noexcept {
  return Fails() ? -1 : poll(fds, count, timeout_ms);
}

int Eventfd(unsigned int value, int flags) noexcept {
  return Fails() ? -1 : eventfd(value, flags);
}

int Socket(int domain, int type, int protocol) noexcept {
  return Fails() ? -1 : socket(domain, type, protocol);
}

int Connect(int fd, const struct sockaddr* address, socklen_t size) noexcept {
  return Fails() ? -1 : connect(fd, address, size);
}

int Getrlimit(int resource, struct rlimit* limit) noexcept {
  return Fails() ? -1
                 : getrlimit(static_cast<__rlimit_resource_t>(resource), limit);
}

}  // namespace os
}  // namespace varlane
