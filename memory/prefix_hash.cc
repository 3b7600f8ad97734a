// SPDX-License-Identifier: Apache-2.0

#include "memory/prefix_hash.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstddef>

#include "base/check.h"
#include "base/strings.h"

namespace varlane {
namespace {

// First words of the two kinds of input.
constexpr uint64_t kTenantDomain = 0x746e616e6574;  // "tenant"
constexpr uint64_t kBlockDomain = 0x6b636f6c62;     // "block"

}  // namespace

Result<PrefixHashKey> PrefixHashKey::Random() {
  PrefixHashKey key;
  ssize_t got = 0;
  do {
    // 16 bytes come whole or not at all (getrandom(2): up to 256).
    got = getrandom(&key, sizeof(key), 0);
  } while (got < 0 && errno == EINTR);
  VARLANE_REQUIRE(got == static_cast<ssize_t>(sizeof(key)),
                  StatusCode::kInternal, "getrandom gave ", got, " of ",
                  sizeof(key), " bytes: ", ErrnoText(errno));
  return key;
}

void SipHash::Round() noexcept {
  v0_ += v1_;
  v1_ = std::rotl(v1_, 13);
  v1_ ^= v0_;
  v0_ = std::rotl(v0_, 32);
  v2_ += v3_;
  v3_ = std::rotl(v3_, 16);
  v3_ ^= v2_;
  v0_ += v3_;
  v3_ = std::rotl(v3_, 21);
  v3_ ^= v0_;
  v2_ += v1_;
  v1_ = std::rotl(v1_, 17);
  v1_ ^= v2_;
  v2_ = std::rotl(v2_, 32);
}

void SipHash::Add(uint64_t word) noexcept {
  v3_ ^= word;
  Round();
  Round();
  v0_ ^= word;
  ++num_words_;
}

uint64_t SipHash::Finish(uint64_t rest, int num_bytes) noexcept {
  VARLANE_DCHECK(num_bytes >= 0 && num_bytes < 8);
  const uint64_t length = num_words_ * 8 + static_cast<uint64_t>(num_bytes);
  Add(length << 56 | rest);
  v2_ ^= 0xff;
  Round();
  Round();
  Round();
  Round();
  return v0_ ^ v1_ ^ v2_ ^ v3_;
}

uint64_t PrefixHasher::Tenant(uint64_t tenant) const noexcept {
  SipHash hash(key_);
  hash.Add(kTenantDomain);
  hash.Add(tenant);
  return hash.Finish() & mask_;
}

uint64_t PrefixHasher::Block(uint64_t parent,
                             std::span<const int32_t> tokens) const noexcept {
  SipHash hash(key_);
  hash.Add(kBlockDomain);
  hash.Add(parent);
  size_t i = 0;
  for (; i + 2 <= tokens.size(); i += 2) {
    hash.Add(uint64_t{static_cast<uint32_t>(tokens[i])} |
             uint64_t{static_cast<uint32_t>(tokens[i + 1])} << 32);
  }
  if (i == tokens.size()) return hash.Finish() & mask_;
  return hash.Finish(static_cast<uint32_t>(tokens[i]), 4) & mask_;
}

}  // namespace varlane
