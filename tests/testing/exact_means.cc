// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/exact_means.h"

#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "tests/testing/random_values.h"

namespace varlane::testing {

int SmallInteger(int seq, int pos, int head, int dim) {
  uint64_t place = 0;
  for (const int i : {seq, head, dim, pos}) place = place << 16 | uint64_t(i);
  return static_cast<int>(RandomBits(place) >> 61);
}

AttentionCase MeansCase(const CaseSpec& spec, Poison poison) {
  const Fill zero = [](int, int, int, int) { return 0.0; };
  return AttentionCase(spec, {}, zero, SmallInteger, poison);
}

namespace {

// One dim of a sequence's rows of one head.
struct Column {
  int seq;
  int head;
  int dim;
  std::span<const int> sums;  // of the values before each position
};

void ExpectExactMeansOf(const Column& column, const AttentionCase& c,
                        const Output& output) {
  const CaseSpec& spec = c.spec();
  const auto [seq, head, dim, sums] = column;
  for (int i = 0; i < spec.seqs[size_t(seq)].q_len; ++i) {
    const int64_t low = c.Begin(seq, i);
    const int64_t high = c.Limit(seq, i);
    const auto sum = static_cast<float>(sums[size_t(high)] - sums[size_t(low)]);
    const auto n =
        static_cast<float>(high - low + (spec.sinks.empty() ? 0 : 1));
    const float want = n == 0 ? 0.0f : sum / n;
    const auto row =
        static_cast<size_t>((c.FirstToken(seq) + i) * spec.q_heads + head);
    ASSERT_EQ(std::bit_cast<uint32_t>(
                  output.out[row * size_t(spec.v_size()) + size_t(dim)]),
              std::bit_cast<uint32_t>(want))
        << "seq " << seq << " token " << i << " head " << head << " dim " << dim
        << " keys [" << low << ", " << high << ")";
    if (dim > 0) continue;
    if (n > 0) {
      ASSERT_NEAR(output.lse[row], std::log(double(n)), 1e-6 * 12);
    } else {
      ASSERT_EQ(output.lse[row], -std::numeric_limits<float>::infinity());
    }
  }
}

}  // namespace

void ExpectExactMeans(const AttentionCase& c, const Output& output) {
  const CaseSpec& spec = c.spec();
  for (int s = 0; s < int(spec.seqs.size()); ++s) {
    for (int kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
      for (int d = 0; d < spec.v_size(); ++d) {
        std::vector<int> sums = {0};
        for (int pos = 0; pos < spec.seqs[size_t(s)].kv_len; ++pos) {
          sums.push_back(sums.back() + SmallInteger(s, pos, kv_head, d));
        }
        for (int i = 0; i < spec.group(); ++i) {
          const int head = kv_head * spec.group() + i;
          ASSERT_NO_FATAL_FAILURE(
              ExpectExactMeansOf({s, head, d, sums}, c, output));
        }
      }
    }
  }
}

}  // namespace varlane::testing
