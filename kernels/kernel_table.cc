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
#define VARLANE_TABLE(ns, name) VARLANE_TABLE_OF(ns, ns, ns, name)
// `bf16` is the namespace of what multiplies bf16, `limits` that of the limits,
// `ns` that of the rest.
#define VARLANE_TABLE_OF(ns, bf16, limits, name) \
  { name, &ns::kKvF32, &bf16::kKvBf16, &ns::kKvF16, &limits::kLimits }

VARLANE_DECLARE_TARGET(HWY_NAMESPACE)  // the static target
#if HWY_STATIC_TARGET != HWY_AVX3 && (HWY_TARGETS & HWY_AVX3)
VARLANE_DECLARE_TARGET(N_AVX3)
#endif
#if HWY_TARGETS & HWY_AVX3
VARLANE_DECLARE_TARGET(N_AVX3_BF16)
VARLANE_DECLARE_TARGET(N_AVX3_ZEN5)  // whose limits are AVX3_BF16's
#endif
#if HWY_STATIC_TARGET != HWY_AVX2 && (HWY_TARGETS & HWY_AVX2)
VARLANE_DECLARE_TARGET(N_AVX2)
#endif
#if HWY_STATIC_TARGET != HWY_SSE4 && (HWY_TARGETS & HWY_SSE4)
VARLANE_DECLARE_TARGET(N_SSE4)
#endif

namespace {

// What avx512_bf16 is worth to a CPU: it has none; its dot product takes longer
// than the two fp32 multiply-adds that stand for it; or it is twice as fast, on
// Zen 4 and any CPU we do not know, or on Zen 5.
enum Bf16 : uint8_t { kNoBf16 = 1, kSlowBf16 = 2, kFastBf16 = 4, kZen5 = 8 };
constexpr uint8_t kAnyCpu = kNoBf16 | kSlowBf16 | kFastBf16 | kZen5;

struct Compiled {
  KernelTable table;
  int64_t target;  // Highway's bit; 0 = always runs
  uint8_t cpus;    // of Bf16
};

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

// An AMD pass, whose kernels of other caches sanitizer builds spare.
#if VARLANE_ALL_PASSES
#define VARLANE_AMD_TABLE(ns, name) VARLANE_TABLE_OF(ns, ns, N_AVX3_BF16, name)
#else
#define VARLANE_AMD_TABLE(ns, name) \
  VARLANE_TABLE_OF(N_AVX3, ns, N_AVX3_BF16, name)
#endif
#define VARLANE_AVX3_BF16 VARLANE_AMD_TABLE(N_AVX3_BF16, "AVX3_BF16")
#define VARLANE_AVX3_ZEN5 VARLANE_AMD_TABLE(N_AVX3_ZEN5, "AVX3_ZEN5")

// Best first, but for those at the end.
constexpr Compiled kCompiled[] = {
#if HWY_TARGETS & HWY_AVX3
    {VARLANE_AVX3_ZEN5, HWY_AVX3, kZen5},
    {VARLANE_AVX3_BF16, HWY_AVX3, kFastBf16 | kZen5},
#endif
#if HWY_STATIC_TARGET != HWY_AVX3 && (HWY_TARGETS & HWY_AVX3)
    {VARLANE_TABLE(N_AVX3, "AVX3"), HWY_AVX3, kAnyCpu},
#endif
#if HWY_STATIC_TARGET != HWY_AVX2 && (HWY_TARGETS & HWY_AVX2)
    {VARLANE_TABLE(N_AVX2, "AVX2"), HWY_AVX2, kAnyCpu},
#endif
#if HWY_STATIC_TARGET != HWY_SSE4 && (HWY_TARGETS & HWY_SSE4)
    {VARLANE_TABLE(N_SSE4, "SSE4"), HWY_SSE4, kAnyCpu},
#endif
    {VARLANE_TABLE(HWY_NAMESPACE, kStaticName), 0, kAnyCpu},
// Never the best, to be tested and compared where nothing else would run it:
#if HWY_TARGETS & HWY_AVX3
    {VARLANE_AVX3_BF16, HWY_AVX3, kSlowBf16},
    {VARLANE_AVX3_ZEN5, HWY_AVX3, kSlowBf16 | kFastBf16},
#endif
#if (HWY_TARGETS & HWY_AVX3) && VARLANE_ALL_PASSES
    // what AVX3_BF16 does otherwise than AVX3 and any AVX-512 runs.
    {VARLANE_TABLE_OF(N_AVX3_BF16, N_AVX3, N_AVX3, "AVX3_ZEN4"), HWY_AVX3,
     kNoBf16},
#endif
};

// The OS side (zmm state) is covered by Highway's own AVX3 check.
// Intel's CPUs take 2 cycles for a dot product and half a one for an fp32
// multiply-add (Emerald Rapids, a Golden Cove as Sapphire Rapids is), Zen 4 as
// long for either.
Bf16 CpuBf16() {
#if HWY_ARCH_X86
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & (1u << 5)) == 0) {
    return kNoBf16;
  }
  __cpuid(0, a, b, c, d);
  if (b == signature_INTEL_ebx) return kSlowBf16;
  if (b != signature_AMD_ebx) return kFastBf16;
  __cpuid(1, a, b, c, d);
  constexpr unsigned kLastZen4Family = 0x19;
  const unsigned family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
  return family > kLastZen4Family ? kZen5 : kFastBf16;
#else
  return kNoBf16;
#endif
}

struct Supported {
  std::array<const KernelTable*, std::size(kCompiled)> tables{};
  size_t count = 0;

  Supported() {
    const int64_t targets = hwy::SupportedTargets();
    const Bf16 bf16 = CpuBf16();
    for (const Compiled& compiled : kCompiled) {
      if (compiled.target != 0 && (compiled.target & targets) == 0) continue;
      if ((compiled.cpus & bf16) == 0) continue;
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
