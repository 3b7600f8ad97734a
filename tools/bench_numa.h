// BenchNuma: what memory of which node costs workers of which node, and what
// that makes of a pool over all nodes.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_BENCH_NUMA_H_
#define VARLANE_TOOLS_BENCH_NUMA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tools/bench_rows.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::tools {

struct BenchNumaOptions {
  bool quick = false;
  double seconds = 2;      // all decode rows together; likewise the scaling
  int64_t node_bytes = 0;  // K/V on each node; 0 = 256 MiB, 64 MiB with quick,
                           // or less where there is less. A second pool, whose
                           // heads are sharded, has as much for a while
  RuntimeOptions runtime;
};

struct BenchNumaResult {
  Json machine;
  std::vector<BenchRow> rows;
  // [nodes][nodes + 1] bytes a second that workers of one node read from
  // memory of another, and from that of all nodes in turn.
  std::vector<std::vector<double>> matrix;
  std::vector<int> workers;     // of the scaling curve
  std::vector<double> scaling;  // [workers] bytes a second
};

// Errors: those of Runtime::Create and KvPool::Create.
Result<BenchNumaResult> BenchNuma(const BenchNumaOptions& options);

// The matrix and the curve, for people.
std::string MatrixText(const BenchNumaResult& result);
std::string ScalingText(const BenchNumaResult& result);

// Writes the scaling curve and the matrix as a picture, by gnuplot: SVG or PNG,
// as the file's name ends.
// Errors: kUnavailable where gnuplot is not installed or fails: its script is
//         kept then; kInvalidArgument for another ending.
Status PlotNuma(const BenchNumaResult& result, const std::string& path);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_BENCH_NUMA_H_
