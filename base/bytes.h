// Integers in little-endian bytes, as files hold them, at any address.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_BYTES_H_
#define VARLANE_BASE_BYTES_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace varlane {

// The same value on a little-endian machine, its bytes reversed on others.
inline uint64_t LittleEndian(uint64_t value) noexcept {
  return std::endian::native == std::endian::little ? value
                                                    : __builtin_bswap64(value);
}
inline uint32_t LittleEndian(uint32_t value) noexcept {
  return std::endian::native == std::endian::little ? value
                                                    : __builtin_bswap32(value);
}

inline uint64_t LoadU64(const std::byte* from) noexcept {
  uint64_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return LittleEndian(value);
}
inline uint32_t LoadU32(const std::byte* from) noexcept {
  uint32_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return LittleEndian(value);
}
inline void StoreU64(uint64_t value, std::byte* to) noexcept {
  value = LittleEndian(value);
  std::memcpy(to, &value, sizeof(value));
}
inline void StoreU32(uint32_t value, std::byte* to) noexcept {
  value = LittleEndian(value);
  std::memcpy(to, &value, sizeof(value));
}

}  // namespace varlane

#endif  // VARLANE_BASE_BYTES_H_
