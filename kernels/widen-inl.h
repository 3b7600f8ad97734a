// f16 runs as fp32 in scratch, where enough rows share them.
//
// A conversion from f16 takes both multipliers' ports where 512-bit arithmetic
// has no others: 4 of them beside the 24 multiply-adds of a register tile's
// step cost a quarter of its speed. So a run is converted once for all register
// groups that pass it. Same numbers in the same order: same bits.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Of a run: it shall stay in L2 beside what is fetched of the next one.
constexpr size_t kWidenBytes = size_t{512} << 10;

// What is converted. bf16, of which a pair takes a shift and a mask, gained 3%
// of 43 groups and nothing of 22 (Ice Lake).
template <class Ops>
constexpr bool kWidens = kIntelAvx512&& std::is_same_v<Ops, OpsF16>;

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
    StoreF(Pool::Load(from + i * kVecBytes<Pool>), to);
    to += kN;
  }
  return to;
}

// The first `count` groups of `pages`, whose keys' steps are `key_stride` bytes
// apart, as OpsF32 reads them: written from `to` on, named by `wide`. A group
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
    for (int d = 0; d < head_size; ++d) {
      to = WidenVectors<Pool>(pages.k[g] + static_cast<size_t>(d) * key_stride,
                              kGroupTokens / kN, to);
    }
    wide.v[g] = reinterpret_cast<const std::byte*>(to);
    to = WidenVectors<Pool>(pages.v[g], GroupElements(acc_floats) / kN, to);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
