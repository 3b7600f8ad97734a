// GraphRun: one run of a built graph, and who works on which node.
//
// Workers that take part in a run stay in it from node to node: whoever ends a
// node's last threadgroup starts those that waited for it, without sending for
// anybody who is there already. A worker that finds nothing to do spins for
// some microseconds and then leaves (a helper) or sleeps (the caller); work for
// more workers than are inside sends for others through the launch board. So,
// as with single launches, nobody waits for a thread to become free: only for
// bodies that run.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_GRAPH_RUN_H_
#define VARLANE_RUNTIME_GRAPH_RUN_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/drain.h"
#include "runtime/launch_state.h"
#include "varlane/graph.h"

namespace varlane {

class LaunchEngine;

// A node as it was added.
struct GraphNodeSpec {
  std::string name;
  LaunchGraph::MakeLaunch make;
  std::vector<int32_t> successors;  // none twice
  int num_before = 0;
  int priority = 0;
};

class GraphRun {
 public:
  // `specs` must outlive it. Throws what the specs' makers throw.
  GraphRun(const std::vector<GraphNodeSpec>& specs, int num_numa_nodes);
  ~GraphRun();
  GraphRun(const GraphRun&) = delete;
  GraphRun& operator=(const GraphRun&) = delete;

  // The nodes' arguments, before the engine runs it.
  void SetArgs(void* args) noexcept { args_ = args; }

  // --- for LaunchEngine ------------------------------------------------------

  void Start(LaunchEngine* engine, LaunchState* state) noexcept;
  // Works on nodes until the run is over or, for a helper, nothing is to do.
  void TakePart(const Drainer& worker, bool is_caller) noexcept;
  // Requires: nobody takes part any more. Tells nodes that did not end.
  void Finish() noexcept;

 private:
  enum class Phase : uint8_t { kWaiting, kReady, kPreparing, kOpen, kDone };
  struct Node {
    Node(const GraphNodeSpec& node_spec, int num_numa_nodes)
        : spec(&node_spec), launch(node_spec.make()), grid(num_numa_nodes) {}

    const GraphNodeSpec* spec;
    std::unique_ptr<GraphLaunch> launch;
    // Written by whoever prepares the node, before others can pick it.
    SharedGrid grid;
    int64_t num_threadgroups = 0;
    size_t scratch_bytes = 0;
    std::span<double> worker_seconds;
    LaunchTrace trace;
    bool must_tell = false;  // Prepare went well, Done was not called
    // Guarded by mutex_.
    Phase phase = Phase::kWaiting;
    bool is_listed = false;
    int waits_for = 0;  // nodes before it that are not done
    int workers = 0;    // that are at it
    Node* next = nullptr;
    Node* previous = nullptr;
  };

  // These require mutex_.
  void List(Node* node) noexcept;
  void Unlist(Node* node) noexcept;
  Node* Pick() noexcept;  // the first listed one; null when there is none
  bool IsOver() noexcept { return num_left_ == 0 || state_->IsCancelled(); }
  void WakeIdle() noexcept;
  // Wakes who is idle where nodes are listed; how many more could help.
  int OfferListed() noexcept;

  void Complete(Node* node) noexcept;

  // These require mutex_, too, which they give up for a while.
  using Lock = std::unique_lock<std::mutex>;
  void WorkOn(Node* node, const Drainer& worker, Lock* lock) noexcept;
  void Offer(Lock* lock) noexcept;
  bool WaitForWork(bool is_caller, Lock* lock) noexcept;

  // These require that it is not held.
  void Relock(Lock* lock) const noexcept;
  bool Prepare(Node* node, int worker) noexcept;
  void Drain(Node* node, const Drainer& worker) noexcept;
  static void TellDone(Node* node) noexcept;

  std::vector<std::unique_ptr<Node>> nodes_;
  void* args_ = nullptr;
  LaunchEngine* engine_ = nullptr;
  LaunchState* state_ = nullptr;

  std::mutex mutex_;
  // Guarded by mutex_.
  Node* first_ = nullptr;  // nodes that anybody may pick, by priority and age
  Node* last_ = nullptr;
  int num_left_ = 0;      // nodes not done
  int num_idle_ = 0;      // participants that wait for work
  int num_helpers_ = 0;   // inside
  int num_sent_for_ = 0;  // and on their way, as far as we know
  int num_skipped_ = 0;   // times that was enough

  std::atomic<bool> is_sending_ = false;
  // Changes whenever idle participants should look again.
  alignas(64) std::atomic<int> version_ = 0;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_GRAPH_RUN_H_
