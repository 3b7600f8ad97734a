// BlockPoison: makes reads of freed blocks show.
//
// In a build with AddressSanitizer a freed block cannot be touched at all; on
// request it is also filled with 0xff, which is NaN in every float type, so
// that in any build a stale read reaches an output as NaN. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_POISON_H_
#define VARLANE_MEMORY_BLOCK_POISON_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define VARLANE_ASAN 1  // g++
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VARLANE_ASAN 1  // clang
#endif
#endif
#ifdef VARLANE_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace varlane {

// Threads: safe on disjoint ranges.
class BlockPoison {
 public:
  explicit BlockPoison(bool fill) : fill_(fill) {}

  // Nobody may read the bytes until Allow.
  void Forbid(std::byte* data, int64_t bytes) const noexcept {
    if (fill_) std::memset(data, 0xff, static_cast<size_t>(bytes));
#ifdef VARLANE_ASAN
    __asan_poison_memory_region(data, static_cast<size_t>(bytes));
#else
    (void)data;
    (void)bytes;
#endif
  }

  static void Allow(std::byte* data, int64_t bytes) noexcept {
#ifdef VARLANE_ASAN
    __asan_unpoison_memory_region(data, static_cast<size_t>(bytes));
#else
    (void)data;
    (void)bytes;
#endif
  }

 private:
  const bool fill_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_POISON_H_
