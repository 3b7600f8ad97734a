// Which Highway targets the kernels are compiled for, and why.
//
// Included before any Highway header in every file that has a foreach pass.
//
//   AVX3_BF16  our own pass: AVX3 plus avx512_bf16 (see pass-inl.h), which
//              only kernels of the bf16 cache multiply with; AMD's Zen 4
//   AVX3_ZEN5  the same, fetching and cutting rows as suits Zen 5
//   AVX3       AVX-512 F/BW/CD/DQ/VL: Intel's CPUs (vec-inl.h), also those that
//              have avx512_bf16, since it is slower there (kernel_table.cc)
//   AVX2       the first with FMA; suits Zen 3
//   SSE4       no FMA, which fma-inl.h makes up for
//   static     whatever the compiler's baseline is (SCALAR, EMU128 or SSE2)
//
// All give the same bits.
//
// Left out: SSSE3 (nothing over SSE4 worth its size), AVX3_DL, ZEN4 and SPR
// (what they add for us is the bf16 dot product, which AVX3_BF16 has).
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KERNELS_TARGETS_H_
#define VARLANE_KERNELS_TARGETS_H_

// AVX10_2, AVX3_SPR and AVX3_ZEN4 by number: Highway 1.0.3 has no names for
// them, and on later versions a name used before its definition would not do.
#define VARLANE_LATER_X86_TARGETS ((1LL << 3) | (1LL << 4) | (1LL << 6))

// Sanitizer and fuzzing builds (see CMakeLists.txt) do with one target of 128
// bits, and with AVX3_BF16 and AVX3_ZEN5 for the bf16 cache alone (1), or
// without AVX-512 (2): what threads share is the same on every target.
#ifndef VARLANE_FEWER_TARGETS
#define VARLANE_FEWER_TARGETS 0
#endif
#if VARLANE_FEWER_TARGETS == 2
#define VARLANE_SPARED_TARGETS (HWY_SSE4 | HWY_AVX3)
#elif VARLANE_FEWER_TARGETS == 1
#define VARLANE_SPARED_TARGETS HWY_SSE4
#else
#define VARLANE_SPARED_TARGETS 0
#endif
#define VARLANE_ALL_PASSES (VARLANE_FEWER_TARGETS == 0)

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | VARLANE_LATER_X86_TARGETS | VARLANE_SPARED_TARGETS)

#endif  // VARLANE_KERNELS_TARGETS_H_
