// Fails the i-th allocation of a scenario: replaces operator new.
//
// Include it in one file of a test binary, which then counts every allocation
// of the whole process. Arm only around the code under test: GoogleTest
// allocates too.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_ALLOCATION_FAULTS_H_
#define VARLANE_TESTS_TESTING_ALLOCATION_FAULTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace varlane::testing {

class AllocationFaults {
 public:
  // The allocation with index `first` from now on (0 = the next), of whatever
  // thread, fails; once.
  static void FailAfter(int64_t first) noexcept {
    first_ = first;
    allocations_ = 0;
    failed_ = 0;
    armed_ = true;
  }
  static void Disarm() noexcept { armed_ = false; }
  // Goes on where it was disarmed.
  static void Rearm() noexcept { armed_ = true; }
  static int64_t allocations() noexcept { return allocations_; }  // since armed
  static int64_t failed() noexcept { return failed_; }
  // Allocated and not freed, by the whole process.
  static int64_t live() noexcept { return live_; }

  static void* Allocate(std::size_t size, std::size_t alignment) noexcept {
    if (armed_ && allocations_++ == first_) {
      ++failed_;
      return nullptr;
    }
    void* const memory =
        alignment == 0
            ? std::malloc(size == 0 ? 1 : size)
            : std::aligned_alloc(
                  alignment, (size + alignment - 1) / alignment * alignment);
    if (memory != nullptr) ++live_;
    return memory;
  }
  static void Deallocate(void* memory) noexcept {
    if (memory != nullptr) --live_;
    std::free(memory);
  }

 private:
  static inline std::atomic<bool> armed_ = false;
  static inline std::atomic<int64_t> first_ = 0;
  static inline std::atomic<int64_t> allocations_ = 0;
  static inline std::atomic<int64_t> failed_ = 0;
  static inline std::atomic<int64_t> live_ = 0;
};

inline void* AllocateOrThrow(std::size_t size, std::size_t alignment = 0) {
  void* const memory = AllocationFaults::Allocate(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace varlane::testing

// The others of the standard library end in these. Not inline: g++ would pair
// what it sees through on one side with what it does not on the other.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return varlane::testing::AllocateOrThrow(size);
}
[[gnu::noinline]] void* operator new(std::size_t size,
                                     std::align_val_t alignment) {
  return varlane::testing::AllocateOrThrow(size,
                                           static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t size,
                                     const std::nothrow_t&) noexcept {
  return varlane::testing::AllocationFaults::Allocate(size, 0);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  varlane::testing::AllocationFaults::Deallocate(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  varlane::testing::AllocationFaults::Deallocate(memory);
}
[[gnu::noinline]] void operator delete(void* memory,
                                       std::align_val_t) noexcept {
  varlane::testing::AllocationFaults::Deallocate(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t,
                                       std::align_val_t) noexcept {
  varlane::testing::AllocationFaults::Deallocate(memory);
}

#endif  // VARLANE_TESTS_TESTING_ALLOCATION_FAULTS_H_
