// LaunchGraph's inside: the nodes, and the runs kept for later.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_LAUNCH_GRAPH_H_
#define VARLANE_RUNTIME_LAUNCH_GRAPH_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/graph_run.h"
#include "varlane/graph.h"

namespace varlane {

class LaunchGraph::Impl {
 public:
  Impl();

  // A run that nobody uses, for a runtime of as many NUMA nodes; throws what
  // making one throws. Requires: is_built.
  std::unique_ptr<GraphRun> Take(int num_numa_nodes);
  void Put(std::unique_ptr<GraphRun> run, int num_numa_nodes) noexcept;

  const uint64_t id;
  bool is_built = false;
  std::vector<GraphNodeSpec> specs;

 private:
  struct Idle {
    int num_numa_nodes;
    std::unique_ptr<GraphRun> run;
  };
  std::mutex mutex_;
  std::vector<Idle> idle_;  // guarded by mutex_
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_LAUNCH_GRAPH_H_
