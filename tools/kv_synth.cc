// Synthetic Q, K and V.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/kv_synth.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "tools/random.h"

namespace varlane::tools {
namespace {

constexpr size_t kChunk = 64;  // elements at a time: two small loops that
                               // compilers turn into vectors

uint64_t RowSeed(SynthToken token, int layer, SynthKind kind, int head) {
  const uint64_t place = static_cast<uint64_t>(layer) << 32 |
                         static_cast<uint64_t>(head) << 8 |
                         static_cast<uint64_t>(kind);
  const uint64_t where =
      Mix64(token.stream + kGolden * static_cast<uint64_t>(token.position));
  return Mix64(where + kGolden * (place + 1));
}

// Four 16-bit lanes, each the sum of three 5-bit fields: at most 93, no carry.
constexpr uint64_t SumOfThree(uint64_t z) {
  constexpr uint64_t kFive = 0x001f001f001f001fu;
  return (z & kFive) + ((z >> 5) & kFive) + ((z >> 10) & kFive);
}

float ToValue(uint16_t sum) {
  return static_cast<float>(2 * static_cast<int>(sum) - 93) * 0.03125f;
}

void Store(float value, float& to) { to = value; }
void Store(float value, double& to) { to = value; }
void Store(float value, BF16& to) {  // exact: the lower half is zero
  to.bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

template <typename T>
void Fill(uint64_t seed, std::span<T> row) {
  alignas(64) std::array<uint16_t, kChunk> sums;
  uint64_t counter = seed;
  for (size_t begin = 0; begin < row.size(); begin += kChunk) {
    const size_t count = std::min(kChunk, row.size() - begin);
    for (size_t i = 0; i < kChunk / 4; ++i) {
      const uint64_t four = SumOfThree(Mix64(counter + kGolden * (i + 1)));
      std::memcpy(&sums[4 * i], &four, sizeof(four));
    }
    counter += kGolden * (kChunk / 4);
    T* const to = row.data() + begin;
    for (size_t i = 0; i < count; ++i) Store(ToValue(sums[i]), to[i]);
  }
}

}  // namespace

uint64_t RequestStream(int64_t request) {
  return Mix64(2 * static_cast<uint64_t>(request) + 1);
}

uint64_t HashIdStream(int64_t hash_id) {
  return Mix64(2 * static_cast<uint64_t>(hash_id));
}

void FillSynthRow(SynthToken token, int layer, SynthKind kind, int head,
                  std::span<BF16> row) {
  Fill(RowSeed(token, layer, kind, head), row);
}

void FillSynthRow(SynthToken token, int layer, SynthKind kind, int head,
                  std::span<float> row) {
  Fill(RowSeed(token, layer, kind, head), row);
}

void FillSynthRow(SynthToken token, int layer, SynthKind kind, int head,
                  std::span<double> row) {
  Fill(RowSeed(token, layer, kind, head), row);
}

double SynthUniform(SynthToken token, int layer, int head) {
  constexpr auto kNoKind = static_cast<SynthKind>(0xff);
  const uint64_t bits = Mix64(RowSeed(token, layer, kNoKind, head) + kGolden);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace varlane::tools
