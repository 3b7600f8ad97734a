// OutputDigests: 64 bits of every output row of a run, by request, position and
// layer, so that two runs can be compared bit for bit.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_OUTPUT_DIGESTS_H_
#define VARLANE_TOOLS_OUTPUT_DIGESTS_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "varlane/scheduler.h"

namespace varlane::tools {

struct DigestDifferences {
  int64_t wrong = 0;  // positions with other bits, or computed by one run only
  int64_t skipped = 0;  // prompt positions that the second run did not compute
  std::string first;    // the first wrong one: "request 7, position 1, layer 0"
};

// Not thread-safe.
class OutputDigests {
 public:
  explicit OutputDigests(int num_layers) : num_layers_(num_layers) {}

  // A layer of a step: out [total_q, row_floats], lse [total_q, lse_floats].
  void AddLayer(const Step& step, int layer, const float* out,
                int64_t row_floats, const float* lse, int64_t lse_floats);
  // Ends a step. A position that was computed before must have the same bits.
  void EndStep(const Step& step);

  int64_t rows() const { return rows_; }  // ended, repetitions included
  // Repetitions that differed from the first time.
  int64_t unstable() const { return unstable_; }

  // Whether `run` has the bits of `reference`. Where the run knew prefixes it
  // did not compute them: what samples no token may be missing then.
  static DigestDifferences Compare(const OutputDigests& reference,
                                   const OutputDigests& run,
                                   bool may_skip_prompts);

 private:
  // [positions, layers]; 0 = not computed.
  struct Rows {
    std::vector<uint64_t> digests;
    std::vector<bool> samples;  // [positions]
  };
  void EndRow(Rows* rows, int64_t position, const uint64_t* digests);

  int num_layers_;
  std::unordered_map<RequestId, Rows> requests_;
  std::vector<uint64_t> step_;  // [total_q, layers]
  int64_t rows_ = 0;
  int64_t unstable_ = 0;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_OUTPUT_DIGESTS_H_
