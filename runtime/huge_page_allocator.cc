// SPDX-License-Identifier: Apache-2.0

#include "varlane/huge_page_allocator.h"

#include <cstdint>
#include <limits>

#include "runtime/numa_memory.h"

namespace varlane {
namespace {

// Half a huge page: less would waste more than it gains.
constexpr std::size_t kLeast = kHugePageBytes / 2;
constexpr std::align_val_t kHeapAlignment{64};

// Whole huge pages; 0 where that is more than there can be.
int64_t RoundUp(std::size_t bytes) {
  constexpr auto kMost =
      static_cast<std::size_t>(std::numeric_limits<int64_t>::max());
  if (bytes > kMost - static_cast<std::size_t>(kHugePageBytes)) return 0;
  const auto wanted = static_cast<int64_t>(bytes);
  return (wanted + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

void* AllocateHugePages(std::size_t bytes) {
  if (bytes < kLeast) return ::operator new(bytes, kHeapAlignment);
  const int64_t size = RoundUp(bytes);
  if (size == 0) throw std::bad_alloc();
  const auto reserved = ReserveAddressSpace(size, kHugePageBytes);
  if (!reserved.ok()) throw std::bad_alloc();
  std::byte* data = reserved.value();
  if (!CommitMemory(data, size, HugePages::kTransparent).ok()) {
    ReleaseAddressSpace(data, size);
    throw std::bad_alloc();
  }
  return data;
}

void FreeHugePages(void* data, std::size_t bytes) noexcept {
  if (bytes < kLeast) {
    ::operator delete(data, kHeapAlignment);
  } else {
    ReleaseAddressSpace(static_cast<std::byte*>(data), RoundUp(bytes));
  }
}

}  // namespace varlane
