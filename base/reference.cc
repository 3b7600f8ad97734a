// SPDX-License-Identifier: Apache-2.0

#include "varlane/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace varlane {

double ReferenceAttention(const ReferenceRow& row, std::span<double> out,
                          std::span<double> bound) {
  std::fill(out.begin(), out.end(), 0.0);
  std::fill(bound.begin(), bound.end(), 0.0);
  const double kMinusInfinity = -std::numeric_limits<double>::infinity();

  std::vector<double> weight;
  double max = row.sink != nullptr ? *row.sink : kMinusInfinity;
  for (int64_t t = row.first_key; t < row.num_keys; ++t) {
    double score = 0;
    for (size_t d = 0; d < row.q.size(); ++d) {
      score += row.q[d] * row.k[static_cast<size_t>(t) * row.q.size() + d];
    }
    score *= row.scale;
    if (row.softcap != 0) {
      score = row.softcap * std::tanh(score / row.softcap);
    }
    if (row.alibi_slope != 0) {
      score += row.alibi_slope * static_cast<double>(t - row.position);
    }
    weight.push_back(score);
    max = std::max(max, score);
  }
  if (max == kMinusInfinity) return kMinusInfinity;
  double sum = row.sink != nullptr ? std::exp(*row.sink - max) : 0.0;
  for (double& w : weight) {
    w = std::exp(w - max);
    sum += w;
  }
  for (int64_t t = row.first_key; t < row.num_keys; ++t) {
    const double p = weight[static_cast<size_t>(t - row.first_key)] / sum;
    if (p == 0) continue;
    for (size_t d = 0; d < out.size(); ++d) {
      const double term =
          p * row.v[t * row.v_head_size + static_cast<int64_t>(d)];
      out[d] += term;
      if (!bound.empty()) bound[d] += std::abs(term);
    }
  }
  return max + std::log(sum);
}

}  // namespace varlane
