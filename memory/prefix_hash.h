// PrefixHasher: the keyed hash that chains a sequence's blocks.
//
//   start of a tenant    H(key, kTenantDomain, tenant)
//   block i              H(key, kBlockDomain, hash of block i - 1, tokens of i)
//
// A hash therefore stands for a tenant and everything from its first token on.
// The two domains are never the same input, so that no choice of tokens leads
// into another tenant's chain. The key is secret and the process's own: who
// sends prompts cannot find two that collide, nor learn from one process where
// another keeps what. It is an index only: a hit is decided by the tokens
// (prefix_cache.h). Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_PREFIX_HASH_H_
#define VARLANE_MEMORY_PREFIX_HASH_H_

#include <cstdint>
#include <span>

#include "varlane/status.h"

namespace varlane {

struct PrefixHashKey {
  uint64_t k0 = 0;
  uint64_t k1 = 0;

  // 128 bits from the kernel's generator. Errors: kInternal where there is
  // none.
  static Result<PrefixHashKey> Random();
};

// SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF",
// INDOCRYPT 2012) of 64-bit words; equal to that of their little-endian bytes.
class SipHash {
 public:
  explicit SipHash(const PrefixHashKey& key) noexcept
      : v0_(key.k0 ^ 0x736f6d6570736575u),
        v1_(key.k1 ^ 0x646f72616e646f6du),
        v2_(key.k0 ^ 0x6c7967656e657261u),
        v3_(key.k1 ^ 0x7465646279746573u) {}

  void Add(uint64_t word) noexcept;
  // The hash of the words added and, behind them, the `num_bytes` low bytes of
  // `rest`. Requires: 0 <= num_bytes < 8, and the other bytes are 0.
  uint64_t Finish(uint64_t rest = 0, int num_bytes = 0) noexcept;

 private:
  void Round() noexcept;

  uint64_t v0_;
  uint64_t v1_;
  uint64_t v2_;
  uint64_t v3_;
  uint64_t num_words_ = 0;
};

// Threads: immutable; any.
class PrefixHasher {
 public:
  // `mask` is for tests: a hash keeps those bits only, so that 0 makes all
  // collide.
  explicit PrefixHasher(const PrefixHashKey& key,
                        uint64_t mask = ~uint64_t{0}) noexcept
      : key_(key), mask_(mask) {}

  uint64_t Tenant(uint64_t tenant) const noexcept;
  uint64_t Block(uint64_t parent,
                 std::span<const int32_t> tokens) const noexcept;

 private:
  PrefixHashKey key_;
  uint64_t mask_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_PREFIX_HASH_H_
