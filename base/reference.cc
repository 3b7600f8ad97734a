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
  if (row.num_keys == 0) return kMinusInfinity;

  std::vector<double> weight(static_cast<size_t>(row.num_keys));
  double max = kMinusInfinity;
  for (int64_t t = 0; t < row.num_keys; ++t) {
    double dot = 0;
    for (size_t d = 0; d < row.q.size(); ++d) {
      dot += row.q[d] * row.k[static_cast<size_t>(t) * row.q.size() + d];
    }
    weight[static_cast<size_t>(t)] = dot * row.scale;
    max = std::max(max, dot * row.scale);
  }
  if (max == kMinusInfinity) return kMinusInfinity;
  double sum = 0;
  for (double& w : weight) {
    w = std::exp(w - max);
    sum += w;
  }
  for (int64_t t = 0; t < row.num_keys; ++t) {
    const double p = weight[static_cast<size_t>(t)] / sum;
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
