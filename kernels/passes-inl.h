// The passes of one foreach_target round: the target's own, and AVX3_BF16.
//
// VARLANE_OPS names the Ops of vec-inl.h, VARLANE_KV the KvKernels to define in
// each target's namespace. VARLANE_BF16_PASS says whether AVX3_BF16 has kernels
// of its own; where nothing multiplies bf16 it takes those of AVX3. No guard:
// included once per round.
// SPDX-License-Identifier: Apache-2.0

#undef VARLANE_NS
#define VARLANE_NS HWY_NAMESPACE
#undef VARLANE_NATIVE_BF16
#define VARLANE_NATIVE_BF16 0
HWY_BEFORE_NAMESPACE();
#include "kernels/pass-inl.h"
namespace varlane {
namespace VARLANE_NS {
extern const KvKernels VARLANE_KV;
constinit const KvKernels VARLANE_KV = MakeKvKernels<VARLANE_OPS>();
}  // namespace VARLANE_NS
}  // namespace varlane
HWY_AFTER_NAMESPACE();

#if VARLANE_BF16_PASS && HWY_TARGET == HWY_AVX3
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16"
#undef VARLANE_NS
#define VARLANE_NS N_AVX3_BF16
#undef VARLANE_NATIVE_BF16
#define VARLANE_NATIVE_BF16 1
HWY_BEFORE_NAMESPACE();
#include "kernels/pass-inl.h"
namespace varlane {
namespace VARLANE_NS {
extern const KvKernels VARLANE_KV;
constinit const KvKernels VARLANE_KV = MakeKvKernels<VARLANE_OPS>();
}  // namespace VARLANE_NS
}  // namespace varlane
HWY_AFTER_NAMESPACE();
#endif
