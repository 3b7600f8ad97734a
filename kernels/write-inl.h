// Cache write: rounds one token's K and V and scatters them to their lanes.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Largest head size of the layout, padded.
constexpr int kMaxRowFloats = 1024;

template <class Ops>
void WriteToken(const WriteArgs& args) {
  using Cache = typename Ops::Cache;
  constexpr DType kDType = std::is_same_v<Cache, float> ? DType::kF32
                           : Ops::kPack == 2            ? DType::kBF16
                                                        : DType::kF16;
  constexpr size_t kX = Ops::kPack;
  alignas(64) float floats[kMaxRowFloats];
  alignas(64) Cache row[kMaxRowFloats];

  // K: [D/x][block_size][x]
  ReadRow(args.k, args.k_dtype, args.head_size, floats);
  WriteRow(floats, kDType, args.head_size, row);
  std::byte* k =
      args.k_block + static_cast<size_t>(args.offset) * kX * sizeof(Cache);
  const size_t k_stride =
      static_cast<size_t>(args.block_size) * kX * sizeof(Cache);
  for (size_t d = 0; d < static_cast<size_t>(args.head_size); d += kX) {
    std::memcpy(k, row + d, kX * sizeof(Cache));
    k += k_stride;
  }

  // V: [block_size/y][Dv'][y]
  ReadRow(args.v, args.v_dtype, args.v_head_size, floats);
  WriteRow(floats, kDType, args.v_head_size, row);
  const auto padded = static_cast<size_t>(PaddedWidth(args.v_head_size));
  const auto offset = static_cast<size_t>(args.offset);
  std::byte* v =
      args.v_block + (offset / kX * padded * kX + offset % kX) * sizeof(Cache);
  if constexpr (kX == 1) {
    std::memcpy(v, row, static_cast<size_t>(args.v_head_size) * sizeof(Cache));
  } else {
    for (size_t d = 0; d < static_cast<size_t>(args.v_head_size); ++d) {
      std::memcpy(v + d * kX * sizeof(Cache), row + d, sizeof(Cache));
    }
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
