// Topology::Detect: from hwloc's tree to our few vectors.
//
// SPDX-License-Identifier: Apache-2.0

#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/strings.h"
#include "runtime/affinity.h"
#include "runtime/kernel_nodes.h"
#include "runtime/page_sizes.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

struct FreeTopology {
  void operator()(hwloc_topology_t tree) const { hwloc_topology_destroy(tree); }
};
using Tree = std::unique_ptr<hwloc_topology, FreeTopology>;

struct FreeBitmap {
  void operator()(hwloc_bitmap_t set) const { hwloc_bitmap_free(set); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

// "this machine", "xml:FILE" or "synthetic:STRING", by what `text` looks like.
// A file that exists is a file; a name that can only be one is not guessed at.
Result<std::string> SourceOf(const std::string& text) {
  if (text.empty()) return std::string("this machine");
  std::error_code error;
  if (std::filesystem::exists(text, error)) return "xml:" + text;
  if (text.ends_with(".xml") || text.find('/') != std::string::npos) {
    return Status(StatusCode::kNotFound,
                  StrCat("topology = \"", text, "\": no such file"));
  }
  return "synthetic:" + text;
}

Status Choose(hwloc_topology_t tree, const std::string& source,
              const std::string& text) {
  if (source.starts_with("xml:") &&
      hwloc_topology_set_xml(tree, text.c_str()) != 0) {
    return {StatusCode::kNotFound,
            StrCat("topology = \"", text, "\": hwloc cannot read this file (",
                   ErrnoText(errno), ")")};
  }
  if (source.starts_with("synthetic:") &&
      hwloc_topology_set_synthetic(tree, text.c_str()) != 0) {
    return {StatusCode::kInvalidArgument,
            StrCat("topology = \"", text,
                   "\" is neither a file nor a synthetic description such as "
                   "\"numa:2 core:4 pu:1\"")};
  }
  return {};
}

Result<Tree> Load(const std::string& source, const std::string& text) {
  hwloc_topology_t raw = nullptr;
  VARLANE_REQUIRE(hwloc_topology_init(&raw) == 0, StatusCode::kUnavailable,
                  "hwloc_topology_init: ", ErrnoText(errno));
  Tree tree(raw);
  VARLANE_RETURN_IF_ERROR(Choose(raw, source, text));
  if (hwloc_topology_load(raw) != 0) {
    const int error = errno;
    // A file may open and still not be a topology.
    const bool ours = text.empty();
    return Status(
        ours ? StatusCode::kUnavailable : StatusCode::kInvalidArgument,
        StrCat("hwloc cannot load the topology of ", source, ": ",
               ErrnoText(error)));
  }
  return tree;
}

// One pass over one hwloc tree; fills the public value.
class Reader {
 public:
  Reader(hwloc_topology_t tree, Topology* out) : tree_(tree), out_(out) {}

  // `cpus`: RuntimeOptions::cpus.
  Status Read(const std::string& cpus) {
    VARLANE_RETURN_IF_ERROR(ReadAllowed());
    if (!cpus.empty()) VARLANE_RETURN_IF_ERROR(KeepOnly(cpus));
    ReadNodes();
    ReadDistances();
    ReadCores();
    VARLANE_REQUIRE(!out_->cores.empty(), StatusCode::kUnavailable,
                    "the topology of ", out_->source,
                    " has no CPU that we may run on");
    OrderByNode();
    ReadPages();
    return {};
  }

 private:
  void Warn(std::string text) { out_->warnings.push_back(std::move(text)); }

  // What cpuset and affinity leave us. hwloc drops what the cpuset forbids
  // while loading; the calling thread's affinity is ours to apply.
  Status ReadAllowed() {
    allowed_.reset(hwloc_bitmap_dup(hwloc_topology_get_topology_cpuset(tree_)));
    const Bitmap bound(hwloc_bitmap_alloc());
    VARLANE_REQUIRE(allowed_ && bound, StatusCode::kResourceExhausted,
                    "no memory for a CPU set");
    out_->is_this_machine = hwloc_topology_is_thissystem(tree_) != 0;
    if (out_->is_this_machine) {
      if (hwloc_get_cpubind(tree_, bound.get(), HWLOC_CPUBIND_THREAD) == 0) {
        hwloc_bitmap_and(allowed_.get(), allowed_.get(), bound.get());
      } else {
        Warn(StrCat("the affinity mask is unknown: ", ErrnoText(errno)));
      }
    }
    out_->num_pus = hwloc_bitmap_weight(allowed_.get());
    out_->num_pus_machine =
        hwloc_bitmap_weight(hwloc_topology_get_complete_cpuset(tree_));
    return {};
  }

  Status KeepOnly(const std::string& cpus) {
    CpuMask wanted;
    VARLANE_RETURN_IF_ERROR(CpuMask::Parse(cpus, &wanted));
    const Bitmap kept(hwloc_bitmap_alloc());
    VARLANE_REQUIRE(kept, StatusCode::kResourceExhausted,
                    "no memory for a CPU set");
    for (int cpu = 0; cpu < CpuMask::kMaxCpus; ++cpu) {
      if (!wanted.Has(cpu)) continue;
      const auto index = static_cast<unsigned>(cpu);
      VARLANE_REQUIRE_ARG(hwloc_bitmap_isset(allowed_.get(), index) != 0,
                          "cpus = \"", cpus, "\": CPU ", cpu,
                          " is none that we may run on");
      hwloc_bitmap_set(kept.get(), index);
    }
    hwloc_bitmap_copy(allowed_.get(), kept.get());
    out_->num_pus = hwloc_bitmap_weight(allowed_.get());
    return {};
  }

  void ReadNodes() {
    const int count = hwloc_get_nbobjs_by_type(tree_, HWLOC_OBJ_NUMANODE);
    for (int i = 0; i < count; ++i) {
      const hwloc_obj_t object = hwloc_get_obj_by_type(
          tree_, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
      node_objects_.push_back(object);
      out_->nodes.push_back({.os_index = static_cast<int>(object->os_index),
                             .memory_bytes = static_cast<int64_t>(
                                 object->attr->numanode.local_memory),
                             .cores = {}});
    }
    if (out_->nodes.empty()) {
      Warn("no NUMA node was found: all CPUs are taken as one node");
      out_->nodes.emplace_back();
    }
    if (out_->is_this_machine) {
      CompareWithKernelsNodes(kKernelsNodes, count, &out_->warnings);
    }
  }

  // In the order of node_objects_; OrderByNode puts them in ours.
  void ReadDistances() {
    const size_t count = node_objects_.size();
    unsigned found = 1;
    hwloc_distances_s* distances = nullptr;
    if (count < 2) return;
    if (hwloc_distances_get_by_type(
            tree_, HWLOC_OBJ_NUMANODE, &found, &distances,
            HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) != 0 ||
        found == 0) {
      if (out_->is_this_machine) Warn("the distances of nodes are unknown");
      return;
    }
    if (distances->nbobjs == count) {
      out_->distances.resize(count * count);
      for (size_t i = 0; i < count * count; ++i) {
        const size_t from = IndexOfNode(distances->objs[i / count]);
        const size_t to = IndexOfNode(distances->objs[i % count]);
        out_->distances[from * count + to] =
            static_cast<int>(distances->values[i]);
      }
    }
    hwloc_distances_release(tree_, distances);
  }

  size_t IndexOfNode(hwloc_obj_t node) const {
    return static_cast<size_t>(
        std::find(node_objects_.begin(), node_objects_.end(), node) -
        node_objects_.begin());
  }

  void ReadCores() {
    hwloc_obj_type_t type = HWLOC_OBJ_CORE;
    if (hwloc_get_nbobjs_by_type(tree_, type) <= 0) {
      Warn("no cores were found: every hardware thread is taken as a core");
      type = HWLOC_OBJ_PU;
    }
    const int count = hwloc_get_nbobjs_by_type(tree_, type);
    for (int i = 0; i < count; ++i) {
      AddCore(hwloc_get_obj_by_type(tree_, type, static_cast<unsigned>(i)));
    }
    out_->num_packages = static_cast<int>(
        std::max<size_t>(packages_.size(), out_->cores.empty() ? 0 : 1));
    if (packages_.empty()) Warn("no package was found: one is assumed");
    if (out_->l3.empty()) Warn("no L3 cache was found");
    if (out_->l2.empty()) Warn("no L2 cache was found");
    if (num_homeless_ > 0) {
      Warn(StrCat(num_homeless_,
                  " cores have no NUMA node of their own that "
                  "we may allocate from; they use node ",
                  out_->nodes[0].os_index));
    }
  }

  void AddCore(hwloc_obj_t object) {
    Core core;
    unsigned pu = 0;
    hwloc_bitmap_foreach_begin(
        pu, object->cpuset) if (hwloc_bitmap_isset(allowed_.get(), pu)) {
      core.pus.push_back(static_cast<int>(pu));
    }
    hwloc_bitmap_foreach_end();
    if (core.pus.empty()) return;
    const hwloc_obj_t package =
        hwloc_get_ancestor_obj_by_type(tree_, HWLOC_OBJ_PACKAGE, object);
    if (package != nullptr) {
      core.package = packages_
                         .emplace(package->logical_index,
                                  static_cast<int>(packages_.size()))
                         .first->second;
    }
    core.speed = SpeedOf(object);
    core.node = NodeOf(object);
    core.l3 = CacheOf(object, HWLOC_OBJ_L3CACHE, 3, &out_->l3, &l3_);
    core.l2 = CacheOf(object, HWLOC_OBJ_L2CACHE, 2, &out_->l2, &l2_);
    out_->cores.push_back(std::move(core));
  }

  // The node a first touch from this core takes memory from: its own, or where
  // that has none, the nearest that has.
  int NodeOf(hwloc_obj_t core) {
    const int own = NodeThatHolds(core);
    if (node_objects_.empty()) return own;
    const auto has_memory = [&](int node) {
      return out_->nodes[static_cast<size_t>(node)].memory_bytes > 0;
    };
    if (has_memory(own)) return own;
    int nearest = -1;
    for (int node = 0; node < static_cast<int>(out_->nodes.size()); ++node) {
      if (!has_memory(node)) continue;
      if (nearest < 0 || KeyOf(own, node, core) < KeyOf(own, nearest, core)) {
        nearest = node;
      }
    }
    if (nearest < 0) return own;  // a description that tells of no memory
    if (without_memory_.insert(own).second) {
      const auto index = [&](int node) {
        return out_->nodes[static_cast<size_t>(node)].os_index;
      };
      Warn(StrCat("node ", index(own), " has no memory: its cores use node ",
                  index(nearest)));
    }
    return nearest;
  }

  // By which nodes are near to one: distance, then whether they hold the core
  // at all, then number.
  std::tuple<int, bool, int> KeyOf(int from, int node, hwloc_obj_t core) const {
    const auto at = static_cast<size_t>(node);
    const int distance =
        out_->distances.empty()
            ? 0
            : out_->distances[static_cast<size_t>(from) * out_->nodes.size() +
                              at];
    return {
        distance,
        hwloc_bitmap_intersects(node_objects_[at]->cpuset, core->cpuset) == 0,
        out_->nodes[at].os_index};
  }

  // Of those that hold the core, the one with the fewest CPUs and then the
  // lowest index. (Linux numbers nodes with CPUs before HBM, CXL and GPU
  // memory.)
  int NodeThatHolds(hwloc_obj_t core) {
    int best = -1;
    int best_weight = std::numeric_limits<int>::max();
    for (size_t i = 0; i < node_objects_.size(); ++i) {
      const hwloc_obj_t node = node_objects_[i];
      if (!hwloc_bitmap_intersects(node->cpuset, core->cpuset)) continue;
      const int weight = hwloc_bitmap_weight(node->cpuset);
      const bool lower = best >= 0 && weight == best_weight &&
                         out_->nodes[i].os_index <
                             out_->nodes[static_cast<size_t>(best)].os_index;
      if (weight < best_weight || lower) {
        best = static_cast<int>(i);
        best_weight = weight;
      }
    }
    if (best < 0 && !node_objects_.empty()) ++num_homeless_;
    return std::max(best, 0);
  }

  // hwloc numbers kinds of cores from the slowest on; where it cannot tell them
  // apart there is one, or they have no rank.
  int SpeedOf(hwloc_obj_t core) const {
    const int kind = hwloc_cpukinds_get_by_cpuset(tree_, core->cpuset, 0);
    int rank = 0;
    if (kind < 0 ||
        hwloc_cpukinds_get_info(tree_, static_cast<unsigned>(kind), nullptr,
                                &rank, nullptr, nullptr, 0) != 0) {
      return 0;
    }
    return std::max(rank, 0);
  }

  int CacheOf(hwloc_obj_t core, hwloc_obj_type_t type, int level,
              std::vector<Cache>* caches, std::map<unsigned, int>* seen) {
    const hwloc_obj_t object =
        hwloc_get_ancestor_obj_by_type(tree_, type, core);
    if (object == nullptr) return -1;
    const auto [it, is_new] =
        seen->emplace(object->logical_index, static_cast<int>(caches->size()));
    if (is_new) {
      const auto bytes = static_cast<int64_t>(object->attr->cache.size);
      if (bytes == 0) Warn(StrCat("the size of an L", level, " is unknown"));
      caches->push_back({.level = level, .size_bytes = bytes, .cores = {}});
    }
    return it->second;
  }

  // Nodes with cores come first (so that arena i is nodes[i]), cores in node
  // order; then the vectors that point back at cores can be filled.
  void OrderByNode() {
    std::set<int> used;
    for (const Core& core : out_->cores) used.insert(core.node);
    std::vector<int> order;
    for (int i = 0; i < static_cast<int>(out_->nodes.size()); ++i) {
      order.push_back(i);
    }
    const auto key = [&](int i) {
      return std::pair(!used.contains(i),
                       out_->nodes[static_cast<size_t>(i)].os_index);
    };
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return key(a) < key(b); });
    std::vector<NumaNode> nodes;
    std::vector<int> new_index(order.size());
    for (const int old : order) {
      new_index[static_cast<size_t>(old)] = static_cast<int>(nodes.size());
      nodes.push_back(std::move(out_->nodes[static_cast<size_t>(old)]));
    }
    out_->nodes = std::move(nodes);
    OrderDistances(order);
    for (Core& core : out_->cores) {
      core.node = new_index[static_cast<size_t>(core.node)];
    }
    std::stable_sort(
        out_->cores.begin(), out_->cores.end(),
        [](const Core& a, const Core& b) { return a.node < b.node; });
    for (int i = 0; i < static_cast<int>(out_->cores.size()); ++i) {
      const Core& core = out_->cores[static_cast<size_t>(i)];
      out_->nodes[static_cast<size_t>(core.node)].cores.push_back(i);
      if (core.l3 >= 0) {
        out_->l3[static_cast<size_t>(core.l3)].cores.push_back(i);
      }
      if (core.l2 >= 0) {
        out_->l2[static_cast<size_t>(core.l2)].cores.push_back(i);
      }
    }
  }

  void OrderDistances(const std::vector<int>& order) {
    if (out_->distances.empty()) return;
    const std::vector<int> before = std::move(out_->distances);
    out_->distances.clear();
    for (const int from : order) {
      for (const int to : order) {
        out_->distances.push_back(
            before[static_cast<size_t>(from) * order.size() +
                   static_cast<size_t>(to)]);
      }
    }
  }

  void ReadPages() {
    if (out_->is_this_machine) {
      out_->page_sizes = DetectPageSizes(&out_->warnings);
      out_->transparent_huge_pages =
          DetectTransparentHugePages(&out_->warnings);
      return;
    }
    // A described machine tells its page sizes at most; smallest is the base.
    std::map<int64_t, int64_t> pools;
    for (const hwloc_obj_t node : node_objects_) {
      for (unsigned i = 0; i < node->attr->numanode.page_types_len; ++i) {
        const auto& page = node->attr->numanode.page_types[i];
        pools[static_cast<int64_t>(page.size)] +=
            static_cast<int64_t>(page.count);
      }
    }
    for (const auto& [bytes, total] : pools) {
      const bool is_base = out_->page_sizes.empty();
      out_->page_sizes.push_back(
          {.bytes = bytes, .total = is_base ? 0 : total, .free = 0});
    }
    if (out_->page_sizes.empty()) {
      Warn("the topology does not describe page sizes");
    }
  }

  hwloc_topology_t tree_;
  Topology* out_;
  Bitmap allowed_;
  std::vector<hwloc_obj_t> node_objects_;  // parallel to out_->nodes
  std::map<unsigned, int> packages_;       // logical index -> ours
  std::map<unsigned, int> l3_;
  std::map<unsigned, int> l2_;
  std::set<int> without_memory_;  // nodes with cores; warned of
  int num_homeless_ = 0;
};

Result<Topology> DetectOrThrow(const RuntimeOptions& options) {
  Result<std::string> source = SourceOf(options.topology);
  VARLANE_RETURN_IF_ERROR(source.status());
  Result<Tree> tree = Load(*source, options.topology);
  VARLANE_RETURN_IF_ERROR(tree.status());
  Topology topology;
  topology.source = *source;
  VARLANE_RETURN_IF_ERROR(Reader(tree->get(), &topology).Read(options.cpus));
  return topology;
}

}  // namespace

Result<Topology> Topology::Detect(const RuntimeOptions& options) {
  try {
    return DetectOrThrow(options);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted,
                  "no memory to describe the topology");
  }
}

}  // namespace varlane
