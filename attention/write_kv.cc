// SPDX-License-Identifier: Apache-2.0

#include "attention/write_kv.h"

#include <algorithm>

#include "attention/shards.h"
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
  VARLANE_RETURN_IF_ERROR(ValidateShards(kv));
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
    VARLANE_REQUIRE_ARG(slot_mapping[i] < 0 || kv.node_blocks == nullptr ||
                            kv.contains(slot_mapping[i] / kv.layout.block_size),
                        "slot_mapping[", i, "] = ", slot_mapping[i],
                        " is in block ", slot_mapping[i] / kv.layout.block_size,
                        ", but its node ends at ",
                        kv.node_end(slot_mapping[i] / kv.layout.block_size));
  }
  return {};
}

int64_t TokenBytes(const ConstTensor& tensor, int num_heads, int head_size) {
  const int64_t stride = tensor.token_stride != 0
                             ? tensor.token_stride
                             : int64_t{num_heads} * head_size;
  return stride * static_cast<int64_t>(SizeOf(tensor.dtype));
}

const void* RowOf(const ConstTensor& tensor, int64_t token, int head,
                  int num_heads, int head_size) {
  const int64_t head_stride =
      tensor.head_stride != 0 ? tensor.head_stride : head_size;
  return static_cast<const std::byte*>(tensor.data) +
         token * TokenBytes(tensor, num_heads, head_size) +
         head * head_stride * static_cast<int64_t>(SizeOf(tensor.dtype));
}

}  // namespace

Status KvWrite::Begin(const KernelTable& table, int num_nodes, const KvView& kv,
                      int layer, const ConstTensor& k, const ConstTensor& v,
                      std::span<const int64_t> slot_mapping) {
  VARLANE_RETURN_IF_ERROR(Validate(kv, layer, k, v, slot_mapping));
  kernels_ = &table.For(kv.layout.dtype);
  kv_ = kv;
  layer_ = layer;
  k_ = k;
  v_ = v;
  slot_mapping_ = slot_mapping;
  shard_size_ = DivCeil(std::ssize(slot_mapping), kTokensPerGroup);
  num_cuts_ = 0;
  if (kv.num_shards > 1 && kv.num_shards == num_nodes &&
      num_nodes <= kMostNodes) {
    for (int node = 0; node <= num_nodes; ++node) {
      node_begin_[static_cast<size_t>(num_cuts_++)] = node * shard_size_;
    }
  }
  return {};
}

Grid KvWrite::grid() const noexcept {
  return {shard_size_ * kv_.num_shards,
          std::span(node_begin_).first(static_cast<size_t>(num_cuts_))};
}

void KvWrite::operator()(const Threadgroup& group) const {
  const auto num_tokens = static_cast<int64_t>(slot_mapping_.size());
  int head_begin = 0;
  int head_end = kv_.layout.num_kv_heads;
  int64_t index = group.index();
  if (kv_.num_shards > 1) {
    head_begin = static_cast<int>(index / shard_size_) * kv_.shard_heads();
    head_end = head_begin + kv_.shard_heads();
    index %= shard_size_;
  }
  const int64_t begin = index * kTokensPerGroup;
  const int64_t end = std::min(num_tokens, begin + kTokensPerGroup);
  int count = 0;
  for (int64_t token = begin; token < end; token += count) {
    count = RunOf(token, end);
    if (slot_mapping_[static_cast<size_t>(token)] >= 0) {
      WriteRun(token, count, head_begin, head_end);
    }
  }
}

int KvWrite::RunOf(int64_t token, int64_t end) const {
  const int64_t* slots = slot_mapping_.data() + token;
  if (slots[0] < 0) return 1;
  const int block_size = kv_.layout.block_size;
  const int64_t most =
      std::min(end - token, block_size - slots[0] % block_size);
  int count = 1;
  while (count < most && slots[count] == slots[0] + count) ++count;
  return count;
}

void KvWrite::WriteRun(int64_t token, int count, int head_begin,
                       int head_end) const {
  const KvLayout& layout = kv_.layout;
  const int64_t slot = slot_mapping_[static_cast<size_t>(token)];
  const int64_t block = slot / layout.block_size;
  const auto k = [&](int head) {
    return RowOf(k_, token, head, layout.num_kv_heads, layout.head_size);
  };
  const auto v = [&](int head) {
    return RowOf(v_, token, head, layout.num_kv_heads, layout.v_head_size);
  };
  WriteArgs args;
  args.k_token_bytes = TokenBytes(k_, layout.num_kv_heads, layout.head_size);
  args.v_token_bytes = TokenBytes(v_, layout.num_kv_heads, layout.v_head_size);
  args.k_dtype = k_.dtype;
  args.v_dtype = v_.dtype;
  args.head_size = layout.head_size;
  args.v_head_size = layout.v_head_size;
  args.block_size = layout.block_size;
  args.offset = static_cast<int>(slot % layout.block_size);
  args.count = count;
  for (int head = head_begin; head < head_end; ++head) {
    const bool is_last = head + 1 == head_end;
    args.k = k(head);
    args.v = v(head);
    args.next_k = is_last ? nullptr : k(head + 1);
    args.next_v = is_last ? nullptr : v(head + 1);
    args.k_block = kv_.k(block, layer_, head);
    args.v_block = kv_.v(block, layer_, head);
    kernels_->write(args);
  }
}

Status WriteKvTokens(Runtime* runtime, const KernelTable& table,
                     const KvView& kv, int layer, const ConstTensor& k,
                     const ConstTensor& v,
                     std::span<const int64_t> slot_mapping) {
  KvWrite write;
  VARLANE_RETURN_IF_ERROR(
      write.Begin(table, runtime->num_nodes(), kv, layer, k, v, slot_mapping));
  LaunchOptions options;
  options.name = "write_kv";
  return runtime->Launch(write.grid(), write, options);
}

}  // namespace varlane
