// Memory on huge pages for what launches read and write besides the cache.
//
// q and out of a step have a page a token and more where pages are 4 KiB, and
// a launch touches each for microseconds only: looking the page up takes longer
// than reading what is on it. Short prefills are some 5% faster with q and out
// on huge pages (docs/tuning.md).
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_HUGE_PAGE_ALLOCATOR_H_
#define VARLANE_HUGE_PAGE_ALLOCATOR_H_

#include <cstddef>
#include <limits>
#include <new>
#include <vector>

#include "varlane/export.h"

namespace varlane {

// Zeroed memory, aligned to a huge page (2 MiB) and a whole number of them, for
// which transparent huge pages are asked; where the kernel has none to give the
// pages are ordinary ones. Below 1 MiB: from the C++ heap, aligned to 64 bytes
// and not zeroed. Untouched pages cost nothing; a page stands on the NUMA node
// of the thread that touches it first.
//
// Errors: throws std::bad_alloc where there is no address space or memory.
// Safe from any thread.
VARLANE_EXPORT void* AllocateHugePages(std::size_t bytes);

// `bytes` as allocated; null is allowed.
VARLANE_EXPORT void FreeHugePages(void* data, std::size_t bytes) noexcept;

// The same for containers.
template <class T>
struct HugePageAllocator {
  using value_type = T;  // NOLINT(readability-identifier-naming)

  HugePageAllocator() = default;
  // Converts as std::allocator does.
  template <class U>  // NOLINTNEXTLINE(google-explicit-constructor)
  HugePageAllocator(const HugePageAllocator<U>&) noexcept {}

  T* allocate(std::size_t n) {
    if (n > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
      throw std::bad_array_new_length();
    }
    return static_cast<T*>(AllocateHugePages(n * sizeof(T)));
  }
  void deallocate(T* data, std::size_t n) noexcept {
    FreeHugePages(data, n * sizeof(T));
  }

  friend bool operator==(const HugePageAllocator&,
                         const HugePageAllocator&) noexcept {
    return true;
  }
};

template <class T>
using HugePageVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace varlane

#endif  // VARLANE_HUGE_PAGE_ALLOCATOR_H_
