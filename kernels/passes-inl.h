// The passes of one foreach_target round: the target's own, and in AVX3's the
// two for AMD's CPUs: AVX3_BF16, which suits Zen 4, and AVX3_ZEN5.
//
// VARLANE_OPS names the Ops of vec-inl.h, VARLANE_KV the KvKernels to define in
// each target's namespace. VARLANE_MULTIPLIES_BF16 says whether they have a use
// for avx512_bf16; those that have not differ in AMD's passes by what its CPUs
// are like. No guard: included once per round.
// SPDX-License-Identifier: Apache-2.0

#undef VARLANE_NS
#define VARLANE_NS HWY_NAMESPACE
#undef VARLANE_FAST_BF16
#define VARLANE_FAST_BF16 0
#undef VARLANE_ZEN5
#define VARLANE_ZEN5 0
#undef VARLANE_NATIVE_BF16
#define VARLANE_NATIVE_BF16 0
HWY_BEFORE_NAMESPACE();
#if HWY_TARGET == HWY_AVX3 && HWY_COMPILER_GCC_ACTUAL
// GCC keeps integers for which it has no register in vectors, and taking one
// back takes a multiplier's port; not where it is told whose CPU it is (Emerald
// Rapids, 5 tokens of a group of 4 in f16: 20% faster). Into what is so tuned
// it inlines nothing that is not but what says always_inline, not even a
// constructor: left out, Zen 5's 8x512 at head size 64 becomes 3% slower.
#pragma GCC target("tune=skylake-avx512")
#endif
#include "kernels/pass-inl.h"
HWY_AFTER_NAMESPACE();

#if HWY_TARGET == HWY_AVX3 && (VARLANE_MULTIPLIES_BF16 || VARLANE_ALL_PASSES)
#undef VARLANE_FAST_BF16
#define VARLANE_FAST_BF16 1
#if VARLANE_MULTIPLIES_BF16
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16"
#undef VARLANE_NATIVE_BF16
#define VARLANE_NATIVE_BF16 1
#endif

#undef VARLANE_NS
#define VARLANE_NS N_AVX3_BF16
HWY_BEFORE_NAMESPACE();
#include "kernels/pass-inl.h"
HWY_AFTER_NAMESPACE();

#undef VARLANE_NS
#define VARLANE_NS N_AVX3_ZEN5
#undef VARLANE_ZEN5
#define VARLANE_ZEN5 1
HWY_BEFORE_NAMESPACE();
#if VARLANE_MULTIPLIES_BF16 && HWY_COMPILER_GCC_ACTUAL
// The same: of the CPUs that GCC 12 knows Ice Lake is nearest (in turns,
// prefill in bf16 0.3 to 1% faster, verify even to 2%, 64x1@128 even to 1%; f32
// and f16 even).
#pragma GCC target("tune=icelake-server")
#endif
#include "kernels/pass-inl.h"
HWY_AFTER_NAMESPACE();
#endif
