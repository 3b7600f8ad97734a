// SPDX-License-Identifier: Apache-2.0

#include "runtime/affinity.h"

#include <sched.h>

#include <cerrno>
#include <charconv>

#include "base/check.h"
#include "base/strings.h"

namespace varlane {
namespace {

Status Refused(const char* call, int error) noexcept {
  try {
    return {StatusCode::kUnavailable, StrCat(call, ": ", ErrnoText(error))};
  } catch (...) {
    return {StatusCode::kUnavailable, call};
  }
}

// Takes a CPU's number off the front; false where there is none.
bool TakeNumber(std::string_view* text, int* number) {
  const char* const end = text->data() + text->size();
  const auto [after, error] = std::from_chars(text->data(), end, *number);
  if (error != std::errc() || *number < 0) return false;
  text->remove_prefix(static_cast<size_t>(after - text->data()));
  return true;
}

bool TakeChar(std::string_view* text, char wanted) {
  if (!text->starts_with(wanted)) return false;
  text->remove_prefix(1);
  return true;
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

bool CpuMask::IsWithin(const CpuMask& other) const noexcept {
  for (size_t i = 0; i < words_.size(); ++i) {
    if ((words_[i] & ~other.words_[i]) != 0) return false;
  }
  return true;
}

Status CpuMask::Parse(std::string_view list, CpuMask* mask) {
  *mask = CpuMask();
  std::string_view left = list;
  do {
    int first = 0;
    VARLANE_REQUIRE_ARG(TakeNumber(&left, &first), "cpus = \"", list,
                        "\": expected a CPU's number at \"", left,
                        "\", as in \"0-3,8\"");
    int last = first;
    if (TakeChar(&left, '-')) {
      VARLANE_REQUIRE_ARG(TakeNumber(&left, &last) && last >= first,
                          "cpus = \"", list, "\": the range from ", first,
                          " has no end at or above it");
    }
    VARLANE_REQUIRE_ARG(last < kMaxCpus, "cpus = \"", list, "\": CPU ", last,
                        " is above ", kMaxCpus - 1, ", the most there can be");
    for (int cpu = first; cpu <= last; ++cpu) mask->Add(cpu);
  } while (TakeChar(&left, ','));
  VARLANE_REQUIRE_ARG(left.empty(), "cpus = \"", list,
                      "\": expected a comma or the end at \"", left, "\"");
  return {};
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
