// Cache write: rounds tokens' K and V and moves them to their lanes.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Largest head size of the layout, padded.
constexpr int kMaxRowFloats = 1024;

// Tokens of one KV head that follow each other in one block. Four at a time
// where there are as many: a line of K holds several tokens and a line of V of
// bf16 two, so one by one each is written in parts of two or four bytes.
template <class Ops>
class TokenWriter {
 public:
  HWY_INLINE explicit TokenWriter(const WriteArgs& args)
      : args_(args),
        k_stride_(static_cast<size_t>(args.block_size) * kPiece),
        v_stride_(static_cast<size_t>(PaddedWidth(args.v_head_size)) * kPiece) {
  }

  HWY_INLINE void Write() {
    int token = 0;
#if HWY_TARGET != HWY_SCALAR
    // Pairs of V begin at even tokens.
    if (args_.offset % kX != 0) WriteOne(token++);
    for (; token + kAtOnce <= args_.count; token += kAtOnce) {
      WriteKeysOf4(token);
      WriteValuesOf4(token);
    }
#endif
    for (; token < args_.count; ++token) WriteOne(token);
  }

 private:
  using Cache = typename Ops::Cache;
  static constexpr DType kDType = std::is_same_v<Cache, float> ? DType::kF32
                                  : Ops::kPack == 2            ? DType::kBF16
                                                               : DType::kF16;
  static constexpr int kX = Ops::kPack;
  // Bytes of a token's elements that stand together.
  static constexpr size_t kPiece = kX * sizeof(Cache);
  static constexpr int kAtOnce = 4;

  HWY_INLINE void RoundKey(int token, Cache* to) {
    Round(args_.k, args_.next_k, token * args_.k_token_bytes, args_.k_dtype,
          args_.head_size, to);
  }
  HWY_INLINE void RoundValue(int token, Cache* to) {
    Round(args_.v, args_.next_v, token * args_.v_token_bytes, args_.v_dtype,
          args_.v_head_size, to);
  }
  HWY_INLINE void Round(const void* from, const void* next, int64_t at,
                        DType dtype, int n, Cache* to) {
    if (next != nullptr) {
      FetchLines(static_cast<const std::byte*>(next) + at,
                 static_cast<size_t>(n) * SizeOf(dtype));
    }
    ReadRow(static_cast<const std::byte*>(from) + at, dtype, n, floats_);
    WriteRow(floats_, kDType, n, to);
  }

  // Where a token's keys begin in [D/x][block_size][x],
  HWY_INLINE std::byte* Keys(int token) const {
    return args_.k_block + static_cast<size_t>(args_.offset + token) * kPiece;
  }
  // and its values in [block_size/y][Dv'][y].
  HWY_INLINE std::byte* Values(int token) const {
    const int at = args_.offset + token;
    return args_.v_block + static_cast<size_t>(at / kX) * v_stride_ +
           static_cast<size_t>(at % kX) * sizeof(Cache);
  }

  HWY_INLINE void WriteOne(int token) {
    RoundKey(token, rows_[0]);
    std::byte* k = Keys(token);
    for (int d = 0; d < args_.head_size; d += kX, k += k_stride_) {
      std::memcpy(k, rows_[0] + d, kPiece);
    }
    WriteValue(token);
  }

  HWY_INLINE void WriteValue(int token) {
    std::byte* v = Values(token);
    if constexpr (kX == 1) {
      RoundValue(token, reinterpret_cast<Cache*>(v));
    } else {
      RoundValue(token, rows_[0]);
      for (int d = 0; d < args_.v_head_size; ++d, v += kPiece) {
        std::memcpy(v, rows_[0] + d, sizeof(Cache));
      }
    }
  }

#if HWY_TARGET != HWY_SCALAR
  // 16 bytes, whatever the target.
  using D32 = hn::FixedTag<uint32_t, 4>;
  using D64 = hn::FixedTag<uint64_t, 2>;
  using DHalves = hn::FixedTag<uint16_t, 8>;

  static HWY_INLINE auto Load16(const Cache* from) {
    return hn::LoadU(D32(), reinterpret_cast<const uint32_t*>(from));
  }
  static HWY_INLINE void Store16(hn::Vec<D32> v, std::byte* to) {
    hn::StoreU(v, D32(), reinterpret_cast<uint32_t*>(to));
  }
  // {a[0], b[0], a[1], b[1]} of 8 bytes each.
  static HWY_INLINE void Store64s(hn::Vec<D32> a, hn::Vec<D32> b, std::byte* to,
                                  size_t stride) {
    const auto wide_a = hn::BitCast(D64(), a);
    const auto wide_b = hn::BitCast(D64(), b);
    Store16(hn::BitCast(D32(), hn::InterleaveLower(D64(), wide_a, wide_b)), to);
    Store16(hn::BitCast(D32(), hn::InterleaveUpper(D64(), wide_a, wide_b)),
            to + stride);
  }
  // The halves of 16 bytes.
  static HWY_INLINE void StoreHalves(hn::Vec<D32> v, std::byte* to,
                                     size_t stride) {
    uint64_t halves[2];
    hn::StoreU(hn::BitCast(D64(), v), D64(), halves);
    std::memcpy(to, &halves[0], sizeof(uint64_t));
    std::memcpy(to + stride, &halves[1], sizeof(uint64_t));
  }

  HWY_INLINE void WriteKeysOf4(int token) {
    for (int t = 0; t < kAtOnce; ++t) RoundKey(token + t, rows_[t]);
    std::byte* k = Keys(token);
    constexpr int kStep = 16 / static_cast<int>(sizeof(Cache));
    for (int d = 0; d < args_.head_size; d += kStep) {
      const auto a = Load16(rows_[0] + d);
      const auto b = Load16(rows_[1] + d);
      const auto c = Load16(rows_[2] + d);
      const auto e = Load16(rows_[3] + d);
      if constexpr (kPiece == 4) {
        Transpose32(a, b, c, e, k);
        k += 4 * k_stride_;
      } else {
        Transpose16(a, b, c, e, k);
        k += 8 * k_stride_;
      }
    }
  }

  // Four pieces of four bytes of each token to four lines.
  HWY_INLINE void Transpose32(hn::Vec<D32> a, hn::Vec<D32> b, hn::Vec<D32> c,
                              hn::Vec<D32> e, std::byte* to) const {
    const D32 d;
    Store64s(hn::InterleaveLower(d, a, b), hn::InterleaveLower(d, c, e), to,
             k_stride_);
    Store64s(hn::InterleaveUpper(d, a, b), hn::InterleaveUpper(d, c, e),
             to + 2 * k_stride_, k_stride_);
  }
  // Eight of two bytes to eight.
  HWY_INLINE void Transpose16(hn::Vec<D32> a, hn::Vec<D32> b, hn::Vec<D32> c,
                              hn::Vec<D32> e, std::byte* to) const {
    const D32 d;
    const auto low = [](auto x, auto y) HWY_ATTR {
      return hn::BitCast(
          D32(), hn::InterleaveLower(DHalves(), hn::BitCast(DHalves(), x),
                                     hn::BitCast(DHalves(), y)));
    };
    const auto high = [](auto x, auto y) HWY_ATTR {
      return hn::BitCast(
          D32(), hn::InterleaveUpper(DHalves(), hn::BitCast(DHalves(), x),
                                     hn::BitCast(DHalves(), y)));
    };
    const auto low_ab = low(a, b);
    const auto low_ce = low(c, e);
    const auto high_ab = high(a, b);
    const auto high_ce = high(c, e);
    StoreHalves(hn::InterleaveLower(d, low_ab, low_ce), to, k_stride_);
    StoreHalves(hn::InterleaveUpper(d, low_ab, low_ce), to + 2 * k_stride_,
                k_stride_);
    StoreHalves(hn::InterleaveLower(d, high_ab, high_ce), to + 4 * k_stride_,
                k_stride_);
    StoreHalves(hn::InterleaveUpper(d, high_ab, high_ce), to + 6 * k_stride_,
                k_stride_);
  }

  HWY_INLINE void WriteValuesOf4(int token) {
    if constexpr (kX == 1) {
      for (int t = 0; t < kAtOnce; ++t) WriteValue(token + t);
    } else {
      for (int t = 0; t < kAtOnce; ++t) RoundValue(token + t, rows_[t]);
      InterleavePair(rows_[0], rows_[1], Values(token));
      InterleavePair(rows_[2], rows_[3], Values(token + 2));
    }
  }
  HWY_INLINE void InterleavePair(const Cache* first, const Cache* second,
                                 std::byte* to) const {
    const DHalves d;
    for (int i = 0; i < args_.v_head_size; i += 8, to += 32) {
      const auto a = hn::BitCast(d, Load16(first + i));
      const auto b = hn::BitCast(d, Load16(second + i));
      Store16(hn::BitCast(D32(), hn::InterleaveLower(d, a, b)), to);
      Store16(hn::BitCast(D32(), hn::InterleaveUpper(d, a, b)), to + 16);
    }
  }
#endif

  const WriteArgs& args_;
  size_t k_stride_;  // bytes from one piece of a key to its next
  size_t v_stride_;  // from one row of values, or pair of rows, to the next
  alignas(64) float floats_[kMaxRowFloats];
  alignas(64) Cache rows_[kAtOnce][kMaxRowFloats];
};

template <class Ops>
void WriteTokens(const WriteArgs& args) {
  TokenWriter<Ops>(args).Write();
}

}  // namespace VARLANE_NS
}  // namespace varlane
