// Limits: what this machine can do at most, to hold a launch against.
//
// Attention must read its K/V once and multiply once: no launch is faster than
// the slower of a plain read of the same pages and the same multiplies in
// registers. Both are measured with a runtime's own workers and kernel table,
// beside the launch in question: a limit taken elsewhere or at another time is
// another machine's. Layer 3.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_LIMITS_H_
#define VARLANE_LIMITS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "varlane/attention.h"
#include "varlane/dtype.h"
#include "varlane/export.h"
#include "varlane/kv_layout.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// Plain reads of all K/V of a batch, in the order attention visits them.
//
// There are several loops - 1 to 8 chunks side by side, without software
// prefetch or with one into L1 or L2, an equal share a worker or threadgroups
// as they come, head by head or whole blocks - since no single one is best
// everywhere. Run each, keep the best.
//
// Threads: one probe serves one Run at a time.
class VARLANE_EXPORT ReadProbe {
 public:
  // Every key of every sequence is read, whatever the batch's masks say; only
  // seq_lens and block_tables are looked at.
  // Errors:   kInvalidArgument naming place, value and limit; kNotFound for an
  //           unknown RuntimeOptions::simd_target; kResourceExhausted.
  // Lifetime: `runtime` and the memory of `kv` must outlive it; `batch` is
  //           borrowed during the call.
  static Result<std::unique_ptr<ReadProbe>> Create(Runtime* runtime,
                                                   const KvView& kv, int layer,
                                                   const Batch& batch);
  ~ReadProbe();
  ReadProbe(const ReadProbe&) = delete;
  ReadProbe& operator=(const ReadProbe&) = delete;

  int64_t bytes() const noexcept;  // read by one Run
  int num_loops() const noexcept;
  // "4 streams, prefetch to L2, shared out, by head".
  std::string LoopName(int loop) const;

  // Reads everything once; returns wall seconds of the launch.
  // Errors: kOutOfRange (loop); those of Runtime::Launch.
  Result<double> Run(int loop);

 private:
  class Impl;
  explicit ReadProbe(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Where multiply-adds have their operands: all in registers, or in L1, from
// where each step of a register tile loads them, as any matrix product must.
enum class Operands : uint8_t { kRegisters, kL1 };

// The rate of fused multiply-adds, all workers together, in flops a second (a
// multiply-add is two): the bf16 dot product for kBF16 where the kernel table
// has it - else the two fp32 multiply-adds that stand for it -, fp32 for the
// others.
//
// Cost:   about `seconds` on every worker.
// Errors: kNotFound (simd_target); kInvalidArgument (seconds not in (0, 60]);
//         those of Runtime::Launch.
VARLANE_EXPORT Result<double> MeasureMultiplyPeak(
    Runtime* runtime, DType dtype, double seconds,
    Operands operands = Operands::kRegisters);

// The same rate of an attention that does nothing else: operands from L1, as
// above, and after a register tile's 2 x head_size steps its softmax, an
// exponential for each of the sums. What a kernel on this machine can come near
// to; pages, masks, starts and ends of rows, accumulators that do not stay in
// registers come on top.
//
// head_size  of K and V, a multiple of 8 up to 576
// Errors:    kInvalidArgument (head_size); those above.
VARLANE_EXPORT Result<double> MeasureAttentionPeak(Runtime* runtime,
                                                   DType dtype, int head_size,
                                                   double seconds);

// What a machine can do at most, measured as above.
struct MachineRates {
  double bytes_per_second = 0;
  double flops_per_second = 0;
};

// The least time in which `rates` allow what the report's launches did: the
// slower of reading and multiplying, the other overlapped. LimitSeconds /
// report.seconds is the share of the machine that was used. 0 for rates of 0.
// Of one launch, or of several of a kind: the slower one decides once for all.
VARLANE_EXPORT double LimitSeconds(const LaunchReport& report,
                                   const MachineRates& rates) noexcept;

}  // namespace varlane

#endif  // VARLANE_LIMITS_H_
