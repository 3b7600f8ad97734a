// SPDX-License-Identifier: Apache-2.0

#include "bench/peer_softmax.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace varlane::bench {
namespace {

constexpr int kLane = 16;

// 2^f, f in [0, 1), the highest power's first.
constexpr int kTerms = 5;
constexpr float kExp2[kTerms] = {0.0134266838f, 0.0522424765f, 0.241280198f,
                                 0.693044841f, 1.0f};

// With bf16 for the sake of one intrinsic: nothing else makes its instructions.
#define VARLANE_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))

bool HasAvx512() {
  return __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

VARLANE_AVX512 inline __m512 Exp2(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(kExp2[0]);
  for (int i = 1; i < kTerms; ++i) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[i]));
  }
  return _mm512_scalef_ps(p, n);
}

VARLANE_AVX512 inline void StoreLane(float* to, __mmask16 mask, __m512 p) {
  _mm512_mask_storeu_ps(to, mask, p);
}
VARLANE_AVX512 inline void StoreLane(BF16* to, __mmask16 mask, __m512 p) {
  _mm256_mask_storeu_epi16(to, mask,
                           reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p)));
}
// bf16 for CPUs that cannot convert to it: rounded to nearest even by integers.
struct RoundedBf16 {
  BF16 value;
};
VARLANE_AVX512 inline void StoreLane(RoundedBf16* to, __mmask16 mask,
                                     __m512 p) {
  const __m512i bits = _mm512_castps_si512(p);
  const __m512i odd =
      _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(rounded));
}

VARLANE_AVX512 inline __mmask16 MaskOf(int64_t left) {
  return left >= kLane
             ? __mmask16{0xffff}
             : static_cast<__mmask16>((1u << std::max<int64_t>(left, 0)) - 1u);
}

template <typename P>
VARLANE_AVX512 float RowOfAvx512(const float* scores, int64_t visible,
                                 int64_t length, float scale_log2, P* to) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  __m512 high = lowest;
  for (int64_t i = 0; i < visible; i += kLane) {
    high = _mm512_max_ps(
        high, _mm512_mask_loadu_ps(lowest, MaskOf(visible - i), scores + i));
  }
  const __m512 scale = _mm512_set1_ps(scale_log2);
  const __m512 bias = _mm512_set1_ps(-_mm512_reduce_max_ps(high) * scale_log2);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < visible; i += kLane) {
    const __mmask16 seen = MaskOf(visible - i);
    const __m512 s = _mm512_maskz_loadu_ps(seen, scores + i);
    const __m512 p =
        _mm512_maskz_mov_ps(seen, Exp2(_mm512_fmadd_ps(s, scale, bias)));
    sum = _mm512_add_ps(sum, p);
    StoreLane(to + i, MaskOf(length - i), p);
  }
  for (int64_t i = (visible + kLane - 1) / kLane * kLane; i < length;
       i += kLane) {
    StoreLane(to + i, MaskOf(length - i), _mm512_setzero_ps());
  }
  return _mm512_reduce_add_ps(sum);
}

// The same with AVX2.
#define VARLANE_AVX2 __attribute__((target("avx2,fma")))
constexpr int kHalfLane = 8;

// Its results below 2^-126 are 0.
VARLANE_AVX2 inline __m256 Exp2(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-127.0f));
  const __m256 n = _mm256_floor_ps(x);
  const __m256 f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_set1_ps(kExp2[0]);
  for (int i = 1; i < kTerms; ++i) {
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[i]));
  }
  const __m256i biased =
      _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

// Lanes below `left`.
VARLANE_AVX2 inline __m256i LanesOf(int64_t left) {
  const auto count = static_cast<int>(
      std::min<int64_t>(std::max<int64_t>(left, 0), kHalfLane));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

VARLANE_AVX2 float RowOfAvx2(const float* scores, int64_t visible,
                             int64_t length, float scale_log2, float* to) {
  const __m256 lowest = _mm256_set1_ps(-INFINITY);
  __m256 high = lowest;
  for (int64_t i = 0; i < visible; i += kHalfLane) {
    const __m256i seen = LanesOf(visible - i);
    high = _mm256_max_ps(
        high, _mm256_blendv_ps(lowest, _mm256_maskload_ps(scores + i, seen),
                               _mm256_castsi256_ps(seen)));
  }
  alignas(32) float lanes[kHalfLane];
  _mm256_store_ps(lanes, high);
  const __m256 scale = _mm256_set1_ps(scale_log2);
  const __m256 bias =
      _mm256_set1_ps(-*std::max_element(lanes, lanes + kHalfLane) * scale_log2);
  __m256 sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < visible; i += kHalfLane) {
    const __m256i seen = LanesOf(visible - i);
    const __m256 s = _mm256_maskload_ps(scores + i, seen);
    const __m256 p = _mm256_and_ps(Exp2(_mm256_fmadd_ps(s, scale, bias)),
                                   _mm256_castsi256_ps(seen));
    sum = _mm256_add_ps(sum, p);
    _mm256_maskstore_ps(to + i, LanesOf(length - i), p);
  }
  for (int64_t i = (visible + kHalfLane - 1) / kHalfLane * kHalfLane;
       i < length; i += kHalfLane) {
    _mm256_maskstore_ps(to + i, LanesOf(length - i), _mm256_setzero_ps());
  }
  _mm256_store_ps(lanes, sum);
  return std::accumulate(lanes, lanes + kHalfLane, 0.0f);
}

}  // namespace

bool CanSoftmax(DType dtype) {
  return HasAvx512() || (dtype == DType::kF32 && HasAvx2());
}

float SoftmaxRow(const float* scores, int64_t visible, int64_t length,
                 float scale_log2, float* to) {
  static const bool avx512 = HasAvx512();
  return avx512 ? RowOfAvx512(scores, visible, length, scale_log2, to)
                : RowOfAvx2(scores, visible, length, scale_log2, to);
}

float SoftmaxRow(const float* scores, int64_t visible, int64_t length,
                 float scale_log2, BF16* to) {
  static const bool converts = __builtin_cpu_supports("avx512bf16");
  return converts ? RowOfAvx512(scores, visible, length, scale_log2, to)
                  : RowOfAvx512(scores, visible, length, scale_log2,
                                reinterpret_cast<RoundedBf16*>(to));
}

}  // namespace varlane::bench
