// SPDX-License-Identifier: Apache-2.0

#include "runtime/graph_run.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/strings.h"
#include "runtime/launch.h"
#include "runtime/spin.h"

namespace varlane {

GraphRun::GraphRun(const std::vector<GraphNodeSpec>& specs,
                   int num_numa_nodes) {
  nodes_.reserve(specs.size());
  for (const GraphNodeSpec& spec : specs) {
    nodes_.push_back(std::make_unique<Node>(spec, num_numa_nodes));
  }
}

GraphRun::~GraphRun() = default;

void GraphRun::Start(LaunchEngine* engine, LaunchState* state) noexcept {
  const std::lock_guard lock(mutex_);
  engine_ = engine;
  state_ = state;
  first_ = last_ = nullptr;
  num_left_ = static_cast<int>(nodes_.size());
  num_idle_ = num_helpers_ = num_sent_for_ = num_skipped_ = 0;
  for (const std::unique_ptr<Node>& node : nodes_) {
    node->must_tell = node->is_listed = false;
    node->workers = 0;
    node->waits_for = node->spec->num_before;
    node->phase = Phase::kWaiting;
    if (node->waits_for > 0) continue;
    node->phase = Phase::kReady;
    List(node.get());
  }
}

void GraphRun::TakePart(const Drainer& worker, bool is_caller) noexcept {
  Lock lock(mutex_);
  if (!is_caller) {
    ++num_helpers_;
    num_sent_for_ = std::max(num_sent_for_ - 1, 0);
  }
  while (!IsOver() && !worker.IsWantedElsewhere()) {
    if (Node* const node = Pick()) {
      WorkOn(node, worker, &lock);
    } else if (!WaitForWork(is_caller, &lock)) {
      break;
    }
  }
  if (!is_caller) --num_helpers_;
  // Also where one leaves work behind for something more urgent.
  if (IsOver() || first_ != nullptr) WakeIdle();
}

void GraphRun::Finish() noexcept {
  for (const std::unique_ptr<Node>& node : nodes_) {
    if (std::exchange(node->must_tell, false)) node->launch->Done(false);
  }
}

// --- the list ----------------------------------------------------------------

void GraphRun::List(Node* node) noexcept {
  Node* before = last_;
  while (before != nullptr && before->spec->priority < node->spec->priority) {
    before = before->previous;
  }
  node->previous = before;
  node->next = before != nullptr ? before->next : first_;
  (node->next != nullptr ? node->next->previous : last_) = node;
  (before != nullptr ? before->next : first_) = node;
  node->is_listed = true;
}

void GraphRun::Unlist(Node* node) noexcept {
  (node->previous != nullptr ? node->previous->next : first_) = node->next;
  (node->next != nullptr ? node->next->previous : last_) = node->previous;
  node->is_listed = false;
}

GraphRun::Node* GraphRun::Pick() noexcept {
  Node* const node = first_;
  if (node == nullptr) return nullptr;
  ++node->workers;
  if (node->phase == Phase::kReady) {
    node->phase = Phase::kPreparing;
    Unlist(node);
  } else if (node->workers >= state_->participants ||
             node->workers >= node->num_threadgroups) {
    Unlist(node);
  }
  return node;
}

// --- work --------------------------------------------------------------------

void GraphRun::WorkOn(Node* node, const Drainer& worker, Lock* lock) noexcept {
  bool is_alone = false;
  Offer(lock);
  if (node->phase == Phase::kPreparing) {
    lock->unlock();
    if (!Prepare(node, worker.worker)) {
      Relock(lock);
      return;
    }
    is_alone = node->num_threadgroups <= 1 || state_->participants == 1;
    if (!is_alone) {
      Relock(lock);
      node->phase = Phase::kOpen;
      List(node);
      Offer(lock);
    }
  }
  if (lock->owns_lock()) lock->unlock();
  Drain(node, worker);
  // A node that nobody else could pick ends without asking for the lock first.
  const bool ends_alone = is_alone && !state_->WasCancelled();
  if (ends_alone) TellDone(node);
  Relock(lock);
  // Either empty or cancelled: nobody else has anything to do there.
  if (node->is_listed) Unlist(node);
  if (--node->workers > 0) return;
  if (ends_alone) {
    Complete(node);
  } else if (!is_alone && !state_->WasCancelled()) {
    lock->unlock();
    TellDone(node);
    Relock(lock);
    Complete(node);
  }
}

void GraphRun::Drain(Node* node, const Drainer& worker) noexcept {
  if (node->num_threadgroups == 0) return;
  Drainer drainer = worker;
  drainer.most_urgent = nullptr;  // leaves between nodes only
  drainer.grid = &node->grid;
  drainer.name = node->spec->name.c_str();
  if (!node->worker_seconds.empty()) {
    drainer.worker_seconds = node->worker_seconds;
  }
  GraphLaunch* const launch = node->launch.get();
  (void)engine_->Drain(
      &drainer, node->scratch_bytes,
      [launch](const Threadgroup& group) { launch->Run(group); }, &node->trace,
      [launch](const Threadgroup& group) { launch->RunTraced(group); });
}

// What it guards takes nanoseconds, less than sleeping does.
void GraphRun::Relock(Lock* lock) const noexcept {
  const bool is_locked = SpinUntil(engine_->helper_patience(),
                                   [lock] { return lock->try_lock(); });
  if (!is_locked) lock->lock();
}

// What the caller of this has picked is its own; the rest is for others. Those
// sent for are not sent for again with every node until they come; but now and
// then, since one whose thread has other duties never does.
void GraphRun::Offer(Lock* lock) noexcept {
  constexpr int kPatience = 16;
  const int joins = OfferListed();
  if (joins <= 0) return;
  if (joins <= num_sent_for_ && ++num_skipped_ % kPatience != 0) return;
  // Whoever is sending already sends for as many as there is room for.
  if (is_sending_.exchange(true, std::memory_order_acquire)) return;
  num_sent_for_ = joins;
  lock->unlock();
  engine_->Summon(state_, joins);
  is_sending_.store(false, std::memory_order_release);
  Relock(lock);
}

int GraphRun::OfferListed() noexcept {
  if (first_ == nullptr) return 0;
  const int most = state_->participants - 1;
  int64_t work = 0;
  for (const Node* node = first_; node != nullptr && work < most;
       node = node->next) {
    work += node->phase == Phase::kReady
                ? 1
                : node->num_threadgroups - node->workers;
  }
  WakeIdle();
  return static_cast<int>(
      std::min<int64_t>(work - num_idle_, most - num_helpers_));
}

bool GraphRun::Prepare(Node* node, int worker) noexcept {
  const auto fail = [&](StatusCode code, const char* verb,
                        std::string_view why) {
    try {
      state_->Fail(
          {code, StrCat("node \"", node->spec->name, "\"", verb, why)});
    } catch (...) {
      state_->Fail({code, why});
    }
  };
  // Host functions have no claims that would see it pass.
  if (state_->has_deadline()) {
    state_->CheckDeadline(LaunchState::Clock::now());
    if (state_->WasCancelled()) return false;
  }
  node->trace.tracer = nullptr;
  if (state_->trace.tracer != nullptr) {
    node->trace.Begin(state_->trace.tracer, node->spec->name);
  }
  try {
    const TraceScope scope(node->trace, worker);
    if (node->launch == nullptr) {
      fail(StatusCode::kInvalidArgument, ": ", "its maker made nothing");
      return false;
    }
    GraphGrid what;
    if (Status status = node->launch->Prepare(args_, &what); !status.ok()) {
      fail(status.code(), ": ", status.message());
      return false;
    }
    node->must_tell = true;
    LaunchOptions options;
    options.worker_seconds = what.worker_seconds;
    if (Status status = engine_->Validate(what.grid, options); !status.ok()) {
      fail(status.code(), ": ", status.message());
      return false;
    }
    node->grid.Reset(what.grid);
    node->num_threadgroups = what.grid.num_threadgroups;
    node->worker_seconds = what.worker_seconds;
    node->scratch_bytes = std::max(what.scratch_bytes, state_->scratch_bytes);
    return true;
  } catch (const std::exception& error) {
    fail(StatusCode::kAborted, " threw: ", error.what());
  } catch (...) {
    fail(StatusCode::kAborted,
         " threw: ", "something that is not a std::exception");
  }
  return false;
}

void GraphRun::TellDone(Node* node) noexcept {
  node->must_tell = false;
  if (node->trace.tracer != nullptr) node->trace.CountBandwidth();
  node->launch->Done(true);
}

void GraphRun::Complete(Node* node) noexcept {
  node->phase = Phase::kDone;
  --num_left_;
  for (const int32_t index : node->spec->successors) {
    Node* const next = nodes_[static_cast<size_t>(index)].get();
    if (--next->waits_for > 0) continue;
    next->phase = Phase::kReady;
    List(next);
  }
}

// --- waiting -----------------------------------------------------------------

void GraphRun::WakeIdle() noexcept {
  if (num_idle_ == 0) return;
  version_.fetch_add(1, std::memory_order_release);
  version_.notify_all();
}

// False for a helper that leaves.
bool GraphRun::WaitForWork(bool is_caller, Lock* lock) noexcept {
  ++num_idle_;
  const int seen = version_.load(std::memory_order_relaxed);
  lock->unlock();
  const auto is_news = [&] {
    return version_.load(std::memory_order_acquire) != seen;
  };
  SpinUntil(is_caller ? engine_->caller_patience() : engine_->helper_patience(),
            is_news);
  if (is_caller) version_.wait(seen, std::memory_order_acquire);
  Relock(lock);
  --num_idle_;
  return is_caller || is_news() || first_ != nullptr;
}

}  // namespace varlane
