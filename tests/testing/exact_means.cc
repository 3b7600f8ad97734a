// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/exact_means.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace varlane::testing {

int SmallInteger(int seq, int pos, int head, int dim) {
  return int(RandomValue(5, uint64_t(seq), uint64_t(pos), uint64_t(head),
                         uint64_t(dim)) *
             1000) &
         7;
}

AttentionCase MeansCase(const CaseSpec& spec, Poison poison) {
  const Fill zero = [](int, int, int, int) { return 0.0; };
  return AttentionCase(spec, {}, zero, SmallInteger, poison);
}

void ExpectExactMeans(const AttentionCase& c, const Output& output) {
  const CaseSpec& spec = c.spec();
  const int sink = spec.sinks.empty() ? 0 : 1;
  for (int s = 0; s < int(spec.seqs.size()); ++s) {
    const SeqSpec& seq = spec.seqs[size_t(s)];
    for (int h = 0; h < spec.q_heads; ++h) {
      for (int d = 0; d < spec.v_size(); ++d) {
        std::vector<int> sums = {0};  // of the values before each position
        for (int pos = 0; pos < seq.kv_len; ++pos) {
          sums.push_back(sums.back() +
                         SmallInteger(s, pos, h / spec.group(), d));
        }
        for (int i = 0; i < seq.q_len; ++i) {
          const int64_t low = c.Begin(s, i);
          const int64_t high = c.Limit(s, i);
          const auto sum =
              static_cast<float>(sums[size_t(high)] - sums[size_t(low)]);
          const auto n = static_cast<float>(high - low + sink);
          const float want = n == 0 ? 0.0f : sum / n;
          const auto row =
              static_cast<size_t>((c.FirstToken(s) + i) * spec.q_heads + h);
          ASSERT_EQ(std::bit_cast<uint32_t>(
                        output.out[row * size_t(spec.v_size()) + size_t(d)]),
                    std::bit_cast<uint32_t>(want))
              << "seq " << s << " token " << i << " head " << h << " dim " << d
              << " keys [" << low << ", " << high << ")";
          if (d > 0) continue;
          if (n > 0) {
            ASSERT_NEAR(output.lse[row], std::log(double(n)), 1e-6 * 12);
          } else {
            ASSERT_EQ(output.lse[row], -std::numeric_limits<float>::infinity());
          }
        }
      }
    }
  }
}

}  // namespace varlane::testing
