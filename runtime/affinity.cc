// SPDX-License-Identifier: Apache-2.0

#include "runtime/affinity.h"

#include <sched.h>

#include <cerrno>
#include <system_error>

#include "base/strings.h"

namespace varlane {
namespace {

Status Refused(const char* call, int error) noexcept {
  try {
    return {StatusCode::kUnavailable,
            StrCat(call, ": ", std::generic_category().message(error))};
  } catch (...) {
    return {StatusCode::kUnavailable, call};
  }
}

}  // namespace

void CpuMask::Add(int cpu) noexcept {
  if (cpu < 0 || cpu >= kMaxCpus) return;
  const auto bit = static_cast<size_t>(cpu);
  words_[bit / kBits] |= 1ul << (bit % kBits);
}

bool CpuMask::Has(int cpu) const noexcept {
  if (cpu < 0 || cpu >= kMaxCpus) return false;
  const auto bit = static_cast<size_t>(cpu);
  return ((words_[bit / kBits] >> (bit % kBits)) & 1) != 0;
}

Status CpuMask::ReadThread(CpuMask* mask) noexcept {
  *mask = CpuMask();
  if (sched_getaffinity(0, sizeof(mask->words_),
                        reinterpret_cast<cpu_set_t*>(mask->words_.data())) !=
      0) {
    return Refused("sched_getaffinity", errno);
  }
  return {};
}

Status CpuMask::ApplyToThread() const noexcept {
  if (sched_setaffinity(0, sizeof(words_),
                        reinterpret_cast<const cpu_set_t*>(words_.data())) !=
      0) {
    return Refused("sched_setaffinity", errno);
  }
  return {};
}

int CurrentCpu() noexcept { return sched_getcpu(); }

}  // namespace varlane
