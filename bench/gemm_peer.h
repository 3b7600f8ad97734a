// GemmPeer: causal attention as a good engineer composes it from a GEMM
// library, to be compared with.
//
// Contiguous K/V, chunks of 128 query tokens, keys cut at the causal diagonal,
// scores in memory, a softmax in vectors between two oneDNN matmuls, tasks
// shared out over the same workers. Optional: there only where libdnnl-dev is.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BENCH_GEMM_PEER_H_
#define VARLANE_BENCH_GEMM_PEER_H_

#include <memory>
#include <span>
#include <string>

#include "bench/workload.h"
#include "varlane/dtype.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::bench {

class GemmPeer {
 public:
  // Takes Q and K/V from `work`, in the cache's dtype (f32 or bf16). Tasks hold
  // one query head each, or all of a KV head's.
  // Errors: kUnimplemented when built without oneDNN or the CPU lacks what the
  //         softmax needs; kInternal with what oneDNN says.
  static Result<std::unique_ptr<GemmPeer>> Create(Runtime* runtime,
                                                  const Workload& work,
                                                  bool whole_groups);
  ~GemmPeer();

  // Whether it multiplies `dtype` in AMX tiles, whose sums of pairs no chain of
  // multiply-adds gives: they are not for kernels whose bits all CPUs share.
  static bool UsesAmx(DType dtype);

  Result<double> Run();                // wall seconds
  std::span<const float> out() const;  // [total_q, Hq, D], of the last Run

  class Impl;

 private:
  explicit GemmPeer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane::bench

#endif  // VARLANE_BENCH_GEMM_PEER_H_
