// What a fuzzer's bytes need to be read as a file: a file in memory.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_FUZZ_FUZZ_FILE_H_
#define VARLANE_TESTS_FUZZ_FUZZ_FILE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace varlane::fuzzing {

// Traps where `condition` does not hold, so that a fuzzer keeps the input.
inline void Require(bool condition) {
  if (!condition) __builtin_trap();
}

class FuzzFile {
 public:
  explicit FuzzFile(std::span<const uint8_t> contents)
      : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    Require(fd_ >= 0);
    while (!contents.empty()) {
      const ssize_t count = write(fd_, contents.data(), contents.size());
      Require(count > 0);
      contents = contents.subspan(static_cast<size_t>(count));
    }
  }
  ~FuzzFile() { close(fd_); }
  FuzzFile(const FuzzFile&) = delete;
  FuzzFile& operator=(const FuzzFile&) = delete;

  // Each opening reads from the start.
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

}  // namespace varlane::fuzzing

// The entry point that libFuzzer and fuzz_main.cc call.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // VARLANE_TESTS_FUZZ_FUZZ_FILE_H_
