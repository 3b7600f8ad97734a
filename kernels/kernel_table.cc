// Collects every target's kernels and chooses among them.
//
// SPDX-License-Identifier: Apache-2.0

#include "kernels/kernel_table.h"

#include "kernels/targets.h"
// After targets.h:
#include "hwy/highway.h"
#include "hwy/targets.h"

#if HWY_ARCH_X86
#include <cpuid.h>
#endif

#include <array>
#include <cstdint>

namespace varlane {

#define VARLANE_DECLARE_TARGET(ns)   \
  namespace ns {                     \
  extern const KvKernels kKvF32;     \
  extern const KvKernels kKvBf16;    \
  extern const KvKernels kKvF16;     \
  extern const LimitKernels kLimits; \
  }
#define VARLANE_TABLE(ns, name, fma) VARLANE_TABLE_OF(ns, ns, name, fma)
// `bf16` is the namespace of what multiplies bf16, `ns` that of the rest.
#define VARLANE_TABLE_OF(ns, bf16, name, fma) \
  { name, fma, &ns::kKvF32, &bf16::kKvBf16, &ns::kKvF16, &bf16::kLimits }

VARLANE_DECLARE_TARGET(HWY_NAMESPACE)  // the static target
#if HWY_STATIC_TARGET != HWY_AVX3 && (HWY_TARGETS & HWY_AVX3)
VARLANE_DECLARE_TARGET(N_AVX3)
#endif
#if HWY_TARGETS & HWY_AVX3
VARLANE_DECLARE_TARGET(N_AVX3_BF16)
#endif
#if HWY_STATIC_TARGET != HWY_AVX2 && (HWY_TARGETS & HWY_AVX2)
VARLANE_DECLARE_TARGET(N_AVX2)
#endif
#if HWY_STATIC_TARGET != HWY_SSE4 && (HWY_TARGETS & HWY_SSE4)
VARLANE_DECLARE_TARGET(N_SSE4)
#endif

namespace {

// Which CPUs a table is for, by avx512_bf16.
enum class Bf16 : uint8_t { kAny, kWith, kWithout };

struct Compiled {
  KernelTable table;
  int64_t target;  // Highway's bit; 0 = always runs
  Bf16 bf16;
};

constexpr bool StaticTargetHasFma() {
#if defined(__FMA__) || HWY_ARCH_ARM_A64 || HWY_ARCH_RVV
  return true;
#else
  return false;
#endif
}

constexpr const char* kStaticName =
#if HWY_STATIC_TARGET == HWY_SCALAR
    "SCALAR";
#elif HWY_STATIC_TARGET == HWY_EMU128
    "EMU128";
#elif HWY_STATIC_TARGET == HWY_AVX3
    "AVX3";
#elif HWY_STATIC_TARGET == HWY_AVX2
    "AVX2";
#elif HWY_STATIC_TARGET == HWY_SSE4
    "SSE4";
#elif HWY_ARCH_X86
    "SSE2";
#else
    "STATIC";
#endif

// Best first, but for the last.
constexpr Compiled kCompiled[] = {
#if HWY_TARGETS & HWY_AVX3
#if VARLANE_ALL_PASSES
    {VARLANE_TABLE(N_AVX3_BF16, "AVX3_BF16", true), HWY_AVX3, Bf16::kWith},
#else
    {VARLANE_TABLE_OF(N_AVX3, N_AVX3_BF16, "AVX3_BF16", true), HWY_AVX3,
     Bf16::kWith},
#endif
#endif
#if HWY_STATIC_TARGET != HWY_AVX3 && (HWY_TARGETS & HWY_AVX3)
    {VARLANE_TABLE(N_AVX3, "AVX3", true), HWY_AVX3, Bf16::kAny},
#endif
#if HWY_STATIC_TARGET != HWY_AVX2 && (HWY_TARGETS & HWY_AVX2)
    {VARLANE_TABLE(N_AVX2, "AVX2", true), HWY_AVX2, Bf16::kAny},
#endif
#if HWY_STATIC_TARGET != HWY_SSE4 && (HWY_TARGETS & HWY_SSE4)
    {VARLANE_TABLE(N_SSE4, "SSE4", false), HWY_SSE4, Bf16::kAny},
#endif
    {VARLANE_TABLE(HWY_NAMESPACE, kStaticName, StaticTargetHasFma()), 0,
     Bf16::kAny},
#if (HWY_TARGETS & HWY_AVX3) && VARLANE_ALL_PASSES
    // Never the best: what AVX3_BF16 does otherwise than AVX3 and any AVX-512
    // runs, to be tested and compared where nothing else would run it.
    {VARLANE_TABLE_OF(N_AVX3_BF16, N_AVX3, "AVX3_4ROWS", true), HWY_AVX3,
     Bf16::kWithout},
#endif
};

// The OS side (zmm state) is covered by Highway's own AVX3 check.
bool CpuHasAvx512Bf16() {
#if HWY_ARCH_X86
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 5)) != 0;
#else
  return false;
#endif
}

struct Supported {
  std::array<const KernelTable*, std::size(kCompiled)> tables{};
  size_t count = 0;

  Supported() {
    const int64_t targets = hwy::SupportedTargets();
    const bool bf16 = CpuHasAvx512Bf16();
    for (const Compiled& compiled : kCompiled) {
      if (compiled.target != 0 && (compiled.target & targets) == 0) continue;
      if (compiled.bf16 == (bf16 ? Bf16::kWithout : Bf16::kWith)) continue;
      tables[count++] = &compiled.table;
    }
  }
};

}  // namespace

std::span<const KernelTable* const> SupportedKernels() {
  static const Supported supported;
  return {supported.tables.data(), supported.count};
}

const KernelTable* FindKernels(std::string_view name) {
  for (const KernelTable* table : SupportedKernels()) {
    if (name.empty() || name == table->name) return table;
  }
  return nullptr;
}

}  // namespace varlane
