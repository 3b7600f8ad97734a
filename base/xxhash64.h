// XXH64: a fast 64-bit checksum, for finding damaged data.
//
// Not keyed and not for hash tables that strangers fill: anybody can make
// collisions. Source: Yann Collet, xxHash specification 0.1.1, "XXH64
// Algorithm" (doc/xxhash_spec.md of Cyan4973/xxHash); tested with its vectors.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_XXHASH64_H_
#define VARLANE_BASE_XXHASH64_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace varlane {

// The same on every machine, whatever its byte order.
uint64_t XxHash64(std::span<const std::byte> data, uint64_t seed = 0) noexcept;

}  // namespace varlane

#endif  // VARLANE_BASE_XXHASH64_H_
