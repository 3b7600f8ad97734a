// XxHash64 against values of the reference implementation.
//
// SPDX-License-Identifier: Apache-2.0

#include "base/xxhash64.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace varlane {
namespace {

// Byte i is 7 i + 3 (mod 256).
std::vector<std::byte> Bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = std::byte((7 * i + 3) & 0xff);
  return bytes;
}

// Computed by libxxhash 0.8.1 (XXH64): every length class of the algorithm -
// nothing, bytes, a word of 4, of 8, whole stripes of 32, and their sums.
TEST(XxHash64Test, MatchesTheReferenceImplementation) {
  struct Vector {
    size_t length;
    uint64_t plain;
    uint64_t seeded;  // with 0x9E3779B1
  };
  const Vector vectors[] = {
      {0, 0xef46db3751d8e999, 0xac75fda2929b17ef},
      {1, 0x1f25c8d0bc1f4bb6, 0x79cf94f5ace37fe1},
      {3, 0x31d2363f52e564c9, 0x96d2a5e583ddd738},
      {4, 0x9bb64b7d66ee9fda, 0x4a862fbb4b73776e},
      {7, 0x9a7b149959ce60d8, 0xddc5cf71d37a6368},
      {8, 0xdab99d95c6f90092, 0xc6e75e2cbd8e07ee},
      {14, 0xc7f1d4d0acfa5a14, 0x51341a138b098941},
      {31, 0xa2aa5f33cc4a6119, 0x381822f33376d6b6},
      {32, 0x23c3c17ef790fd97, 0x9abd315470ac276a},
      {33, 0x50a7cfc7ba588784, 0x72cdd3262f467933},
      {63, 0x5e3e54b431c7493c, 0x634da7d265979e61},
      {100, 0xa61f8d4c170fe531, 0x86f549ede5ac87e2},
      {222, 0x8488aa61fc67f7eb, 0xa0e106fbd1fdfc38},
  };
  for (const Vector& v : vectors) {
    EXPECT_EQ(XxHash64(Bytes(v.length)), v.plain) << v.length;
    EXPECT_EQ(XxHash64(Bytes(v.length), 0x9E3779B1), v.seeded) << v.length;
  }
}

TEST(XxHash64Test, AddressesNeedNoAlignment) {
  const std::vector<std::byte> bytes = Bytes(200);
  const std::span<const std::byte> all(bytes);
  for (size_t shift = 1; shift < 8; ++shift) {
    const auto part = all.subspan(shift, 100);
    EXPECT_EQ(XxHash64(part),
              XxHash64(std::vector<std::byte>(part.begin(), part.end())));
  }
}

}  // namespace
}  // namespace varlane
