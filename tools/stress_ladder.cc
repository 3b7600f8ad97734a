// SPDX-License-Identifier: Apache-2.0

#include "tools/stress_ladder.h"

#include "tools/clock.h"
#include "tools/parse.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

// A service waits for seconds before it believes in calm; here more ups and
// downs a minute are worth more than rest.
constexpr int64_t kClimbNs = 100'000'000;
constexpr int64_t kCalmNs = 250'000'000;
constexpr int64_t kHoldNs = 500'000'000;
constexpr int64_t kPollNs = 50'000'000;

// Of what the pool can give, a wave wants this much.
constexpr double kLeastShare = 0.15;
constexpr double kMostShare = 0.75;

}  // namespace

Result<std::unique_ptr<LadderPressure>> LadderPressure::Create(
    const LadderOptions& options, KvPool* pool, Scheduler* scheduler) {
  std::unique_ptr<LadderPressure> ladder(new LadderPressure(options, pool));
  ServingPressureOptions serving;
  VARLANE_TOOLS_ASSIGN(serving.monitor, PressureOptions::FromEnvironment());
  serving.monitor.hold_ns = kHoldNs;
  serving.monitor.poll_ns = kPollNs;
  serving.monitor.cgroups = !options.polls;
  serving.monitor.psi = !options.polls;
  if (options.polls) serving.monitor.systemd_watch.clear();
  serving.controller.climb_ns = kClimbNs;
  serving.controller.calm_ns = kCalmNs;
  VARLANE_TOOLS_ASSIGN(ladder->serving_,
                       ServingPressure::Create(serving, pool, scheduler));
  VARLANE_TOOLS_TRY(ladder->PlanWaves());
  if (options.own_ballast) {
    ladder->own_.emplace(options.times, options.seed, options.ballast);
  }
  options.ballast->presses = true;
  return ladder;
}

LadderPressure::~LadderPressure() { options_.ballast->presses = false; }

Status LadderPressure::PlanWaves() {
  const KvPoolStats pool = pool_->stats();
  const int64_t kept = options_.least_blocks * pool_->layout().block_bytes();
  const int64_t spare = pool.committed_bytes - kept - pool.slab_bytes;
  if (spare < 4 * pool.slab_bytes) {
    return Fail(StatusCode::kFailedPrecondition,
                "the pool of {} can give back {}, less than four slabs of {}: "
                "take a larger one or shorter requests",
                FormatBytes(pool.committed_bytes), FormatBytes(spare),
                FormatBytes(pool.slab_bytes));
  }
  const int64_t room = BallastRoomBytes();
  const auto share = [&](double part) {
    return room + static_cast<int64_t>(part * static_cast<double>(spare));
  };
  options_.ballast->least_bytes = share(kLeastShare);
  options_.ballast->most_bytes = share(kMostShare);
  return {};
}

Status LadderPressure::BetweenSteps() {
  if (own_) own_->Tick(NowNs());
  if (!serving_->HasNews()) return {};
  const Before before = Look(*pool_);
  (void)serving_->Update();
  (void)Count(before, *pool_);
  return {};
}

Status LadderPressure::Stop() {
  options_.ballast->presses = false;
  return BetweenSteps();
}

}  // namespace varlane::tools
