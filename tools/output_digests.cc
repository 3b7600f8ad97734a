// SPDX-License-Identifier: Apache-2.0

#include "tools/output_digests.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

namespace varlane::tools {
namespace {

// One multiplication a float: any changed bit changes the digest, but for a
// chance of 2^-64 or so.
uint64_t Digest(const float* values, int64_t count, uint64_t hash) {
  for (int64_t i = 0; i < count; ++i) {
    hash = (hash ^ std::bit_cast<uint32_t>(values[i])) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

void OutputDigests::AddLayer(const Step& step, int layer, const float* out,
                             int64_t row_floats, const float* lse,
                             int64_t lse_floats) {
  const int64_t total = step.total_q();
  step_.resize(static_cast<size_t>(total * num_layers_));
  for (int64_t row = 0; row < total; ++row) {
    uint64_t digest = Digest(out + row * row_floats, row_floats, 1);
    digest = Digest(lse + row * lse_floats, lse_floats, digest);
    // 0 stands for "not computed".
    step_[static_cast<size_t>(row * num_layers_ + layer)] =
        std::max<uint64_t>(digest, 1);
  }
}

void OutputDigests::EndRow(Rows* rows, int64_t position,
                           const uint64_t* digests) {
  const auto begin = static_cast<size_t>(position * num_layers_);
  const auto end = begin + static_cast<size_t>(num_layers_);
  ++rows_;
  if (end > rows->digests.size()) {
    rows->digests.resize(end);
    rows->samples.resize(static_cast<size_t>(position) + 1);
  }
  bool differs = false;
  for (size_t i = begin; i < end; ++i) {
    uint64_t& known = rows->digests[i];
    if (known == 0) known = digests[i - begin];
    differs = differs || known != digests[i - begin];
  }
  if (differs) ++unstable_;
}

void OutputDigests::EndStep(const Step& step) {
  for (size_t i = 0; i < step.entries.size(); ++i) {
    const StepEntry& entry = step.entries[i];
    Rows& rows = requests_[entry.request];
    for (int64_t j = 0; j < entry.count; ++j) {
      const int64_t row = step.cu_seqlens_q[i] + j;
      EndRow(&rows, entry.begin + j,
             step_.data() + static_cast<size_t>(row * num_layers_));
    }
    if (!entry.samples) continue;
    rows.samples[static_cast<size_t>(entry.begin + entry.count - 1)] = true;
  }
}

DigestDifferences OutputDigests::Compare(const OutputDigests& reference,
                                         const OutputDigests& run,
                                         bool may_skip_prompts) {
  DigestDifferences result;
  const auto layers = static_cast<size_t>(reference.num_layers_);
  // `b` is null or shorter where that run did not get so far.
  const auto compare = [&](RequestId id, const Rows& a, const Rows* b) {
    for (size_t position = 0; position < a.samples.size(); ++position) {
      for (size_t layer = 0; layer < layers; ++layer) {
        const size_t i = position * layers + layer;
        const uint64_t other =
            b != nullptr && i < b->digests.size() ? b->digests[i] : 0;
        if (a.digests[i] == other) continue;
        if (other == 0 && may_skip_prompts && !a.samples[position]) {
          ++result.skipped;
        } else if (result.wrong++ == 0) {
          result.first = fmt::format("request {}, position {}, layer {}", id,
                                     position, layer);
        }
        break;
      }
    }
  };
  for (const auto& [id, rows] : reference.requests_) {
    const auto other = run.requests_.find(id);
    compare(id, rows, other == run.requests_.end() ? nullptr : &other->second);
  }
  // What only the run has.
  for (const auto& [id, rows] : run.requests_) {
    const auto known = reference.requests_.find(id);
    const size_t positions =
        known == reference.requests_.end() ? 0 : known->second.samples.size();
    if (rows.samples.size() <= positions) continue;
    if (result.wrong == 0) {
      result.first =
          fmt::format("request {}, position {} is new", id, positions);
    }
    result.wrong += static_cast<int64_t>(rows.samples.size() - positions);
  }
  return result;
}

}  // namespace varlane::tools
