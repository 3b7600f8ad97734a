// SPDX-License-Identifier: Apache-2.0

#include "base/xxhash64.h"

#include <array>
#include <bit>

#include "base/bytes.h"

namespace varlane {
namespace {

// The specification's primes.
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

constexpr size_t kStripeBytes = 32;  // four lanes of 8

uint64_t Round(uint64_t accumulator, uint64_t lane) {
  return std::rotl(accumulator + lane * kPrime2, 31) * kPrime1;
}

uint64_t MergeRound(uint64_t hash, uint64_t accumulator) {
  return (hash ^ Round(0, accumulator)) * kPrime1 + kPrime4;
}

// Eats whole stripes from the front of `data`.
uint64_t EatStripes(std::span<const std::byte>* data, uint64_t seed) {
  std::array<uint64_t, 4> lanes = {seed + kPrime1 + kPrime2, seed + kPrime2,
                                   seed, seed - kPrime1};
  const std::byte* p = data->data();
  const size_t stripes = data->size() / kStripeBytes;
  for (size_t i = 0; i < stripes; ++i) {
    for (uint64_t& lane : lanes) {
      lane = Round(lane, LoadU64(p));
      p += sizeof(uint64_t);
    }
  }
  *data = data->subspan(stripes * kStripeBytes);
  uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) +
                  std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (const uint64_t lane : lanes) hash = MergeRound(hash, lane);
  return hash;
}

}  // namespace

uint64_t XxHash64(std::span<const std::byte> data, uint64_t seed) noexcept {
  const uint64_t length = data.size();
  uint64_t hash =
      length >= kStripeBytes ? EatStripes(&data, seed) : seed + kPrime5;
  hash += length;
  for (; data.size() >= 8; data = data.subspan(8)) {
    hash ^= Round(0, LoadU64(data.data()));
    hash = std::rotl(hash, 27) * kPrime1 + kPrime4;
  }
  if (data.size() >= 4) {
    hash ^= LoadU32(data.data()) * kPrime1;
    hash = std::rotl(hash, 23) * kPrime2 + kPrime3;
    data = data.subspan(4);
  }
  for (const std::byte byte : data) {
    hash ^= std::to_integer<uint64_t>(byte) * kPrime5;
    hash = std::rotl(hash, 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace varlane
