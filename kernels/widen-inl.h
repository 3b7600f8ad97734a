// Tiles of 16-bit caches as fp32 in scratch, where enough rows share them.
//
// A conversion from f16, and the shift and the mask of a pair of bf16, take the
// multipliers' ports where 512-bit arithmetic has no others: beside the 24 or
// 48 multiply-adds of a register tile's step they cost a quarter of its speed,
// or a tenth. So a tile is converted once for all register groups that pass it
// (a Xeon with AMX, bf16, 4 query heads on a KV head: prefill 9 to 10% faster);
// fewer rows have taller register tiles (kMostRows). Same numbers in the same
// order: same bits. Values of an f32 cache are copied likewise where more rows
// still share them.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// What computes a widened tile.
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

// Elements of the keys resp. values of a 16-token group.
HWY_INLINE size_t GroupElements(int width) {
  return static_cast<size_t>(width) * kGroupTokens;
}

// Whether the rows of a KV head, in groups of kMaxRows, pass its tiles as fp32:
// where they are so many that tiles of kMostRows are no faster (Emerald Rapids,
// in turns: 17 groups are even in bf16, and 7 in f16).
template <class Ops>
HWY_INLINE bool Widens(const RowGroups& groups) {
  return kWidens<Ops> && groups.count >= (Ops::kPack == 2 ? 17 : 7);
}

// Whether the rows of a KV head add a tile's values from a copy of them, on
// end: leaving for another group of 16 tokens four times a tile costs the loop
// 5%, a copy as much as 22 register groups lose by that (a Xeon with AMX, f32:
// 43 are 2% faster with it, 16 2 to 3% slower).
template <class Pool>
HWY_INLINE bool CopiesValues(const RowGroups& groups) {
  return kIntelAvx512 && std::is_same_v<Pool, OpsF32> && groups.count >= 32;
}

// Whether scratch holds a tile.
template <class Pool>
HWY_INLINE bool HoldsTile(const RowGroups& groups) {
  return Widens<Pool>(groups) || CopiesValues<Pool>(groups) ||
         (kCutsPanels && ByTile<Pool>(groups));
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

// A tile's groups as WideOps reads them, written to scratch and named by the
// same places of `wide`; one that repeats the group before it is written once.
template <class Write>
HWY_INLINE void WidenGroups(const std::byte* const* from,
                            const std::byte** wide, float* to,
                            const Write& write) {
  for (int g = 0; g < kGroups; ++g) {
    if (g > 0 && from[g] == from[g - 1]) {
      wide[g] = wide[g - 1];
      continue;
    }
    wide[g] = reinterpret_cast<const std::byte*>(to);
    to = write(from[g], to);
  }
}

// Of `tile`, the keys, whose steps are `key_stride` bytes apart.
template <class Pool>
HWY_NOINLINE void WidenKeys(const RunPages& pages, int tile, size_t key_stride,
                            int head_size, float* to, RunPages& wide) {
  WidenGroups(pages.k + tile * kGroups, wide.k + tile * kGroups, to,
              [&](const std::byte* from, float* out) HWY_ATTR {
                for (int step = 0; step < head_size / Pool::kPack; ++step) {
                  out = WidenVectors<Pool>(
                      from + static_cast<size_t>(step) * key_stride,
                      kGroupTokens / kN, out);
                }
                return out;
              });
}

// The same of its values.
template <class Pool>
HWY_NOINLINE void WidenValues(const RunPages& pages, int tile, int acc_floats,
                              float* to, RunPages& wide) {
  WidenGroups(pages.v + tile * kGroups, wide.v + tile * kGroups, to,
              [&](const std::byte* from, float* out) HWY_ATTR {
                return WidenVectors<Pool>(
                    from, GroupElements(acc_floats) / kN / Pool::kPack, out);
              });
}

}  // namespace VARLANE_NS
}  // namespace varlane
