// SPDX-License-Identifier: Apache-2.0

#include "tools/stress.h"

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "tools/clock.h"
#include "tools/parse.h"
#include "tools/process_memory.h"
#include "tools/replay_sizing.h"
#include "tools/shared_page.h"
#include "tools/status_util.h"
#include "tools/stress_ladder.h"

namespace varlane::tools {
namespace {

// How long what was given back may take to come again once pressure is over.
constexpr double kRegainSeconds = 20;

ReplayOptions SizingOptions(const StressOptions& options) {
  ReplayOptions replay;
  replay.model = options.model;
  replay.kv_dtype = options.kv_dtype;
  replay.block_size = options.block_size;
  replay.scheduler.token_budget = options.engine.token_budget;
  replay.scheduler.watermark = 0;
  replay.concurrency = options.engine.concurrency;
  replay.kv_blocks = options.kv_blocks;
  return replay;
}

// Where the run takes place.
struct StressPlace {
  StressMode mode = StressMode::kSchedule;
  std::string reason;
  std::unique_ptr<ChildCgroup> cgroup;  // kCgroup
};

Status LimitData(int64_t bytes) {
  const rlimit limit = {static_cast<rlim_t>(bytes), static_cast<rlim_t>(bytes)};
  if (setrlimit(RLIMIT_DATA, &limit) == 0) return {};
  return Fail(StatusCode::kUnavailable, "cannot set RLIMIT_DATA to {}: {}",
              bytes, std::generic_category().message(errno));
}

// The run itself, in the child process.
class StressRun {
 public:
  StressRun(const StressOptions& options, const StressPlace& place,
            const Workload& workload, StressShared* shared)
      : options_(options),
        place_(place),
        workload_(workload),
        shared_(shared),
        calm_(options.model.num_layers) {
    result_.mode = place.mode;
    result_.mode_reason = place.reason;
  }

  Result<StressResult> Run();

 private:
  // Sizes the pool; serves one round in peace, and the others.
  Status Serve(Runtime* runtime);
  Status CreateEngine(Runtime* runtime);
  Status CreatePressure();
  Status PressedRound();
  // Ends the pressure and waits for what was given back.
  Status Recover();
  void Finish(Clock::time_point start, const StressSeconds& calm_seconds);
  void TakeLimit();

  const StressOptions& options_;
  const StressPlace& place_;
  const Workload& workload_;
  StressShared* const shared_;
  OutputDigests calm_;
  std::unique_ptr<StressEngine> engine_;
  std::unique_ptr<StressPressure> pressure_;
  LadderPressure* ladder_ = nullptr;  // pressure_, where it is one
  StressResult result_;
};

Status StressRun::CreateEngine(Runtime* runtime) {
  const ReplayOptions sizing = SizingOptions(options_);
  VARLANE_TOOLS_ASSIGN(result_.sizing,
                       SizePool(sizing, workload_, runtime->num_workers()));
  StressEngineOptions engine = options_.engine;
  engine.model = options_.model;
  engine.layout = ReplayLayout(sizing);
  engine.num_blocks = result_.sizing.blocks;
  // The longest request has to end in what is left.
  result_.least_blocks = workload_.PeakBlocks(1, options_.block_size) + 1;
  if (result_.least_blocks >= engine.num_blocks) {
    return BadArgument(
        "a pool of {} blocks can give nothing back: the longest request needs "
        "{}",
        engine.num_blocks, result_.least_blocks);
  }
  VARLANE_TOOLS_ASSIGN(engine_,
                       StressEngine::Create(engine, &workload_, runtime));
  result_.head_shards = engine_->pool()->num_shards();
  return {};
}

Status StressRun::CreatePressure() {
  if (place_.mode == StressMode::kSchedule) {
    pressure_ = std::make_unique<LimitSchedule>(
        engine_->pool(), options_.period, result_.least_blocks, options_.seed);
    return {};
  }
  LadderOptions ladder;
  ladder.ballast = &shared_->ballast;
  ladder.own_ballast = place_.mode == StressMode::kRlimit;
  ladder.polls = ladder.own_ballast;
  ladder.times = options_.ballast;
  ladder.seed = options_.seed;
  ladder.least_blocks = result_.least_blocks;
  VARLANE_TOOLS_ASSIGN(
      std::unique_ptr<LadderPressure> pressure,
      LadderPressure::Create(ladder, engine_->pool(), engine_->scheduler()));
  ladder_ = pressure.get();
  pressure_ = std::move(pressure);
  return {};
}

Status StressRun::PressedRound() {
  OutputDigests pressed(options_.model.num_layers);
  VARLANE_TOOLS_TRY(engine_->Round(&pressed, [this] {
    ++shared_->heartbeats;
    return pressure_->BetweenSteps();
  }));
  ++result_.rounds;
  result_.rows += pressed.rows();
  DigestDifferences found = OutputDigests::Compare(calm_, pressed, false);
  result_.wrong_rows += pressed.unstable() + found.wrong;
  result_.skipped_rows += found.skipped;
  if (result_.first_wrong.empty()) {
    result_.first_wrong = std::move(found.first);
  }
  if (result_.empty.ok()) result_.empty = engine_->CheckEmpty();
  return {};
}

Status StressRun::Recover() {
  VARLANE_TOOLS_TRY(pressure_->Stop());
  const Clock::time_point start = Clock::now();
  while (engine_->pool()->capacity_blocks() < result_.sizing.blocks &&
         SecondsSince(start) < kRegainSeconds) {
    ++shared_->heartbeats;
    VARLANE_TOOLS_TRY(pressure_->BetweenSteps());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  result_.final_blocks = engine_->pool()->capacity_blocks();
  if (result_.empty.ok()) result_.empty = engine_->CheckEmpty();
  return {};
}

void StressRun::TakeLimit() {
  if (ladder_ == nullptr) return;
  StressLimit& limit = result_.limit.emplace();
  const BallastState& ballast = shared_->ballast;
  limit.ladder = ladder_->stats();
  limit.ballast_peak_bytes = ballast.peak_bytes;
  limit.waves = ballast.waves;
  limit.starved = ballast.starved;
  limit.waits = ballast.waits;
  limit.wait_seconds = static_cast<double>(ballast.wait_ns) * 1e-9;
  limit.longest_wait_seconds =
      static_cast<double>(ballast.longest_wait_ns) * 1e-9;
  if (place_.cgroup == nullptr) return;
  limit.oom_kills = place_.cgroup->oom_kills();
  limit.limit_hits = place_.cgroup->limit_hits();
  limit.peak_bytes = place_.cgroup->peak_bytes();
}

void StressRun::Finish(Clock::time_point start,
                       const StressSeconds& calm_seconds) {
  result_.seconds = SecondsSince(start);
  const StressSeconds& all = engine_->seconds();
  result_.serving_seconds =
      (all.wall - calm_seconds.wall) - (all.inputs - calm_seconds.inputs);
  result_.requests = engine_->ended() - workload_.size();
  result_.refused = engine_->refused();
}

Status StressRun::Serve(Runtime* runtime) {
  VARLANE_TOOLS_TRY(CreateEngine(runtime));
  VARLANE_TOOLS_TRY(engine_->Round(&calm_, [this]() -> Status {
    ++shared_->heartbeats;
    return {};
  }));
  result_.empty = engine_->CheckEmpty();
  const StressSeconds calm_seconds = engine_->seconds();
  VARLANE_TOOLS_TRY(CreatePressure());
  const Clock::time_point start = Clock::now();
  do {
    VARLANE_TOOLS_TRY(PressedRound());
  } while (SecondsSince(start) < options_.seconds && result_.wrong_rows == 0 &&
           result_.empty.ok());
  Finish(start, calm_seconds);
  VARLANE_TOOLS_TRY(Recover());
  result_.pressure = pressure_->counts();
  result_.pool = engine_->pool()->stats();
  result_.scheduler = engine_->scheduler()->stats();
  result_.swap = engine_->swap_stats();
  TakeLimit();
  return {};
}

Result<StressResult> StressRun::Run() {
  if (place_.mode == StressMode::kRlimit) {
    VARLANE_TOOLS_TRY(LimitData(options_.limit_bytes));
  }
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Runtime> runtime,
                       Runtime::Create(options_.runtime));
  result_.rss_before_bytes = ResidentBytes();
  const Status status = Serve(runtime.get());
  pressure_.reset();
  engine_.reset();
  malloc_trim(0);
  result_.rss_after_bytes = ResidentBytes();
  VARLANE_TOOLS_TRY(status);
  return std::move(result_);
}

// A cgroup if it can be had and was not excluded, else RLIMIT_DATA.
Result<StressPlace> FindPlace(const StressOptions& options) {
  StressPlace place;
  place.mode = options.mode;
  if (place.mode == StressMode::kSchedule) {
    place.reason = fmt::format("a new limit every {} steps", options.period);
    return place;
  }
  std::string no_cgroup;
  if (place.mode != StressMode::kRlimit) {
    Result<std::unique_ptr<ChildCgroup>> cgroup =
        ChildCgroup::Create(options.limit_bytes);
    if (cgroup.ok()) {
      place.mode = StressMode::kCgroup;
      place.cgroup = std::move(cgroup).value();
      place.reason = fmt::format(
          "pool and ballast share {} of a v{} memory cgroup",
          FormatBytes(options.limit_bytes), place.cgroup->version());
      return place;
    }
    if (place.mode == StressMode::kCgroup) return cgroup.status();
    no_cgroup = fmt::format(" ({})", cgroup.status().message());
  }
  place.mode = StressMode::kRlimit;
  place.reason = fmt::format("pool and ballast share RLIMIT_DATA = {}{}",
                             FormatBytes(options.limit_bytes), no_cgroup);
  return place;
}

std::string Join(const std::vector<std::string>& sentences) {
  std::string all;
  for (const std::string& sentence : sentences) {
    all += (all.empty() ? "" : "; ") + sentence;
  }
  return all;
}

// The cgroup's last word, when nobody is in it any more.
Status Leave(ChildCgroup* cgroup) {
  if (cgroup == nullptr) return {};
  const int64_t oom_kills = cgroup->oom_kills();
  VARLANE_TOOLS_TRY(cgroup->Remove());
  if (oom_kills <= 0) return {};
  return Fail(StatusCode::kInternal,
              "the kernel killed {} processes in the cgroup", oom_kills);
}

}  // namespace

const char* StressModeName(StressMode mode) {
  switch (mode) {
    case StressMode::kAuto:
      return "auto";
    case StressMode::kCgroup:
      return "cgroup";
    case StressMode::kRlimit:
      return "rlimit";
    case StressMode::kSchedule:
      break;
  }
  return "schedule";
}

Status RunStress(const StressOptions& options, const Workload& workload,
                 const std::string& title, const std::string& json_path) {
  const SharedPage<StressShared> shared;
  if (shared.get() == nullptr) {
    return Fail(StatusCode::kResourceExhausted,
                "no memory to share with the run");
  }
  VARLANE_TOOLS_ASSIGN(const StressPlace place, FindPlace(options));
  SuperviseOptions supervise;
  supervise.hang_seconds = options.hang_seconds;
  supervise.seed = options.seed;
  supervise.cgroup = place.cgroup.get();
  supervise.ballast = place.cgroup != nullptr;
  supervise.ballast_times = options.ballast;
  const Status status = Supervise(supervise, shared.get(), [&]() -> Status {
    StressRun run(options, place, workload, shared.get());
    VARLANE_TOOLS_ASSIGN(const StressResult result, run.Run());
    VARLANE_TOOLS_TRY(Emit(title + StressText(options, result),
                           StressJson(options, result), json_path));
    const std::vector<std::string> failures = result.Failures(options);
    if (failures.empty()) return {};
    return {StatusCode::kInternal, "stress: " + Join(failures)};
  });
  const Status left = Leave(place.cgroup.get());
  return status.ok() ? left : status;
}

}  // namespace varlane::tools
