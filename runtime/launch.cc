// SPDX-License-Identifier: Apache-2.0

#include "runtime/launch.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/strings.h"
#include "runtime/drain.h"
#include "runtime/graph_run.h"
#include "runtime/launch_state.h"

namespace varlane {
namespace {

// So far from the end of int64 that overshooting claims cannot wrap.
constexpr int64_t kMaxThreadgroups = int64_t{1} << 61;

// The bodies the calling thread is inside of, innermost first.
struct BodyContext {
  const LaunchEngine* engine;
  int worker;
  const BodyContext* outer;
};
constinit thread_local const BodyContext* innermost_body = nullptr;

const BodyContext* FindBody(const LaunchEngine* engine) noexcept {
  const BodyContext* body = innermost_body;
  while (body != nullptr && body->engine != engine) body = body->outer;
  return body;
}

std::vector<int> NodeOfWorkers(const Placement& placement) {
  std::vector<int> nodes;
  for (int node = 0; node < placement.num_nodes(); ++node) {
    nodes.resize(static_cast<size_t>(
                     placement.first_worker[static_cast<size_t>(node) + 1]),
                 node);
  }
  return nodes;
}

std::vector<int> ThreadsOfNodes(const Arenas& arenas, int num_nodes) {
  std::vector<int> threads;
  for (int node = 0; node < num_nodes; ++node) {
    threads.push_back(arenas.num_threads(node));
  }
  return threads;
}

// Who asked for a stop knows of it.
void LogFailure(const Status& status, const LaunchOptions& options,
                int64_t num_threadgroups) noexcept {
  const bool was_asked_for = status.code() == StatusCode::kCancelled;
  Log(was_asked_for ? LogLevel::kDebug : LogLevel::kWarning, "launch_failed",
      status.message(),
      {{"code", StatusCodeName(status.code())},
       {"name", options.name},
       {"threadgroups", num_threadgroups}});
}

}  // namespace

void FailBody(const Drainer& drainer, int64_t index,
              const char* what) noexcept {
  try {
    const std::string where =
        drainer.name == nullptr ? "" : StrCat("node \"", drainer.name, "\": ");
    drainer.state->Fail(
        {StatusCode::kAborted,
         StrCat(where, "the body of threadgroup ", index, " threw: ", what)});
  } catch (...) {
    drainer.state->Fail({StatusCode::kAborted, what});
  }
}

// The token's answer is noted in the state, for the launch's result. A body
// that asks may be a long one: then the deadline has nobody else to watch it.
bool IsLaunchCancelled(const void* state) noexcept {
  auto* const launch = static_cast<LaunchState*>(const_cast<void*>(state));
  if (launch->has_deadline()) launch->CheckDeadline(LaunchState::Clock::now());
  return launch->IsCancelled();
}

LaunchEngine::LaunchEngine(const Placement& placement, Arenas& arenas, bool pin,
                           bool confine)
    : placement_(placement),
      arenas_(arenas),
      node_of_worker_(NodeOfWorkers(placement)),
      scratch_(node_of_worker_, placement.num_nodes()),
      board_(std::make_shared<LaunchBoard>(
          ThreadsOfNodes(arenas, placement.num_nodes()))),
      pin_(pin),
      confine_(pin && confine) {
  caller_mask_.Add(placement.pu_of_worker[0]);
  for (const int pu : placement.pu_of_worker) own_mask_.Add(pu);
  const std::set<int> pus(placement.pu_of_worker.begin(),
                          placement.pu_of_worker.end());
  // Workers that share a PU need it more than one that waits does.
  spins_ = std::cmp_greater_equal(pus.size(), placement.num_workers());
}

// Helper tasks that have not begun yet hold the board: let them come and go, so
// that a process may end right after its Runtime without leaving them behind. A
// scheduler that never runs them (a forked child's) must not keep us for ever.
LaunchEngine::~LaunchEngine() {
  constexpr auto kPatience = std::chrono::seconds(1);
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  while (!board_->Idle() && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Status LaunchEngine::Validate(const Grid& grid,
                              const LaunchOptions& options) const {
  VARLANE_REQUIRE_ARG(
      grid.num_threadgroups >= 0 && grid.num_threadgroups <= kMaxThreadgroups,
      "grid.num_threadgroups = ", grid.num_threadgroups, ", must be in [0, ",
      kMaxThreadgroups, "]");
  VARLANE_REQUIRE_ARG(options.max_workers >= 0,
                      "max_workers = ", options.max_workers,
                      ", must not be negative");
  VARLANE_REQUIRE_ARG(options.worker_seconds.empty() ||
                          std::cmp_greater_equal(options.worker_seconds.size(),
                                                 placement_.num_workers()),
                      "worker_seconds has ", options.worker_seconds.size(),
                      " entries, but the runtime has ",
                      placement_.num_workers(), " workers");
  const std::span<const int64_t> begin = grid.node_begin;
  if (begin.empty()) return {};
  const auto num_nodes = static_cast<size_t>(placement_.num_nodes());
  VARLANE_REQUIRE_ARG(begin.size() == num_nodes + 1, "grid.node_begin has ",
                      begin.size(), " entries, but the runtime has ", num_nodes,
                      " nodes: ", num_nodes + 1, " are needed");
  VARLANE_REQUIRE_ARG(begin.front() == 0,
                      "grid.node_begin[0] = ", begin.front(), ", must be 0");
  for (size_t i = 1; i < begin.size(); ++i) {
    VARLANE_REQUIRE_ARG(begin[i] >= begin[i - 1], "grid.node_begin[", i,
                        "] = ", begin[i], ", is below grid.node_begin[", i - 1,
                        "] = ", begin[i - 1]);
  }
  VARLANE_REQUIRE_ARG(begin.back() == grid.num_threadgroups, "grid.node_begin[",
                      num_nodes, "] = ", begin.back(),
                      ", must be num_threadgroups = ", grid.num_threadgroups);
  return {};
}

Status LaunchEngine::Launch(const Grid& grid,
                            FunctionRef<void(const Threadgroup&)> body,
                            const LaunchOptions& options) {
  try {
    VARLANE_RETURN_IF_ERROR(Validate(grid, options));
    if (grid.num_threadgroups == 0) return {};
    LaunchState* const state = board_->Take();
    state->Reset(options, Participants(grid.num_threadgroups, options));
    state->body = &body;
    state->traced_body =
        options.traced_body != nullptr ? options.traced_body : &body;
    state->grid.Reset(grid);
    Trace(state, options.name);
    Status status = Execute(state, grid.num_threadgroups);
    if (!status.ok()) LogFailure(status, options, grid.num_threadgroups);
    return status;
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted, "no memory for a launch"};
  }
}

Status LaunchEngine::Run(GraphRun* run, const LaunchOptions& options) {
  try {
    LaunchState* const state = board_->Take();
    state->Reset(options, Participants(placement_.num_workers(), options));
    state->graph = run;
    Trace(state, options.name.empty() ? "graph" : options.name);
    run->Start(this, state);
    Status status = Execute(state, 0);
    run->Finish();
    if (!status.ok()) LogFailure(status, options, 0);
    return status;
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted, "no memory to run a graph"};
  }
}

void LaunchEngine::Trace(LaunchState* state, std::string_view name) noexcept {
  Tracer* const tracer = tracer_.load(std::memory_order_acquire);
  if (tracer != nullptr) state->trace.Begin(tracer->impl(), name);
}

int LaunchEngine::Participants(int64_t at_most,
                               const LaunchOptions& options) const noexcept {
  int64_t participants = std::min<int64_t>(placement_.num_workers(), at_most);
  if (options.max_workers > 0) {
    participants = std::min<int64_t>(participants, options.max_workers);
  }
  return static_cast<int>(participants);
}

// Takes the state, all set, to its end.
Status LaunchEngine::Execute(LaunchState* state, int64_t num_threadgroups) {
  // A thread inside a body of ours keeps its number.
  const BodyContext* const inside = FindBody(this);
  const int worker = inside != nullptr ? inside->worker : 0;
  if (state->participants == 1) {
    const ScopedAffinity seat(inside == nullptr ? WhereToConfineCaller()
                                                : nullptr);
    TakePart(state, worker, true);
  } else {
    RunWithHelpers(state, worker, inside != nullptr);
  }
  if (state->trace.tracer != nullptr) {
    state->trace.EndLaunch(worker, num_threadgroups);
  }
  Status status = state->TakeResult();
  board_->Put(state);
  return status;
}

// A caller that is on worker 0's PU stays there by itself: all other PUs have
// busy workers. Pinning it would cost three system calls, several microseconds
// under virtualisation, a multiple of a small launch.
bool LaunchEngine::MustMoveCaller() const noexcept {
  return pin_ && CurrentCpu() != placement_.pu_of_worker[0];
}

// Also a caller that is on one of our PUs: it could be moved off meanwhile.
const CpuMask* LaunchEngine::WhereToConfineCaller() const noexcept {
  return confine_ ? &own_mask_ : nullptr;
}

void LaunchEngine::RunWithHelpers(LaunchState* state, int worker,
                                  bool is_nested) {
  // Before the caller is pinned: threads that TBB starts inherit its mask. A
  // graph sends for helpers when it has work for them.
  if (state->graph == nullptr) Summon(state, state->participants - 1);
  const bool moves =
      !is_nested && MustMoveCaller() &&
      !caller_seat_taken_.exchange(true, std::memory_order_acquire);
  {
    const ScopedAffinity seat(moves        ? &caller_mask_
                              : !is_nested ? WhereToConfineCaller()
                                           : nullptr);
    TakePart(state, worker, true);
    board_->Close(state);
    state->WaitForHelpers(caller_patience());
    // Helpers that went for something more urgent may have left some of their
    // node's to thieves that had kept away because of them.
    while (state->graph == nullptr && state->grid.HasUnclaimed() &&
           !state->WasCancelled()) {
      TakePart(state, worker, true);
    }
  }
  if (moves) caller_seat_taken_.store(false, std::memory_order_release);
}

// Opens the launch to helpers and sends for those that are not on their way.
void LaunchEngine::Summon(LaunchState* state, int joins) noexcept {
  board_->Open(state, this, joins);
  for (int node = 0; node < placement_.num_nodes(); ++node) {
    for (int i = 0; i < state->num_tasks[static_cast<size_t>(node)]; ++i) {
      if (!arenas_.EnqueueHelper(node, board_)) board_->TaskStarted(node);
    }
  }
}

void LaunchEngine::TakePart(LaunchState* state, int worker,
                            bool is_caller) noexcept {
  const BodyContext context = {this, worker, innermost_body};
  innermost_body = &context;
  Drainer drainer = {
      .state = state,
      .grid = &state->grid,
      .worker = worker,
      .node = node_of_worker_[static_cast<size_t>(worker)],
      // One that is alone claims all at once, unless it has a clock to watch.
      .sharers = state->participants + (state->has_deadline() ? 1 : 0),
  };
  drainer.nearest =
      placement_.nearest[static_cast<size_t>(drainer.node)].data();
  drainer.worker_seconds = state->worker_seconds;
  if (!is_caller) drainer.most_urgent = &board_->most_urgent();
  if (state->graph != nullptr) {
    state->graph->TakePart(drainer, is_caller);
  } else {
    (void)Drain(&drainer, state->scratch_bytes, *state->body, &state->trace,
                *state->traced_body);
  }
  innermost_body = context.outer;
}

void HelpTask(LaunchBoard& board, int node, int worker) noexcept {
  // First of all: a launch that opens later must count on a task of its own.
  board.TaskStarted(node);
  if (worker < 0 || innermost_body != nullptr) return;
  LaunchEngine* engine = nullptr;
  while (LaunchState* const state = board.Join(&engine)) {
    engine->TakePart(state, worker, false);
    // Somebody may come back for what is left, this helper for one.
    if (board.most_urgent().load(std::memory_order_relaxed) > state->priority) {
      board.Rejoin(state);
    }
    state->Leave();
  }
}

}  // namespace varlane
