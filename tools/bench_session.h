// BenchSession: what the rows of `varlane bench` share.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_BENCH_SESSION_H_
#define VARLANE_TOOLS_BENCH_SESSION_H_

#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "bench/workload.h"
#include "tools/bench_rows.h"
#include "tools/benches.h"
#include "tools/progress.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/limits.h"
#include "varlane/runtime.h"

namespace varlane::tools {

// One runtime with its operation.
struct Engine {
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Attention> attention;
};
Result<Engine> MakeEngine(const RuntimeOptions& options);

// Fills in value, limit, ratio ... of a row.
using Measure = std::function<Status(BenchRow*)>;

class BenchSession {
 public:
  static Result<std::unique_ptr<BenchSession>> Create(
      const BenchOptions& options);

  const BenchOptions& options() const { return options_; }
  Runtime* runtime() const { return engine_.runtime.get(); }
  Attention* attention() const { return engine_.attention.get(); }
  SampleBudget budget() const;

  bool Wants(const std::string& name) const;
  // Measures the row if it is wanted; a failure becomes its reason.
  void Add(BenchRow row, const Measure& measure);
  // The same for a row too long for a quick run, which only says so.
  void AddLong(BenchRow row, const Measure& measure);
  std::vector<BenchRow> TakeRows() { return std::move(rows_); }

  // A pool of at least `num_blocks` and at most options().memory_bytes. One
  // stands at a time: rows share it for as long as its kind and size will do,
  // and the next call may replace it.
  // Errors: kResourceExhausted, with what it would take.
  Result<const bench::KvFixture*> Fixture(DType dtype,
                                          const bench::Heads& heads,
                                          int64_t num_blocks);

  // Flops a second of all workers; the best of a few short goes, since a stolen
  // core would flatter the kernels.
  Result<double> Peak(DType dtype, Operands operands = Operands::kRegisters) {
    return Peak(runtime(), dtype, operands);
  }
  Result<double> Peak(Runtime* of, DType dtype,
                      Operands operands = Operands::kRegisters);
  // The same of an attention that does nothing else: MeasureAttentionPeak.
  Result<double> AttentionPeak(DType dtype, int head_size);
  // Whose peak is that of the CPU's dot product, if `dtype` has one: not the
  // session's own runtime where its kernels are faster without.
  Result<Runtime*> DotRuntime(DType dtype);

  // The two fastest read loops on this workload.
  Result<std::vector<int>> BestLoops(bench::Workload* work);

 private:
  BenchSession() = default;

  BenchOptions options_;
  std::regex filter_;
  Engine engine_;
  Engine dot_engine_;  // made when first asked for
  std::vector<BenchRow> rows_;
  std::vector<int> ranking_;  // read loops, as the last full comparison had it
  std::unique_ptr<bench::KvFixture> fixture_;
  std::unique_ptr<Progress> progress_;
};

// Copies of a shape that make `bytes` of K/V cold on every visit.
int ColdCopies(int64_t bytes);

// A pool for rows on bookkeeping: blocks of 2 KiB, so that only what the pool
// keeps about them is touched.
inline constexpr int kSmallBlockTokens = 16;
Result<std::unique_ptr<KvPool>> MakeSmallPool(Runtime* runtime,
                                              int64_t num_blocks,
                                              bool prefix_cache = false);

// --- the families of rows ----------------------------------------------------

void AddRatioRows(BenchSession* session, const bench::Heads& heads,
                  DType dtype);
void AddBlockSizeRows(BenchSession* session, const bench::Heads& heads,
                      DType dtype);
void AddLargeGroupRows(BenchSession* session);
void AddBatchRows(BenchSession* session);     // mixed, ragged, windowed
void AddLaunchRows(BenchSession* session);    // empty and surplus threadgroups
void AddMonitorRows(BenchSession* session);   // of memory pressure
void AddPoolRows(BenchSession* session);      // blocks taken, forks
void AddPrefixRows(BenchSession* session);    // lookups, hits of a trace
void AddResizeRows(BenchSession* session);    // memory returned and regained
void AddRuntimeRows(BenchSession* session);   // those, graphs, traces, sharing
void AddModifiedRows(BenchSession* session);  // softcap and ALiBi
void AddScalingRows(BenchSession* session);   // two workers against one
void AddTargetRows(BenchSession* session);    // other kernel tables
void AddWriteRows(BenchSession* session);     // of K/V, beside copies
void AddPeerRows(BenchSession* session);      // a composition of library GEMMs

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_BENCH_SESSION_H_
