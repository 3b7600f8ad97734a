// SPDX-License-Identifier: Apache-2.0

#include "tools/benches.h"

#include <fstream>
#include <utility>

#include "tools/bench_session.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

Json MachineJson(BenchSession* session) {
  const Topology& topology = session->runtime()->topology();
  Json json = {{"cpu", CpuName()},
               {"workers", session->runtime()->num_workers()},
               {"simd_target", session->attention()->simd_target()},
               {"transparent_huge_pages", topology.transparent_huge_pages}};
  for (const auto& [name, caches] :
       {std::pair("l2_bytes", &topology.l2), {"l3_bytes", &topology.l3}}) {
    json[name] = caches->empty() ? 0 : caches->front().size_bytes;
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Result<double> peak = session->Peak(dtype);
    json[std::string(DTypeName(dtype)) + "_peak_gflop_per_s"] =
        peak.ok() ? *peak * 1e-9 : 0;
  }
  return json;
}

}  // namespace

Result<BenchResult> BenchKernels(const BenchOptions& options) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<BenchSession> session,
                       BenchSession::Create(options));
  BenchResult result;
  result.machine = MachineJson(session.get());
  AddRatioRows(session.get(), Heads{}, DType::kBF16);
  AddLaunchRows(session.get());
  AddBatchRows(session.get());
  AddModifiedRows(session.get());
  AddWriteRows(session.get());
  AddScalingRows(session.get());
  AddPeerRows(session.get());
  AddTargetRows(session.get());
  AddBlockSizeRows(session.get(), Heads{}, DType::kBF16);
  if (!options.quick) {
    for (const DType dtype : {DType::kF32, DType::kF16}) {
      AddRatioRows(session.get(), Heads{}, dtype);
      AddBlockSizeRows(session.get(), Heads{}, dtype);
    }
    for (const Heads& heads :
         {Heads{32, 8, 128}, Heads{16, 8, 128}, Heads{8, 8, 64}}) {
      for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
        AddRatioRows(session.get(), heads, dtype);
      }
    }
    AddLargeGroupRows(session.get());
  }
  result.rows = session->TakeRows();
  return result;
}

Result<BenchResult> BenchMemory(const BenchOptions& options) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<BenchSession> session,
                       BenchSession::Create(options));
  BenchResult result;
  result.machine = MachineJson(session.get());
  AddPoolRows(session.get());
  AddPrefixRows(session.get());
  AddResizeRows(session.get());
  AddMonitorRows(session.get());
  result.rows = session->TakeRows();
  return result;
}

Result<BenchResult> BenchRuntime(const BenchOptions& options) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<BenchSession> session,
                       BenchSession::Create(options));
  BenchResult result;
  result.machine = MachineJson(session.get());
  AddRuntimeRows(session.get());
  result.rows = session->TakeRows();
  return result;
}

}  // namespace varlane::tools
