// LaunchGraph: launches, copies and host functions with their dependencies.
//
// Built once, run many times with new arguments by Runtime::Run. A node begins
// as soon as the nodes before it are done, so independent ones overlap and no
// worker waits at a barrier that nobody needs. Layer 1; docs/graphs.md.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_GRAPH_H_
#define VARLANE_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "varlane/export.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// A node of one graph; a value.
struct GraphNode {
  uint64_t graph = 0;  // LaunchGraph::id()
  int32_t index = -1;  // in order of adding
};

// What a launch node runs this time.
struct GraphGrid {
  Grid grid;  // node_begin must stay valid until the node is done
  size_t scratch_bytes = 0;               // per worker
  std::span<double> worker_seconds = {};  // as LaunchOptions'
};

// A launch node in one run. A graph makes one for each of its runs that
// overlap, and keeps them for later runs: what they hold is allocated once.
class VARLANE_EXPORT GraphLaunch {
 public:
  virtual ~GraphLaunch();

  // Called when all nodes before this one are done, on some worker: binds the
  // run's arguments and sizes the grid. What it returns or throws fails the
  // run. Zero threadgroups are a node that is done at once.
  virtual Status Prepare(void* args, GraphGrid* grid) = 0;
  // The body: called once for each index, from several workers.
  virtual void Run(const Threadgroup& group) = 0;
  // The same in a traced run: may annotate the slice.
  virtual void RunTraced(const Threadgroup& group);
  // Called once after each Prepare that returned OK, when no body runs any
  // more: `complete` when all did, else the run failed.
  virtual void Done(bool complete) noexcept;
};

// Bytes to copy from one place to another that does not overlap.
struct GraphCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};

// Threads: building belongs to one thread; a built graph is constant and may
//          be run from any, also several times at once.
// Errors:  Add* and AddDependency return kInvalidArgument for a node of another
//          graph, naming it, and kFailedPrecondition once built; the graph is
//          then as it was.
class VARLANE_EXPORT LaunchGraph {
 public:
  using After = std::span<const GraphNode>;
  using Body = std::function<void(const Threadgroup&, void* args)>;
  using MakeLaunch = std::function<std::unique_ptr<GraphLaunch>()>;

  LaunchGraph();
  ~LaunchGraph();  // requires: no run is under way
  LaunchGraph(LaunchGraph&&) noexcept;
  LaunchGraph& operator=(LaunchGraph&&) noexcept;

  // A launch whose grid is the same in every run.
  Result<GraphNode> AddLaunch(std::string name, int64_t num_threadgroups,
                              Body body, After after = {},
                              size_t scratch_bytes = 0);
  // A launch that sizes and binds itself anew in every run.
  Result<GraphNode> AddLaunch(std::string name, MakeLaunch make,
                              After after = {});
  // memcpy, shared out to the workers.
  Result<GraphNode> AddCopy(std::string name,
                            std::function<GraphCopy(void* args)> bind,
                            After after = {});
  // A function that runs once, on some worker; an error fails the run.
  Result<GraphNode> AddHost(std::string name,
                            std::function<Status(void* args)> function,
                            After after = {});
  // `node` waits for `before`, too.
  Status AddDependency(GraphNode before, GraphNode node);
  // Of the nodes that could begin, those of higher priority do; 0 by default.
  Status SetPriority(GraphNode node, int priority);

  // Ends building. Errors: kInvalidArgument naming the nodes of a cycle.
  Status Build();

  bool is_built() const noexcept;
  int num_nodes() const noexcept;
  uint64_t id() const noexcept;  // no other graph of the process has it
  std::string_view name(GraphNode node) const noexcept;  // "" for a foreign one

  class Impl;  // private to the library

 private:
  friend class Runtime;
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_GRAPH_H_
