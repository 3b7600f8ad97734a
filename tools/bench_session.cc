// SPDX-License-Identifier: Apache-2.0

#include "tools/bench_session.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tools/parse.h"
#include "tools/status_util.h"
#include "varlane/memory_budget.h"

namespace varlane::tools {
namespace {

// Four times a last-level cache of 32 MiB, and then half of it again.
constexpr int64_t kColdBytes = int64_t{192} << 20;
// Comparing all read loops may take this long.
constexpr double kCalibrationSeconds = 1.0;
constexpr int kPeakGoes = 3;
constexpr double kPeakGoSeconds = 3e-3;

Result<double> BestGo(const std::function<Result<double>()>& measure) {
  double best = 0;
  for (int i = 0; i < kPeakGoes; ++i) {
    VARLANE_TOOLS_ASSIGN(const double rate, measure());
    best = std::max(best, rate);
  }
  return best;
}

}  // namespace

int ColdCopies(int64_t bytes) {
  return static_cast<int>((kColdBytes + bytes - 1) / bytes);
}

Result<Engine> MakeEngine(const RuntimeOptions& options) {
  Engine engine;
  VARLANE_TOOLS_ASSIGN(engine.runtime, Runtime::Create(options));
  VARLANE_TOOLS_ASSIGN(engine.attention,
                       Attention::Create(engine.runtime.get()));
  return engine;
}

Result<std::unique_ptr<BenchSession>> BenchSession::Create(
    const BenchOptions& options) {
  std::unique_ptr<BenchSession> session(new BenchSession);
  session->options_ = options;
  try {
    session->filter_ = std::regex(options.filter);
  } catch (const std::regex_error& error) {
    return BadArgument("filter \"{}\" is not a regular expression: {}",
                       options.filter, error.what());
  }
  if (options.memory_bytes == 0) {
    VARLANE_TOOLS_ASSIGN(const MemoryLimits limits, MemoryLimits::Detect());
    session->options_.memory_bytes = limits.available_bytes / 4 * 3;
  }
  VARLANE_TOOLS_ASSIGN(session->engine_, MakeEngine(options.runtime));
  session->progress_ = std::make_unique<Progress>("bench");
  return session;
}

SampleBudget BenchSession::budget() const {
  if (!options_.quick) return {.seconds = options_.seconds};
  return {.seconds = options_.seconds, .min_rounds = 5, .retries = false};
}

bool BenchSession::Wants(const std::string& name) const {
  return options_.filter.empty() || std::regex_search(name, filter_);
}

void BenchSession::Add(BenchRow row, const Measure& measure) {
  if (!Wants(row.name)) return;
  progress_->Update(static_cast<double>(rows_.size()), 0, row.name);
  const Status status = measure(&row);
  if (!status.ok()) {
    row.reason = std::string(status.message());
    row.value = row.limit = row.ratio = row.spread = std::nullopt;
    row.holds = std::nullopt;
  }
  rows_.push_back(std::move(row));
}

void BenchSession::AddLong(BenchRow row, const Measure& measure) {
  if (!options_.quick) return Add(std::move(row), measure);
  if (!Wants(row.name)) return;
  row.reason = "takes too long for --quick: left to the full run";
  rows_.push_back(std::move(row));
}

Result<const bench::KvFixture*> BenchSession::Fixture(DType dtype,
                                                      const bench::Heads& heads,
                                                      int64_t num_blocks) {
  const int64_t bytes = num_blocks * bench::KvBlockBytes(heads, dtype);
  if (bytes > options_.memory_bytes) {
    return Fail(StatusCode::kResourceExhausted,
                "needs {} of K/V, but --memory allows {}", FormatBytes(bytes),
                FormatBytes(options_.memory_bytes));
  }
  if (fixture_ == nullptr || fixture_->dtype() != dtype ||
      fixture_->heads() != heads ||
      std::cmp_less(fixture_->blocks().size(), num_blocks)) {
    fixture_.reset();  // never both at once
    VARLANE_TOOLS_ASSIGN(fixture_, bench::KvFixture::Create(runtime(), dtype,
                                                            heads, num_blocks));
  }
  return fixture_.get();
}

Result<double> BenchSession::Peak(Runtime* of, DType dtype, Operands operands) {
  return BestGo(
      [=] { return MeasureMultiplyPeak(of, dtype, kPeakGoSeconds, operands); });
}

Result<double> BenchSession::AttentionPeak(DType dtype, int head_size) {
  return BestGo([=, this] {
    return MeasureAttentionPeak(runtime(), dtype, head_size, kPeakGoSeconds);
  });
}

Result<Runtime*> BenchSession::DotRuntime(DType dtype) {
  static constexpr const char* kTarget = "AVX3_BF16";
  const std::vector<std::string> targets = SupportedSimdTargets();
  // The best without a dot product, where that is the slower way.
  const bool is_best = attention()->simd_target() == targets.front() &&
                       targets.front() == "AVX3";
  if (dtype != DType::kBF16 || !is_best ||
      std::ranges::find(targets, kTarget) == targets.end()) {
    return runtime();
  }
  if (dot_engine_.runtime == nullptr) {
    RuntimeOptions options = options_.runtime;
    options.simd_target = kTarget;
    VARLANE_TOOLS_ASSIGN(dot_engine_, MakeEngine(options));
  }
  return dot_engine_.runtime.get();
}

Result<std::vector<int>> BenchSession::BestLoops(bench::Workload* work) {
  VARLANE_TOOLS_ASSIGN(ReadProbe* const probe, work->Probe(runtime()));
  std::vector<int> candidates = ranking_;
  if (candidates.empty()) {
    candidates.resize(static_cast<size_t>(probe->num_loops()));
    std::iota(candidates.begin(), candidates.end(), 0);
  }
  VARLANE_TOOLS_ASSIGN(const double once,
                       work->Read(runtime(), candidates.front()));
  if (once * probe->num_loops() < kCalibrationSeconds / 3) {
    std::sort(candidates.begin(), candidates.end());
  } else {
    // The last comparison's best; where there was none, one pass over all.
    if (!ranking_.empty()) candidates.resize(4);
  }
  std::vector<double> best(static_cast<size_t>(probe->num_loops()), 1e9);
  const int passes =
      once * static_cast<double>(candidates.size()) > kCalibrationSeconds ? 1
                                                                          : 3;
  for (int pass = 0; pass < passes; ++pass) {
    for (const int loop : candidates) {
      VARLANE_TOOLS_ASSIGN(const double seconds, work->Read(runtime(), loop));
      double& low = best[static_cast<size_t>(loop)];
      low = std::min(low, seconds);
    }
  }
  std::sort(candidates.begin(), candidates.end(), [&best](int a, int b) {
    return best[static_cast<size_t>(a)] < best[static_cast<size_t>(b)];
  });
  if (std::cmp_equal(candidates.size(), probe->num_loops())) {
    ranking_ = candidates;
  }
  return std::vector<int>(candidates.begin(), candidates.begin() + 2);
}

Result<std::unique_ptr<KvPool>> MakeSmallPool(Runtime* runtime,
                                              int64_t num_blocks,
                                              bool prefix_cache) {
  return KvPool::Create({.layout = {.dtype = DType::kBF16,
                                    .num_layers = 1,
                                    .num_kv_heads = 1,
                                    .head_size = 32,
                                    .v_head_size = 32,
                                    .block_size = kSmallBlockTokens},
                         .num_blocks = num_blocks,
                         .prefix_cache = prefix_cache},
                        runtime);
}

}  // namespace varlane::tools
