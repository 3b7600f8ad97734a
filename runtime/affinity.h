// Which CPUs a thread may run on: the kernel's mask, read and set.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_AFFINITY_H_
#define VARLANE_RUNTIME_AFFINITY_H_

#include <array>
#include <climits>
#include <cstddef>
#include <string_view>

#include "varlane/status.h"

namespace varlane {

// A set of CPUs by OS index. A value without allocation, so that launches may
// keep one on the stack.
class CpuMask {
 public:
  static constexpr int kMaxCpus = 8192;  // the most a Linux kernel can have

  // Out-of-range indices are ignored.
  void Add(int cpu) noexcept;
  bool Has(int cpu) const noexcept;
  bool IsWithin(const CpuMask& other) const noexcept;
  bool operator==(const CpuMask&) const = default;

  // Of a list as the kernel writes them: "0-3,8". Errors: kInvalidArgument
  // quoting the list and what is wrong with it.
  static Status Parse(std::string_view list, CpuMask* mask);

  // The calling thread's mask. Errors: kUnavailable (a sandbox forbids it).
  static Status ReadThread(CpuMask* mask) noexcept;
  // Makes this the calling thread's mask; the kernel moves it at once if need
  // be. Errors: kUnavailable.
  Status ApplyToThread() const noexcept;

 private:
  static constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kMaxCpus / kBits> words_ = {};
};

// The CPU the calling thread is on at this moment, -1 where unknown. No system
// call.
int CurrentCpu() noexcept;

}  // namespace varlane

#endif  // VARLANE_RUNTIME_AFFINITY_H_
