// SPDX-License-Identifier: Apache-2.0

#include "varlane/huge_page_allocator.h"

#include <cstdint>
#include <limits>

#include "base/math.h"
#include "runtime/numa_memory.h"

namespace varlane {
namespace {

// Half a huge page: less would waste more than it gains.
constexpr std::size_t kLeast = kHugePageBytes / 2;
constexpr std::align_val_t kHeapAlignment{64};

// More than there can be, and what still rounds up to whole huge pages.
constexpr int64_t kMost = std::numeric_limits<int64_t>::max() - kHugePageBytes;

int64_t PagesOf(std::size_t bytes) {
  return RoundUp(static_cast<int64_t>(bytes), kHugePageBytes);
}

}  // namespace

void* AllocateHugePages(std::size_t bytes) {
  if (bytes < kLeast) return ::operator new(bytes, kHeapAlignment);
  if (bytes > static_cast<std::size_t>(kMost)) throw std::bad_alloc();
  const int64_t size = PagesOf(bytes);
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
    ReleaseAddressSpace(static_cast<std::byte*>(data), PagesOf(bytes));
  }
}

}  // namespace varlane
