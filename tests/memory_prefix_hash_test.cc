// SPDX-License-Identifier: Apache-2.0

#include "memory/prefix_hash.h"

#include <cstring>
#include <set>
#include <vector>

#include "tests/testing/testing.h"

namespace varlane {
namespace {

// Key 00 01 .. 0f, as in the paper's appendix.
constexpr PrefixHashKey kPaperKey = {.k0 = 0x0706050403020100u,
                                     .k1 = 0x0f0e0d0c0b0a0908u};

uint64_t HashBytes(int num_bytes) {  // 00 01 02 ..
  SipHash hash(kPaperKey);
  uint64_t word = 0;
  for (int i = 0; i < num_bytes; ++i) {
    word |= static_cast<uint64_t>(i) << 8 * (i % 8);
    if (i % 8 == 7) {
      hash.Add(word);
      word = 0;
    }
  }
  return hash.Finish(word, num_bytes % 8);
}

TEST(SipHashTest, GivesTheVectorsOfItsAuthors) {
  EXPECT_EQ(HashBytes(0), 0x726fdb47dd0e0e31u);
  EXPECT_EQ(HashBytes(4), 0xcf2794e0277187b7u);
  EXPECT_EQ(HashBytes(8), 0x93f5f5799a932462u);
  EXPECT_EQ(HashBytes(15), 0xa129ca6149be45e5u);  // the paper's example
  EXPECT_EQ(HashBytes(16), 0x3f2acc7f57c29bdbu);
}

TEST(PrefixHasherTest, EveryInputCounts) {
  const PrefixHasher hasher(kPaperKey);
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5};
  std::set<uint64_t> hashes;
  const auto is_new = [&](uint64_t hash) { return hashes.insert(hash).second; };
  EXPECT_TRUE(is_new(hasher.Block(7, tokens)));
  EXPECT_TRUE(is_new(hasher.Block(8, tokens)));
  EXPECT_TRUE(is_new(PrefixHasher({kPaperKey.k0, 1}).Block(7, tokens)));
  EXPECT_TRUE(is_new(PrefixHasher({1, kPaperKey.k1}).Block(7, tokens)));
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<int32_t> changed = tokens;
    changed[i] = -changed[i];
    EXPECT_TRUE(is_new(hasher.Block(7, changed))) << i;
    EXPECT_TRUE(is_new(hasher.Block(7, std::span(tokens).first(i)))) << i;
  }
  EXPECT_TRUE(is_new(hasher.Tenant(0)));
  EXPECT_TRUE(is_new(hasher.Tenant(1)));
  EXPECT_FALSE(is_new(hasher.Tenant(1)));
}

// A block behind parent p whose tokens spell t is not the tenant's start, for
// any p and t that could be tried to make it so.
TEST(PrefixHasherTest, TenantsAndBlocksAreDomainsOfTheirOwn) {
  const PrefixHasher hasher(kPaperKey);
  for (const uint64_t tenant : {uint64_t{0}, uint64_t{5}, ~uint64_t{0}}) {
    EXPECT_NE(hasher.Tenant(tenant), hasher.Block(tenant, {}));
    const std::vector<int32_t> words = {static_cast<int32_t>(tenant),
                                        static_cast<int32_t>(tenant >> 32)};
    EXPECT_NE(hasher.Tenant(tenant), hasher.Block(0, words));
    EXPECT_NE(hasher.Tenant(tenant), hasher.Block(tenant, words));
  }
}

TEST(PrefixHasherTest, AMaskMakesHashesCollide) {
  const PrefixHasher hasher(kPaperKey, 0);
  EXPECT_EQ(hasher.Tenant(1), 0u);
  EXPECT_EQ(hasher.Block(1, std::vector<int32_t>{1}), 0u);
}

TEST(PrefixHashKeyTest, TwoRandomKeysDiffer) {
  const Result<PrefixHashKey> a = PrefixHashKey::Random();
  const Result<PrefixHashKey> b = PrefixHashKey::Random();
  VARLANE_ASSERT_OK(a);
  VARLANE_ASSERT_OK(b);
  EXPECT_NE(a->k0, b->k0);
  EXPECT_NE(a->k1, b->k1);
}

}  // namespace
}  // namespace varlane
