// Which worker stands where: a pure function of topology and options.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_PLACEMENT_H_
#define VARLANE_RUNTIME_PLACEMENT_H_

#include <vector>

#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// More than any machine has hardware threads today.
inline constexpr int kMaxWorkers = 4096;

// A node here is what has an arena: a NUMA node; with NumaPolicy::kL3 the cores
// of one that share an L3; with kOff all cores. Workers are numbered node by
// node; worker 0 is the seat of the thread that calls Launch, all others are
// TBB's.
struct Placement {
  std::vector<int> pu_of_worker;  // [workers], OS index
  std::vector<int> first_worker;  // [nodes + 1]; node n has [n], ... [n + 1]
  std::vector<std::vector<int>> pus_of_node;  // every PU we may use there
  // [nodes]: whose memory they use, an index into Topology::nodes; -1 with
  // kOff.
  std::vector<int> memory_of_node;
  // [nodes][nodes]: all nodes as one sees them, itself first, nearest next;
  // those that are equally near in turn, so that not all go to the same.
  std::vector<std::vector<int>> nearest;

  int num_workers() const { return static_cast<int>(pu_of_worker.size()); }
  int num_nodes() const { return static_cast<int>(first_worker.size()) - 1; }
};

// One worker a core (a hardware thread with use_smt), or options.num_threads
// of them spread over the nodes by their number of cores, and over the cores
// of a node evenly, those of a faster kind first; more threads than cores share
// them in turn, SMT siblings first. With NumaPolicy::kAuto node n is
// topology.nodes[n]; with kL3 each of those has one for every L3 in it, and one
// for its cores without any. With fewer threads than nodes only num_threads
// nodes are used: the first of each NUMA node, then the second.
//
// Errors: kInvalidArgument for num_threads outside [0, kMaxWorkers], and for
//         kL3 where the topology shows no L3.
Result<Placement> PlaceWorkers(const Topology& topology,
                               const RuntimeOptions& options);

}  // namespace varlane

#endif  // VARLANE_RUNTIME_PLACEMENT_H_
