// SPDX-License-Identifier: Apache-2.0

#include "runtime/placement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/strings.h"

namespace varlane {
namespace {

// The hardware threads of one node in the order workers take them.
struct NodePus {
  int memory = -1;             // index into Topology::nodes
  std::vector<int> pus;        // first threads of the cores, then siblings
  std::vector<int64_t> kinds;  // how many of the cores are of each speed
  int64_t num_cores = 0;       // how many of `pus` are first threads
  int64_t capacity = 0;        // workers it has room for without sharing
  int64_t num_workers = 0;     // workers it was given
};

NodePus CollectPus(const Topology& topology, const std::vector<int>& cores,
                   bool use_smt) {
  std::vector<const Core*> fastest_first;
  size_t widest = 0;
  for (const int core : cores) {
    fastest_first.push_back(&topology.cores[static_cast<size_t>(core)]);
    widest = std::max(widest, fastest_first.back()->pus.size());
  }
  std::stable_sort(
      fastest_first.begin(), fastest_first.end(),
      [](const Core* a, const Core* b) { return a->speed > b->speed; });
  NodePus node;
  const Core* before = nullptr;
  for (const Core* const core : fastest_first) {
    const bool is_new = before == nullptr || before->speed != core->speed;
    if (is_new) node.kinds.push_back(0);
    ++node.kinds.back();
    before = core;
  }
  for (size_t sibling = 0; sibling < widest; ++sibling) {
    for (const Core* const core : fastest_first) {
      if (sibling < core->pus.size()) node.pus.push_back(core->pus[sibling]);
    }
  }
  node.num_cores = static_cast<int64_t>(cores.size());
  node.capacity =
      use_smt ? static_cast<int64_t>(node.pus.size()) : node.num_cores;
  return node;
}

// The cores of each L3, then those without.
std::vector<std::vector<int>> SplitByL3(const Topology& topology,
                                        const std::vector<int>& cores) {
  std::map<size_t, std::vector<int>> groups;
  for (const int core : cores) {
    const int l3 = topology.cores[static_cast<size_t>(core)].l3;
    // -1 becomes the greatest.
    groups[static_cast<size_t>(l3)].push_back(core);
  }
  std::vector<std::vector<int>> split;
  for (auto& [l3, group] : groups) split.push_back(std::move(group));
  return split;
}

std::vector<NodePus> CollectNodes(const Topology& topology,
                                  const RuntimeOptions& options) {
  std::vector<NodePus> nodes;
  if (options.numa == NumaPolicy::kOff) {
    std::vector<int> all;
    for (size_t i = 0; i < topology.cores.size(); ++i) {
      all.push_back(static_cast<int>(i));
    }
    nodes.push_back(CollectPus(topology, all, options.use_smt));
    return nodes;
  }
  for (size_t i = 0; i < topology.nodes.size(); ++i) {
    const std::vector<int>& cores = topology.nodes[i].cores;
    if (cores.empty()) break;  // those with cores come first
    std::vector<std::vector<int>> groups = {cores};
    if (options.numa == NumaPolicy::kL3) groups = SplitByL3(topology, cores);
    for (const std::vector<int>& group : groups) {
      nodes.push_back(CollectPus(topology, group, options.use_smt));
      nodes.back().memory = static_cast<int>(i);
    }
  }
  return nodes;
}

// As many as there are workers, of all NUMA nodes alike; in their order.
void KeepSome(int num_workers, std::vector<NodePus>* nodes) {
  if (num_workers >= static_cast<int>(nodes->size())) return;
  std::map<int, int> seen;                   // of each NUMA node
  std::vector<std::pair<int, size_t>> kept;  // rank in its NUMA node, index
  for (size_t i = 0; i < nodes->size(); ++i) {
    kept.emplace_back(seen[(*nodes)[i].memory]++, i);
  }
  std::sort(kept.begin(), kept.end());
  kept.resize(static_cast<size_t>(num_workers));
  std::sort(kept.begin(), kept.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<NodePus> some;
  for (const auto& [rank, i] : kept) some.push_back(std::move((*nodes)[i]));
  *nodes = std::move(some);
}

// Every node one worker, then each next to the node that is least full.
void Distribute(int num_workers, std::vector<NodePus>* nodes) {
  for (NodePus& node : *nodes) node.num_workers = 1;
  for (auto i = static_cast<int>(nodes->size()); i < num_workers; ++i) {
    const auto least_full = std::min_element(
        nodes->begin(), nodes->end(), [](const NodePus& a, const NodePus& b) {
          return a.num_workers * b.capacity < b.num_workers * a.capacity;
        });
    ++least_full->num_workers;
  }
}

// The PU of a node's i-th worker. Fewer workers than cores of a kind are spread
// over them, for the caches they do not share.
int PuOf(const NodePus& node, int64_t i) {
  int64_t first = 0;  // core of the kind
  int64_t left = node.num_workers;
  for (const int64_t cores : node.kinds) {
    const int64_t taken = std::min(left, cores);
    if (i < taken) {
      return node.pus[static_cast<size_t>(first + i * cores / taken)];
    }
    i -= taken;
    left -= taken;
    first += cores;
  }
  // More workers than cores.
  const auto index = static_cast<size_t>(first + i) % node.pus.size();
  return node.pus[index];
}

// `memory_of_node`: see Placement.
std::vector<std::vector<int>> OrderByDistance(
    const Topology& topology, const std::vector<int>& memory_of_node) {
  const auto num_nodes = static_cast<int>(memory_of_node.size());
  const auto memory = [&](int node) {
    return static_cast<size_t>(memory_of_node[static_cast<size_t>(node)]);
  };
  std::vector<std::vector<int>> nearest;
  for (int own = 0; own < num_nodes; ++own) {
    std::vector<int>& order = nearest.emplace_back();
    for (int i = 0; i < num_nodes; ++i) order.push_back((own + i) % num_nodes);
    const auto distance = [&](int other) {
      if (memory(other) == memory(own)) return 0;
      if (topology.distances.empty()) return 1;
      return topology
          .distances[memory(own) * topology.nodes.size() + memory(other)];
    };
    std::stable_sort(order.begin() + 1, order.end(),
                     [&](int a, int b) { return distance(a) < distance(b); });
  }
  return nearest;
}

}  // namespace

Result<Placement> PlaceWorkers(const Topology& topology,
                               const RuntimeOptions& options) {
  VARLANE_REQUIRE_ARG(
      options.num_threads >= 0 && options.num_threads <= kMaxWorkers,
      "num_threads = ", options.num_threads, ", must be in [0, ", kMaxWorkers,
      "]");
  std::vector<NodePus> nodes = CollectNodes(topology, options);
  VARLANE_REQUIRE_ARG(!nodes.empty(), "the topology of ", topology.source,
                      " has no cores");
  VARLANE_REQUIRE_ARG(options.numa != NumaPolicy::kL3 || !topology.l3.empty(),
                      "numa = l3, but the topology of ", topology.source,
                      " shows no L3 cache");
  int64_t capacity = 0;
  for (const NodePus& node : nodes) capacity += node.capacity;
  const int num_workers =
      options.num_threads > 0
          ? options.num_threads
          : static_cast<int>(std::min<int64_t>(capacity, kMaxWorkers));
  KeepSome(num_workers, &nodes);
  Distribute(num_workers, &nodes);

  Placement placement;
  placement.first_worker.push_back(0);
  for (NodePus& node : nodes) {
    for (int64_t i = 0; i < node.num_workers; ++i) {
      placement.pu_of_worker.push_back(PuOf(node, i));
    }
    placement.first_worker.push_back(placement.num_workers());
    placement.pus_of_node.push_back(std::move(node.pus));
    placement.memory_of_node.push_back(node.memory);
  }
  placement.nearest = OrderByDistance(topology, placement.memory_of_node);
  return placement;
}

}  // namespace varlane
