// SPDX-License-Identifier: Apache-2.0

#include "varlane/kv_ops.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/kv_blocks.h"
#include "attention/shards.h"
#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

// Bytes that one threadgroup copies: large enough to pay, small enough that a
// single block of a deep model is shared out.
constexpr int64_t kCopyBytes = 256 * 1024;

Status ValidateView(Runtime* runtime, const KvView& kv) {
  VARLANE_REQUIRE_ARG(runtime != nullptr, "runtime is null");
  VARLANE_RETURN_IF_ERROR(kv.layout.Validate());
  VARLANE_REQUIRE_ARG(kv.num_blocks >= 0, "the KV view has ", kv.num_blocks,
                      " blocks");
  return ValidateShards(kv);
}

// --- copy --------------------------------------------------------------------

// A block that one of the copies names, in order of blocks.
struct Named {
  int64_t block;
  size_t copy;
  friend bool operator<(const Named& a, const Named& b) {
    return a.block != b.block ? a.block < b.block : a.copy < b.copy;
  }
};

// Each destination is named once, and is no source.
Status ValidateDisjoint(std::span<const BlockCopy> copies) {
  std::vector<Named> to;
  to.reserve(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) to.push_back({copies[i].to, i});
  std::sort(to.begin(), to.end());
  for (size_t i = 1; i < to.size(); ++i) {
    VARLANE_REQUIRE_ARG(to[i].block != to[i - 1].block, "copies[", to[i].copy,
                        "].to = ", to[i].block, " is also copies[",
                        to[i - 1].copy, "].to");
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto at =
        std::lower_bound(to.begin(), to.end(), Named{copies[i].from, 0});
    VARLANE_REQUIRE_ARG(at == to.end() || at->block != copies[i].from,
                        "copies[", i, "].from = ", copies[i].from,
                        " is also copies[", at->copy, "].to");
  }
  return {};
}

Status ValidateCopies(Runtime* runtime, const KvView& kv,
                      std::span<const BlockCopy> copies) {
  VARLANE_RETURN_IF_ERROR(ValidateView(runtime, kv));
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto [from, to] = copies[i];
    VARLANE_REQUIRE_ARG(kv.contains(from), "copies[", i, "].from = ", from,
                        ", but ", WhereBlocksEnd(kv, from, "view"));
    VARLANE_REQUIRE_ARG(kv.contains(to), "copies[", i, "].to = ", to, ", but ",
                        WhereBlocksEnd(kv, to, "view"));
  }
  VARLANE_REQUIRE_ARG(copies.empty() || kv.base != nullptr,
                      "the KV view's base is null");
  try {
    return ValidateDisjoint(copies);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted,
            StrCat("no memory to copy ", copies.size(), " blocks")};
  }
}

// --- gather ------------------------------------------------------------------

Status ValidateOutput(const char* name, const MutableTensor& tensor,
                      DType cache) {
  VARLANE_REQUIRE_ARG(tensor.data == nullptr || tensor.dtype == DType::kF32 ||
                          tensor.dtype == cache,
                      name, ".dtype = ", DTypeName(tensor.dtype),
                      ", must be f32 or the cache's ", DTypeName(cache));
  return {};
}

Status ValidateRange(Runtime* runtime, const KvView& kv, const KvRange& range,
                     const MutableTensor& k, const MutableTensor& v) {
  VARLANE_RETURN_IF_ERROR(ValidateView(runtime, kv));
  const KvLayout& layout = kv.layout;
  VARLANE_REQUIRE_ARG(range.layer >= 0 && range.layer < layout.num_layers,
                      "layer = ", range.layer, ", but the layout has ",
                      layout.num_layers, " layers");
  VARLANE_REQUIRE_ARG(range.begin >= 0, "begin = ", range.begin,
                      ", must not be negative");
  VARLANE_REQUIRE_ARG(range.end >= range.begin, "end = ", range.end,
                      " is below begin = ", range.begin);
  VARLANE_RETURN_IF_ERROR(ValidateOutput("k", k, layout.dtype));
  VARLANE_RETURN_IF_ERROR(ValidateOutput("v", v, layout.dtype));
  if (range.begin == range.end) return {};
  VARLANE_REQUIRE_ARG(kv.base != nullptr, "the KV view's base is null");
  const int64_t end = DivCeil<int64_t>(range.end, layout.block_size);
  VARLANE_REQUIRE_ARG(std::cmp_less_equal(end, range.block_table.size()),
                      "end = ", range.end, " needs ", end, " blocks of ",
                      layout.block_size, ", but block_table has ",
                      range.block_table.size(), " entries");
  for (int64_t b = range.begin / layout.block_size; b < end; ++b) {
    const int32_t block = range.block_table[static_cast<size_t>(b)];
    VARLANE_REQUIRE_ARG(kv.contains(block), "block_table[", b, "] = ", block,
                        ", but ", WhereBlocksEnd(kv, block, "view"));
  }
  return {};
}

// Where one (block, layer, head)'s elements stand, and where they go.
struct Unpack {
  const std::byte* from;
  std::byte* to;  // row 0
  int64_t row_bytes;
  int head_size;
};

// `offset(t, d)` is the element's place in the cache.
template <typename From, typename To, typename Offset>
void UnpackRows(const Unpack& unpack, int begin, int end,
                const Offset& offset) {
  std::byte* row = unpack.to;
  for (int t = begin; t < end; ++t, row += unpack.row_bytes) {
    for (int d = 0; d < unpack.head_size; ++d) {
      From from;
      std::memcpy(&from, unpack.from + offset(t, d) * int64_t{sizeof(From)},
                  sizeof(From));
      To to;
      if constexpr (std::is_same_v<From, To>) {
        to = from;
      } else {
        to = ToFloat(from);
      }
      std::memcpy(row + d * int64_t{sizeof(To)}, &to, sizeof(To));
    }
  }
}

template <typename Offset>
void UnpackRows(const Unpack& unpack, DType from, DType to, int begin, int end,
                const Offset& offset) {
  if (from == DType::kF32) {
    UnpackRows<float, float>(unpack, begin, end, offset);
  } else if (from == to) {  // bits, of either type of 16
    UnpackRows<uint16_t, uint16_t>(unpack, begin, end, offset);
  } else if (from == DType::kBF16) {
    UnpackRows<BF16, float>(unpack, begin, end, offset);
  } else {
    UnpackRows<F16, float>(unpack, begin, end, offset);
  }
}

// Tokens [begin, end) of one block, all heads, to rows from `row` on.
class BlockGather {
 public:
  BlockGather(const KvView& kv, const KvRange& range, const MutableTensor& k,
              const MutableTensor& v)
      : kv_(kv), range_(range), k_(k), v_(v) {}

  void operator()(int64_t table_index) const {
    const KvLayout& layout = kv_.layout;
    const int64_t first = table_index * layout.block_size;
    const auto begin = static_cast<int>(std::max(range_.begin, first) - first);
    const auto end = static_cast<int>(
        std::min(range_.end, first + layout.block_size) - first);
    const int64_t row = first + begin - range_.begin;
    const int32_t block = range_.block_table[static_cast<size_t>(table_index)];
    // KvLayout's k_offset and v_offset without their divisions: pack is 1 or 2.
    const int64_t pack = layout.pack();
    const int64_t k_stride = layout.block_size;
    const int64_t v_stride = layout.v_head_size_padded();
    const auto k_offset = [=](int64_t t, int64_t d) {
      return (d & -pack) * k_stride + t * pack + (d & (pack - 1));
    };
    const auto v_offset = [=](int64_t t, int64_t d) {
      return (t & -pack) * v_stride + d * pack + (t & (pack - 1));
    };
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      if (k_.data != nullptr) {
        UnpackRows(Target(k_, kv_.k(block, range_.layer, head), row, head,
                          layout.head_size),
                   layout.dtype, k_.dtype, begin, end, k_offset);
      }
      if (v_.data != nullptr) {
        UnpackRows(Target(v_, kv_.v(block, range_.layer, head), row, head,
                          layout.v_head_size),
                   layout.dtype, v_.dtype, begin, end, v_offset);
      }
    }
  }

 private:
  Unpack Target(const MutableTensor& tensor, const std::byte* from, int64_t row,
                int head, int head_size) const {
    const int64_t token_stride =
        tensor.token_stride != 0 ? tensor.token_stride
                                 : int64_t{kv_.layout.num_kv_heads} * head_size;
    const int64_t head_stride =
        tensor.head_stride != 0 ? tensor.head_stride : head_size;
    const auto bytes = static_cast<int64_t>(SizeOf(tensor.dtype));
    return {from,
            static_cast<std::byte*>(tensor.data) +
                (row * token_stride + head * head_stride) * bytes,
            token_stride * bytes, head_size};
  }

  const KvView& kv_;
  const KvRange& range_;
  const MutableTensor& k_;
  const MutableTensor& v_;
};

}  // namespace

Status CopyBlocks(Runtime* runtime, const KvView& kv,
                  std::span<const BlockCopy> copies) {
  VARLANE_RETURN_IF_ERROR(ValidateCopies(runtime, kv, copies));
  const int64_t part_bytes = kv.part_bytes();
  const int64_t pieces = DivCeil(part_bytes, kCopyBytes);
  const int64_t of_a_block = pieces * kv.num_shards;
  const auto body = [&](const Threadgroup& tg) {
    const BlockCopy& copy =
        copies[static_cast<size_t>(tg.index() / of_a_block)];
    const int64_t piece = tg.index() % of_a_block;
    const int shard = static_cast<int>(piece / pieces);
    const int64_t begin = piece % pieces * kCopyBytes;
    const int64_t size = std::min(kCopyBytes, part_bytes - begin);
    std::memcpy(kv.part(copy.to, shard) + begin,
                kv.part(copy.from, shard) + begin, static_cast<size_t>(size));
  };
  return runtime->Launch(Grid{static_cast<int64_t>(copies.size()) * of_a_block},
                         body);
}

Status GatherKv(Runtime* runtime, const KvView& kv, const KvRange& range,
                const MutableTensor& k, const MutableTensor& v) {
  VARLANE_RETURN_IF_ERROR(ValidateRange(runtime, kv, range, k, v));
  if (range.begin == range.end) return {};
  const int64_t first = range.begin / kv.layout.block_size;
  const int64_t end = DivCeil<int64_t>(range.end, kv.layout.block_size);
  const BlockGather gather(kv, range, k, v);
  const auto body = [&](const Threadgroup& tg) { gather(first + tg.index()); };
  return runtime->Launch(Grid{end - first}, body);
}

}  // namespace varlane
