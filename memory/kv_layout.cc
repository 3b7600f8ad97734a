// SPDX-License-Identifier: Apache-2.0

#include "varlane/kv_layout.h"

#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

constexpr int kMaxLayers = 4096;
constexpr int kMaxKvHeads = 65536;
// A block is what is copied and moved as one; real ones are below 100 MiB.
constexpr int64_t kMaxBlockBytes = int64_t{1} << 40;

Status CheckHeadSize(const char* field, int value) {
  VARLANE_REQUIRE_ARG(
      value >= kMinHeadSize && value <= kMaxHeadSize && value % 8 == 0, field,
      " = ", value, ", must be a multiple of 8 in [", kMinHeadSize, ", ",
      kMaxHeadSize, "]");
  return {};
}

}  // namespace

Status KvLayout::Validate() const {
  VARLANE_REQUIRE_ARG(
      dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16,
      "dtype = ", static_cast<int>(dtype), ", must be f32, bf16 or f16");
  VARLANE_REQUIRE_ARG(num_layers >= 1 && num_layers <= kMaxLayers,
                      "num_layers = ", num_layers, ", must be in [1, ",
                      kMaxLayers, "]");
  VARLANE_REQUIRE_ARG(num_kv_heads >= 1 && num_kv_heads <= kMaxKvHeads,
                      "num_kv_heads = ", num_kv_heads, ", must be in [1, ",
                      kMaxKvHeads, "]");
  VARLANE_RETURN_IF_ERROR(CheckHeadSize("head_size", head_size));
  VARLANE_RETURN_IF_ERROR(CheckHeadSize("v_head_size", v_head_size));
  VARLANE_REQUIRE_ARG(
      block_size >= kMinBlockSize && block_size <= kMaxBlockSize &&
          IsPowerOfTwo(block_size),
      "block_size = ", block_size, ", must be a power of two in [",
      kMinBlockSize, ", ", kMaxBlockSize, "]");
  // The fields above bound it by 2^48 (4096 layers x 65536 heads x 2 x 576 x
  // 256 x 4 bytes), so computing it cannot overflow.
  VARLANE_REQUIRE_ARG(
      block_bytes() < kMaxBlockBytes, "block_bytes = ", block_bytes(),
      " (num_layers = ", num_layers, ", num_kv_heads = ", num_kv_heads,
      ", block_size = ", block_size, "), must be below ", kMaxBlockBytes);
  return {};
}

}  // namespace varlane
