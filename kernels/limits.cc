// Limits of every target: one foreach round, and AVX3_BF16 as passes-inl.h has
// it.
//
// SPDX-License-Identifier: Apache-2.0

#include "kernels/limits.h"

#include "kernels/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/limits.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/std_headers.h"

#undef VARLANE_DEFINE_LIMITS
#define VARLANE_DEFINE_LIMITS                  \
  extern const LimitKernels kLimits;           \
  constinit const LimitKernels kLimits = {     \
      &ReadLimit,                              \
      &MultiplyLimit<MultiplyF32>,             \
      &MultiplyLimit<MultiplyBf16>,            \
      &FedLimit<OpsF32, OpsF32::kExpDegree>,   \
      &FedLimit<FedBf16, OpsBf16::kExpDegree>, \
      FedBf16::kPack}

#undef VARLANE_NS
#define VARLANE_NS HWY_NAMESPACE
#undef VARLANE_FAST_BF16
#define VARLANE_FAST_BF16 0
#undef VARLANE_ZEN5
#define VARLANE_ZEN5 0
#undef VARLANE_NATIVE_BF16
#define VARLANE_NATIVE_BF16 0
HWY_BEFORE_NAMESPACE();
#include "kernels/fma-inl.h"
// After fma-inl.h:
#include "kernels/vec-inl.h"
// After vec-inl.h:
#include "kernels/exp2-inl.h"
// After vec-inl.h:
#include "kernels/multiply-inl.h"
// After multiply-inl.h:
#include "kernels/limits-inl.h"
namespace varlane {
namespace VARLANE_NS {
VARLANE_DEFINE_LIMITS;
}  // namespace VARLANE_NS
}  // namespace varlane
HWY_AFTER_NAMESPACE();

#if HWY_TARGET == HWY_AVX3
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16"
#undef VARLANE_NS
#define VARLANE_NS N_AVX3_BF16
#undef VARLANE_FAST_BF16
#define VARLANE_FAST_BF16 1
#undef VARLANE_NATIVE_BF16
#define VARLANE_NATIVE_BF16 1
HWY_BEFORE_NAMESPACE();
#include "kernels/fma-inl.h"
// After fma-inl.h:
#include "kernels/vec-inl.h"
// After vec-inl.h:
#include "kernels/exp2-inl.h"
// After vec-inl.h:
#include "kernels/multiply-inl.h"
// After multiply-inl.h:
#include "kernels/limits-inl.h"
namespace varlane {
namespace VARLANE_NS {
VARLANE_DEFINE_LIMITS;
}  // namespace VARLANE_NS
}  // namespace varlane
HWY_AFTER_NAMESPACE();
#endif
