// LadderPressure: real pressure from a ballast, answered by ServingPressure as
// a service has it.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_STRESS_LADDER_H_
#define VARLANE_TOOLS_STRESS_LADDER_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "tools/ballast.h"
#include "tools/stress_pressure.h"
#include "varlane/kv_pool.h"
#include "varlane/scheduler.h"
#include "varlane/serving_pressure.h"
#include "varlane/status.h"

namespace varlane::tools {

struct LadderOptions {
  BallastState* ballast = nullptr;  // never null
  // The ballast is part of this process, moved on between steps; else somebody
  // else's that shares the state.
  bool own_ballast = false;
  BallastTimes times;
  uint64_t seed = 1;
  int64_t least_blocks = 0;  // what the pool has to keep
  // Pressure comes from a limit that sends no events: measure at all times.
  bool polls = false;
};

class LadderPressure final : public StressPressure {
 public:
  // Begins at once: the ballast may take what is free and up to three quarters
  // of what the pool can give.
  // Errors: ServingPressure's; kFailedPrecondition where the pool can give
  //         nothing worth mentioning.
  // Lifetime: both, and the ballast's state, must outlive it.
  static Result<std::unique_ptr<LadderPressure>> Create(
      const LadderOptions& options, KvPool* pool, Scheduler* scheduler);
  ~LadderPressure() override;

  Status BetweenSteps() override;
  Status Stop() override;

  ServingPressureStats stats() const { return serving_->stats(); }

 private:
  LadderPressure(const LadderOptions& options, KvPool* pool)
      : options_(options), pool_(pool) {}
  Status PlanWaves();

  const LadderOptions options_;
  KvPool* const pool_;
  std::optional<Ballast> own_;
  std::unique_ptr<ServingPressure> serving_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_STRESS_LADDER_H_
