// Cache write: rounds tokens' K and V and moves them to their lanes.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Largest head size of the layout, padded.
constexpr int kMaxRowFloats = 640;

// Tokens of one KV head that follow each other in one block. Several at a time
// where there are as many: a line of K holds 16 or 32 tokens and a line of V of
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
    const auto write = [&](auto tokens) HWY_ATTR {
      WriteKeysOf<decltype(tokens)::value>(token);
      WriteValuesOf(token, tokens);
      token += tokens;
    };
    if constexpr (kMostAtOnce > 4) {
      while (token + kMostAtOnce <= args_.count) {
        write(std::integral_constant<int, kMostAtOnce>());
      }
    }
    while (token + 4 <= args_.count) write(std::integral_constant<int, 4>());
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
  static constexpr int kMostAtOnce = kPiece == 4 ? 16 : 4;

  // A token's row as the cache has it: `buffer`, or where it stands if nothing
  // rounds it.
  HWY_INLINE const Cache* Key(int token, Cache* buffer) {
    return Rounded(args_.k, args_.next_k, token * args_.k_token_bytes,
                   args_.k_dtype, args_.head_size, buffer);
  }
  HWY_INLINE const Cache* Value(int token, Cache* buffer) {
    return Rounded(args_.v, args_.next_v, token * args_.v_token_bytes,
                   args_.v_dtype, args_.v_head_size, buffer);
  }
  HWY_INLINE const Cache* Rounded(const void* from, const void* next,
                                  int64_t at, DType dtype, int n,
                                  Cache* buffer) {
    if (next != nullptr) {
      FetchLines(static_cast<const std::byte*>(next) + at,
                 static_cast<size_t>(n) * SizeOf(dtype));
    }
    const auto* row = static_cast<const std::byte*>(from) + at;
    if (dtype == kDType) return reinterpret_cast<const Cache*>(row);
    if constexpr (kDType == DType::kF32) {
      ReadRow(row, dtype, n, buffer);
    } else {
      ReadRow(row, dtype, n, floats_);
      WriteRow(floats_, kDType, n, buffer);
    }
    return buffer;
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
    const Cache* key = Key(token, rows_[0]);
    std::byte* k = Keys(token);
    for (int d = 0; d < args_.head_size; d += kX, k += k_stride_) {
      std::memcpy(k, key + d, kPiece);
    }
    WriteValue(token);
  }

  HWY_INLINE void WriteValue(int token) {
    std::byte* v = Values(token);
    if constexpr (kX == 1) {
      auto* to = reinterpret_cast<Cache*>(v);
      const Cache* value = Value(token, to);
      if (value == to) return;
      std::memcpy(to, value,
                  static_cast<size_t>(args_.v_head_size) * sizeof(Cache));
    } else {
      const Cache* value = Value(token, rows_[0]);
      for (int d = 0; d < args_.v_head_size; ++d, v += kPiece) {
        std::memcpy(v, value + d, sizeof(Cache));
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
  static HWY_INLINE auto LoadHalves(const Cache* from) {
    return hn::BitCast(DHalves(), Load16(from));
  }
  // {a[0], b[0], a[1], b[1] ...} of 2 bytes each: the first and second 16
  // bytes.
  static HWY_INLINE auto InterleaveLow(hn::Vec<DHalves> a, hn::Vec<DHalves> b) {
    return hn::BitCast(D32(), hn::InterleaveLower(DHalves(), a, b));
  }
  static HWY_INLINE auto InterleaveHigh(hn::Vec<DHalves> a,
                                        hn::Vec<DHalves> b) {
    return hn::BitCast(D32(), hn::InterleaveUpper(DHalves(), a, b));
  }
  static HWY_INLINE void Store16(hn::Vec<D32> v, std::byte* to) {
    hn::StoreU(v, D32(), reinterpret_cast<uint32_t*>(to));
  }
  // The first 8 bytes of each, and the second.
  static HWY_INLINE void Interleave64(hn::Vec<D32> a, hn::Vec<D32> b,
                                      hn::Vec<D32>& first,
                                      hn::Vec<D32>& second) {
    const auto wide_a = hn::BitCast(D64(), a);
    const auto wide_b = hn::BitCast(D64(), b);
    first = hn::BitCast(D32(), hn::InterleaveLower(D64(), wide_a, wide_b));
    second = hn::BitCast(D32(), hn::InterleaveUpper(D64(), wide_a, wide_b));
  }
  // Two lines' 8 bytes.
  HWY_INLINE void StorePieces(hn::Vec<D32> v, std::byte* to) const {
    uint64_t pieces[2];
    hn::StoreU(hn::BitCast(D64(), v), D64(), pieces);
    std::memcpy(to, &pieces[0], sizeof(uint64_t));
    std::memcpy(to + k_stride_, &pieces[1], sizeof(uint64_t));
  }

  // A multiple of four tokens: of several quads each line is written in one go.
  template <int kTokens>
  HWY_INLINE void WriteKeysOf(int token) {
    const Cache* rows[kTokens];
    for (int t = 0; t < kTokens; ++t) rows[t] = Key(token + t, rows_[t]);
    std::byte* k = Keys(token);
    constexpr int kStep = 16 / static_cast<int>(sizeof(Cache));
    for (int d = 0; d < args_.head_size; d += kStep) {
      if constexpr (kPiece == 4) {
        constexpr int kQuads = kTokens / 4;
        hn::Vec<D32> lines[kQuads][4];
        HWY_UNROLL(4) for (int q = 0; q < kQuads; ++q) {
          Transpose32(rows + 4 * q, d, lines[q]);
        }
        HWY_UNROLL(4) for (int i = 0; i < 4; ++i, k += k_stride_) {
          HWY_UNROLL(4) for (int q = 0; q < kQuads; ++q) {
            Store16(lines[q][i], k + 16 * q);
          }
        }
      } else {
        static_assert(kTokens == 4);
        Transpose16(rows, d, k);
        k += 8 * k_stride_;
      }
    }
  }

  // Four pieces of four bytes of each of four tokens.
  static HWY_INLINE void Transpose32(const Cache* const* rows, int at,
                                     hn::Vec<D32> (&lines)[4]) {
    const D32 d;
    const auto a = Load16(rows[0] + at);
    const auto b = Load16(rows[1] + at);
    const auto c = Load16(rows[2] + at);
    const auto e = Load16(rows[3] + at);
    Interleave64(hn::InterleaveLower(d, a, b), hn::InterleaveLower(d, c, e),
                 lines[0], lines[1]);
    Interleave64(hn::InterleaveUpper(d, a, b), hn::InterleaveUpper(d, c, e),
                 lines[2], lines[3]);
  }
  // Eight of two bytes, each of them to a line of its own.
  HWY_INLINE void Transpose16(const Cache* const* rows, int at,
                              std::byte* to) const {
    const D32 d;
    const auto a = LoadHalves(rows[0] + at);
    const auto b = LoadHalves(rows[1] + at);
    const auto c = LoadHalves(rows[2] + at);
    const auto e = LoadHalves(rows[3] + at);
    const auto low_ab = InterleaveLow(a, b);
    const auto low_ce = InterleaveLow(c, e);
    const auto high_ab = InterleaveHigh(a, b);
    const auto high_ce = InterleaveHigh(c, e);
    StorePieces(hn::InterleaveLower(d, low_ab, low_ce), to);
    StorePieces(hn::InterleaveUpper(d, low_ab, low_ce), to + 2 * k_stride_);
    StorePieces(hn::InterleaveLower(d, high_ab, high_ce), to + 4 * k_stride_);
    StorePieces(hn::InterleaveUpper(d, high_ab, high_ce), to + 6 * k_stride_);
  }

  HWY_INLINE void WriteValuesOf(int token, int tokens) {
    for (int t = token; t < token + tokens; t += kX) {
      if constexpr (kX == 1) {
        WriteValue(t);
      } else {
        const Cache* first = Value(t, rows_[0]);
        InterleavePair(first, Value(t + 1, rows_[1]), Values(t));
      }
    }
  }
  HWY_INLINE void InterleavePair(const Cache* first, const Cache* second,
                                 std::byte* to) const {
    for (int i = 0; i < args_.v_head_size; i += 8, to += 32) {
      const auto a = LoadHalves(first + i);
      const auto b = LoadHalves(second + i);
      Store16(InterleaveLow(a, b), to);
      Store16(InterleaveHigh(a, b), to + 16);
    }
  }
#endif

  const WriteArgs& args_;
  size_t k_stride_;  // bytes from one piece of a key to its next
  size_t v_stride_;  // from one row of values, or pair of rows, to the next
  alignas(64) float floats_[kMaxRowFloats];
  alignas(64) Cache rows_[kMostAtOnce][kMaxRowFloats];
};

template <class Ops>
void WriteTokens(const WriteArgs& args) {
  TokenWriter<Ops>(args).Write();
}

}  // namespace VARLANE_NS
}  // namespace varlane
