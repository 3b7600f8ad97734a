// How many blocks a replay's pool gets, and why.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/replay_sizing.h"

#include <algorithm>
#include <cmath>

#include "tools/parse.h"
#include "tools/replay_verify.h"
#include "tools/status_util.h"
#include "varlane/environment.h"

namespace varlane::tools {
namespace {

constexpr double kDefaultFraction = 0.9;

// The fraction somebody asked for, or 0.
Result<double> ExplicitFraction(const ReplayOptions& options) {
  if (options.fraction != 0) return options.fraction;
  for (const EnvVariable& variable : EnvironmentVariables()) {
    if (std::string(variable.name) == "VARLANE_MEMORY_FRACTION" &&
        !EnvironmentValue(variable).empty()) {
      return MemoryFractionFromEnvironment();
    }
  }
  return 0.0;
}

// What our own buffers take beside the pool.
int64_t PeakBytes(const ReplayOptions& options, const Workload& workload,
                  int num_workers) {
  int64_t bytes =
      StepBuffers::BytesFor(options.model, options.scheduler.token_budget);
  if (options.verify_share > 0) {
    const int64_t longest = workload.PeakBlocks(1, 1);
    bytes += num_workers * StepVerifier::ScratchBytes(options.model, longest);
  }
  return bytes;
}

Result<MemoryBudget> ClaimBudget(const ReplayOptions& options,
                                 int64_t peak_bytes, const KvLayout& layout,
                                 double* fraction) {
  VARLANE_TOOLS_ASSIGN(const MemoryLimits limits,
                       MemoryLimits::Detect(options.memory_root));
  VARLANE_TOOLS_ASSIGN(const double asked, ExplicitFraction(options));
  BudgetRequest request;
  request.fraction = asked != 0 ? asked : kDefaultFraction;
  request.weights_bytes = options.weights_bytes;
  request.profile_peak_bytes = peak_bytes;
  VARLANE_TOOLS_ASSIGN(MemoryBudget budget,
                       PlanMemoryBudget(request, layout, limits));
  if (!budget.granted && asked == 0 && budget.fitting_fraction > 0) {
    // Down to a hundredth: what is available moves while we look.
    request.fraction =
        std::max(std::floor(budget.fitting_fraction * 100 - 1) / 100, 0.01);
    VARLANE_TOOLS_ASSIGN(budget, PlanMemoryBudget(request, layout, limits));
  }
  *fraction = request.fraction;
  if (budget.granted) return budget;
  return Status(StatusCode::kResourceExhausted, budget.refusal);
}

}  // namespace

KvLayout ReplayLayout(const ReplayOptions& options) {
  KvLayout layout;
  layout.dtype = options.kv_dtype;
  layout.num_layers = options.model.num_layers;
  layout.num_kv_heads = options.model.num_kv_heads;
  layout.head_size = options.model.head_size;
  layout.v_head_size = options.model.head_size;
  layout.block_size = options.block_size;
  return layout;
}

Result<PoolSizing> SizePool(const ReplayOptions& options,
                            const Workload& workload, int num_workers) {
  const KvLayout layout = ReplayLayout(options);
  VARLANE_TOOLS_TRY(layout.Validate());
  PoolSizing sizing;
  int64_t running = options.scheduler.max_seqs;
  if (options.rate == 0) running = std::min(running, options.concurrency);
  // The watermark's share stays free when a request is admitted.
  const double head_room = 1 - std::min(options.scheduler.watermark, 0.5);
  sizing.workload_blocks =
      1 +
      static_cast<int64_t>(std::ceil(static_cast<double>(workload.PeakBlocks(
                                         running, options.block_size)) /
                                     head_room));
  if (options.kv_blocks != 0 || options.kv_bytes != 0) {
    sizing.blocks = options.kv_blocks != 0
                        ? options.kv_blocks
                        : options.kv_bytes / layout.block_bytes();
    sizing.reason = "fixed by the command line";
    if (sizing.blocks > 0) return sizing;
    return Fail(StatusCode::kResourceExhausted,
                "--kv-bytes {} is less than one block of {} bytes",
                options.kv_bytes, layout.block_bytes());
  }
  double fraction = 0;
  VARLANE_TOOLS_ASSIGN(
      const MemoryBudget budget,
      ClaimBudget(options, PeakBytes(options, workload, num_workers), layout,
                  &fraction));
  sizing.budget_blocks = budget.blocks;
  sizing.blocks = std::min(budget.blocks, sizing.workload_blocks);
  sizing.reason =
      sizing.blocks < sizing.workload_blocks
          ? fmt::format("all that {:.2f} of memory allows (bound by {})",
                        fraction, budget.binding_limit)
          : fmt::format(
                "what the trace can hold at once; {:.2f} of memory "
                "would allow {} blocks (bound by {})",
                fraction, FormatCount(budget.blocks), budget.binding_limit);
  return sizing;
}

}  // namespace varlane::tools
