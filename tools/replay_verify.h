// StepVerifier: recomputes a share of a step's output rows from scratch.
//
// Rows are chosen by a hash of (token, layer, query head), so the choice does
// not depend on batches. K/V of the whole context are made again from the
// tokens' identity and not read from the pool: a wrong slot, block table or
// copy shows as much as a wrong kernel. Rows of a group share that work.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_REPLAY_VERIFY_H_
#define VARLANE_TOOLS_REPLAY_VERIFY_H_

#include <cstdint>
#include <vector>

#include "tools/model_presets.h"
#include "tools/replay_inputs.h"
#include "tools/verify.h"
#include "varlane/dtype.h"
#include "varlane/runtime.h"
#include "varlane/scheduler.h"
#include "varlane/status.h"

namespace varlane::tools {

class StepVerifier {
 public:
  // Lifetime: `workload` and `runtime` outlive it.
  StepVerifier(const ModelShape& model, DType kv_dtype, double share,
               const Workload* workload, Runtime* runtime);

  // Bytes that each worker may need for contexts of `max_context` tokens.
  static int64_t ScratchBytes(const ModelShape& model, int64_t max_context);

  // Checks the sampled rows of one layer. Errors: those of Runtime::Launch.
  Status CheckLayer(const Step& step, int layer, StepBuffers* buffers);

  VerifyResult result() const;

 private:
  struct Row {
    int64_t token = 0;     // of the step
    int64_t position = 0;  // of the sequence
    int head = 0;          // query head
  };
  // One worker's.
  struct alignas(64) Scratch {
    std::vector<Row> rows;
    std::vector<double> q;
    std::vector<double> k;
    std::vector<double> v;
    RowVerifier verifier;
  };

  void Sample(const StepEntry& entry, int64_t first_token, int layer,
              int kv_head, const StepBuffers& buffers,
              std::vector<Row>* rows) const;
  // Makes K and V of positions [0, num_keys); returns the largest |k|.
  double MakeKeys(int64_t request, int64_t num_keys, int layer, int kv_head,
                  Scratch* scratch) const;
  void CheckRows(const StepEntry& entry, int layer, int kv_head,
                 StepBuffers* buffers, Scratch* scratch) const;

  ModelShape model_;
  DType kv_dtype_;
  double share_;
  const Workload* workload_;
  Runtime* runtime_;
  std::vector<Scratch> scratch_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_REPLAY_VERIFY_H_
