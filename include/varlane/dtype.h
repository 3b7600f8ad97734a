// Element types: names, sizes, and the scalar conversions that define them.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_DTYPE_H_
#define VARLANE_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "varlane/export.h"

namespace varlane {

enum class DType : uint8_t {
  kF32 = 0,   // IEEE binary32
  kBF16 = 1,  // the upper 16 bits of binary32
  kF16 = 2,   // IEEE binary16
};

// Bytes of an element. Inlined into code for any CPU.
[[gnu::always_inline]] constexpr size_t SizeOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

// "f32", "bf16", "f16".
VARLANE_EXPORT const char* DTypeName(DType dtype);
// Inverse of DTypeName, any case; also "float32", "bfloat16", "float16".
VARLANE_EXPORT std::optional<DType> ParseDType(std::string_view name);

// Storage types: bits only, no arithmetic.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

constexpr float ToFloat(float x) { return x; }
constexpr float ToFloat(BF16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
VARLANE_EXPORT float ToFloat(F16 x);

// Round to nearest even; NaN stays a (quiet) NaN, overflow becomes infinity.
constexpr BF16 ToBF16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
VARLANE_EXPORT F16 ToF16(float x);

}  // namespace varlane

#endif  // VARLANE_DTYPE_H_
