// Runs of 16-bit caches as fp32 in scratch, where enough rows share them.
//
// A conversion from f16, and the shift and the mask of a pair of bf16, take the
// multipliers' ports where 512-bit arithmetic has no others: beside the 24 or
// 48 multiply-adds of a register tile's step they cost a quarter of its speed,
// or a tenth. So a run is converted once for all register groups that pass it
// (a Xeon with AMX, bf16, 4 query heads on a KV head: prefill 9 to 10% faster,
// 12 tokens as fast as before). Same numbers in the same order: same bits.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Of a run: it shall stay in L2 beside what is fetched of the next one.
constexpr size_t kWidenBytes = size_t{512} << 10;

// What computes a widened run.
template <class Ops>
struct WideOps {
  using Type = Ops;  // is not widened
};
template <>
struct WideOps<OpsF16> {
  using Type = OpsF32;
};
#if !VARLANE_NATIVE_BF16
template <>
struct WideOps<OpsBf16> {
  using Type = OpsBf16Wide;
};
#endif
template <class Ops>
constexpr bool kWidens =
    kIntelAvx512 && !std::is_same_v<Ops, typename WideOps<Ops>::Type>;

// Elements of one 16-token group, and of a run.
HWY_INLINE size_t GroupElements(int width) {
  return static_cast<size_t>(width) * kGroupTokens;
}
HWY_INLINE size_t RunElements(int head_size, int acc_floats) {
  return GroupElements(head_size + acc_floats) * kRunGroups;
}

// Whether that many rows pass their runs as fp32.
template <class Ops>
HWY_INLINE bool Widens(int rows, int head_size, int v_head_size) {
  return kWidens<Ops> && RowGroups(rows, 1).many() &&
         RunElements(head_size, PaddedWidth(v_head_size)) * sizeof(float) <=
             kWidenBytes;
}

// `count` vectors on end; returns the end of what it wrote.
template <class Pool>
HWY_INLINE float* WidenVectors(const std::byte* from, size_t count, float* to) {
  for (size_t i = 0; i < count; ++i) {
    WideOps<Pool>::Type::Store(Pool::Load(from + i * kVecBytes<Pool>), to);
    to += kN * Pool::kPack;
  }
  return to;
}

// The first `count` groups of `pages`, whose keys' steps are `key_stride` bytes
// apart, as WideOps reads them: written from `to` on, named by `wide`. A group
// that repeats the one before it is written once.
template <class Pool>
HWY_NOINLINE void WidenRun(const RunPages& pages, int count, size_t key_stride,
                           int head_size, int acc_floats, float* to,
                           RunPages& wide) {
  wide.count = count;
  for (int g = 0; g < count; ++g) {
    if (g > 0 && pages.k[g] == pages.k[g - 1]) {
      wide.k[g] = wide.k[g - 1];
      wide.v[g] = wide.v[g - 1];
      continue;
    }
    wide.k[g] = reinterpret_cast<const std::byte*>(to);
    for (int step = 0; step < head_size / Pool::kPack; ++step) {
      to = WidenVectors<Pool>(
          pages.k[g] + static_cast<size_t>(step) * key_stride,
          kGroupTokens / kN, to);
    }
    wide.v[g] = reinterpret_cast<const std::byte*>(to);
    to = WidenVectors<Pool>(pages.v[g],
                            GroupElements(acc_floats) / kN / Pool::kPack, to);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
