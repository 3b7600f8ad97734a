// ThreadSlot: a small number for the calling thread, and counters spread by it.
//
// What many threads write at once is cut into parts on cache lines of their
// own; a thread finds its part by its slot. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_THREAD_SLOT_H_
#define VARLANE_MEMORY_THREAD_SLOT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace varlane {

// Threads get 0, 1, 2, ... in the order of their first call.
inline size_t ThreadSlot() noexcept {
  static std::atomic<size_t> next{0};
  static thread_local const size_t slot =
      next.fetch_add(1, std::memory_order_relaxed);
  return slot;
}

inline constexpr size_t kThreadSlots = 16;  // parts; beyond, threads share

// A sum that threads add to without meeting. Reading it beside them gives some
// value between before and after; whoever reads what they added sees what they
// did before.
class SpreadCounter {
 public:
  void Add(int64_t amount) noexcept {
    parts_[ThreadSlot() % kThreadSlots].value.fetch_add(
        amount, std::memory_order_release);
  }
  int64_t Sum() const noexcept {
    int64_t sum = 0;
    for (const Part& part : parts_) {
      sum += part.value.load(std::memory_order_acquire);
    }
    return sum;
  }

 private:
  struct alignas(64) Part {
    std::atomic<int64_t> value{0};
  };
  std::array<Part, kThreadSlots> parts_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_THREAD_SLOT_H_
