// SPDX-License-Identifier: Apache-2.0

#include "attention/write_kv.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

// Tokens of a threadgroup: small enough to share out, large enough to pay.
constexpr int64_t kTokensPerGroup = 16;

Status Validate(const KvView& kv, int layer, const ConstTensor& k,
                const ConstTensor& v, std::span<const int64_t> slot_mapping) {
  VARLANE_RETURN_IF_ERROR(kv.layout.Validate());
  VARLANE_REQUIRE_ARG(layer >= 0 && layer < kv.layout.num_layers,
                      "layer = ", layer, ", but the layout has ",
                      kv.layout.num_layers, " layers");
  if (slot_mapping.empty()) return {};
  VARLANE_REQUIRE_ARG(k.data != nullptr, "k is null");
  VARLANE_REQUIRE_ARG(v.data != nullptr, "v is null");
  VARLANE_REQUIRE_ARG(kv.base != nullptr, "the KV view's base is null");
  const int64_t slots = kv.num_blocks * kv.layout.block_size;
  for (size_t i = 0; i < slot_mapping.size(); ++i) {
    VARLANE_REQUIRE_ARG(slot_mapping[i] < slots, "slot_mapping[", i,
                        "] = ", slot_mapping[i], ", but the pool has ",
                        kv.num_blocks, " blocks x ", kv.layout.block_size,
                        " = ", slots, " slots");
  }
  return {};
}

const void* RowOf(const ConstTensor& tensor, int64_t token, int head,
                  int num_heads, int head_size) {
  const int64_t token_stride = tensor.token_stride != 0
                                   ? tensor.token_stride
                                   : int64_t{num_heads} * head_size;
  const int64_t head_stride =
      tensor.head_stride != 0 ? tensor.head_stride : head_size;
  return static_cast<const std::byte*>(tensor.data) +
         (token * token_stride + head * head_stride) *
             static_cast<int64_t>(SizeOf(tensor.dtype));
}

}  // namespace

Status WriteKvTokens(Runtime* runtime, const KernelTable& table,
                     const KvView& kv, int layer, const ConstTensor& k,
                     const ConstTensor& v,
                     std::span<const int64_t> slot_mapping) {
  VARLANE_RETURN_IF_ERROR(Validate(kv, layer, k, v, slot_mapping));
  const KvLayout& layout = kv.layout;
  const KvKernels& kernels = table.For(layout.dtype);
  const auto num_tokens = static_cast<int64_t>(slot_mapping.size());

  const auto write = [&](int64_t token, int head) {
    const int64_t slot = slot_mapping[static_cast<size_t>(token)];
    WriteArgs args;
    args.k = RowOf(k, token, head, layout.num_kv_heads, layout.head_size);
    args.v = RowOf(v, token, head, layout.num_kv_heads, layout.v_head_size);
    args.k_dtype = k.dtype;
    args.v_dtype = v.dtype;
    args.head_size = layout.head_size;
    args.v_head_size = layout.v_head_size;
    args.k_block = kv.k(slot / layout.block_size, layer, head);
    args.v_block = kv.v(slot / layout.block_size, layer, head);
    args.block_size = layout.block_size;
    args.offset = static_cast<int>(slot % layout.block_size);
    kernels.write(args);
  };
  const auto body = [&](const Threadgroup& tg) {
    const int64_t begin = tg.index() * kTokensPerGroup;
    const int64_t end = std::min(num_tokens, begin + kTokensPerGroup);
    // Heads outside: a block's lines are revisited while they are in L1.
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      for (int64_t token = begin; token < end; ++token) {
        if (slot_mapping[static_cast<size_t>(token)] >= 0) write(token, head);
      }
    }
  };
  return runtime->Launch(Grid{DivCeil(num_tokens, kTokensPerGroup)}, body);
}

}  // namespace varlane
