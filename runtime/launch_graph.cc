// Building graphs: varlane/graph.h.
//
// SPDX-License-Identifier: Apache-2.0

#include "runtime/launch_graph.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/strings.h"

namespace varlane {
namespace {

// A copy's threadgroup: large enough to be worth a claim, small enough to
// share out what is worth sharing.
constexpr int64_t kCopyBytes = int64_t{256} << 10;

class FixedLaunch final : public GraphLaunch {
 public:
  FixedLaunch(int64_t num_threadgroups, size_t scratch_bytes,
              std::shared_ptr<const LaunchGraph::Body> body)
      : num_threadgroups_(num_threadgroups),
        scratch_bytes_(scratch_bytes),
        body_(std::move(body)) {}

  Status Prepare(void* args, GraphGrid* grid) override {
    args_ = args;
    *grid = {.grid = {num_threadgroups_}, .scratch_bytes = scratch_bytes_};
    return {};
  }
  void Run(const Threadgroup& group) override { (*body_)(group, args_); }

 private:
  int64_t num_threadgroups_;
  size_t scratch_bytes_;
  std::shared_ptr<const LaunchGraph::Body> body_;
  void* args_ = nullptr;
};

class CopyLaunch final : public GraphLaunch {
 public:
  using Bind = std::function<GraphCopy(void* args)>;
  explicit CopyLaunch(std::shared_ptr<const Bind> bind)
      : bind_(std::move(bind)) {}

  Status Prepare(void* args, GraphGrid* grid) override {
    copy_ = (*bind_)(args);
    VARLANE_REQUIRE_ARG(copy_.bytes >= 0, "bytes = ", copy_.bytes,
                        ", must not be negative");
    VARLANE_REQUIRE_ARG(
        copy_.bytes == 0 || (copy_.to != nullptr && copy_.from != nullptr),
        copy_.to == nullptr ? "to" : "from", " is null");
    grid->grid.num_threadgroups = DivCeil(copy_.bytes, kCopyBytes);
    return {};
  }
  void Run(const Threadgroup& group) override {
    const int64_t begin = group.index() * kCopyBytes;
    const int64_t bytes = std::min(kCopyBytes, copy_.bytes - begin);
    std::memcpy(static_cast<std::byte*>(copy_.to) + begin,
                static_cast<const std::byte*>(copy_.from) + begin,
                static_cast<size_t>(bytes));
  }

 private:
  std::shared_ptr<const Bind> bind_;
  GraphCopy copy_;
};

class HostCall final : public GraphLaunch {
 public:
  using Function = std::function<Status(void* args)>;
  explicit HostCall(std::shared_ptr<const Function> function)
      : function_(std::move(function)) {}

  Status Prepare(void* args, GraphGrid*) override { return (*function_)(args); }
  void Run(const Threadgroup&) override {}

 private:
  std::shared_ptr<const Function> function_;
};

// Visits nodes depth first; finds the first cycle.
class CycleFinder {
 public:
  explicit CycleFinder(const std::vector<GraphNodeSpec>& specs)
      : specs_(specs), marks_(specs.size()) {}

  // "a" -> "b" -> "a", or nothing.
  std::string Find() {
    for (size_t root = 0; root < specs_.size(); ++root) {
      if (marks_[root] != Mark::kNew) continue;
      path_.assign(1, {static_cast<int32_t>(root), 0});
      marks_[root] = Mark::kOnPath;
      while (!path_.empty()) {
        const int32_t closes = Step();
        if (closes >= 0) return Cycle(closes);
      }
    }
    return {};
  }

 private:
  enum class Mark : uint8_t { kNew, kOnPath, kDone };
  struct Visit {
    int32_t node;
    size_t next;  // successor to look at
  };

  // One edge on; the node that a cycle comes back to, or -1.
  int32_t Step() {
    Visit& at = path_.back();
    const std::vector<int32_t>& next =
        specs_[static_cast<size_t>(at.node)].successors;
    if (at.next == next.size()) {
      marks_[static_cast<size_t>(at.node)] = Mark::kDone;
      path_.pop_back();
      return -1;
    }
    const int32_t to = next[at.next++];
    Mark& mark = marks_[static_cast<size_t>(to)];
    if (mark == Mark::kOnPath) return to;
    if (mark == Mark::kDone) return -1;
    mark = Mark::kOnPath;
    path_.push_back({to, 0});
    return -1;
  }

  std::string Cycle(int32_t from) const {
    std::string text;
    bool is_in = false;
    for (const Visit& visit : path_) {
      is_in = is_in || visit.node == from;
      if (is_in) text += StrCat("\"", Name(visit.node), "\" -> ");
    }
    return text + StrCat("\"", Name(from), "\"");
  }
  const std::string& Name(int32_t node) const {
    return specs_[static_cast<size_t>(node)].name;
  }

  const std::vector<GraphNodeSpec>& specs_;
  std::vector<Mark> marks_;
  std::vector<Visit> path_;
};

Status CheckNode(const LaunchGraph::Impl& impl, GraphNode node,
                 const std::string& what) {
  VARLANE_REQUIRE_ARG(node.graph == impl.id, what, " is node ", node.index,
                      " of ", node.graph == 0 ? "no graph" : "another graph",
                      ", not of this one");
  VARLANE_REQUIRE_ARG(
      node.index >= 0 && std::cmp_less(node.index, impl.specs.size()), what,
      " is node ", node.index, ", but the graph has ", impl.specs.size());
  return {};
}

Status CheckOpen(const LaunchGraph::Impl& impl) {
  VARLANE_REQUIRE(!impl.is_built, StatusCode::kFailedPrecondition,
                  "the graph is built and can no longer change");
  return {};
}

void Connect(LaunchGraph::Impl* impl, int32_t before, int32_t node) {
  std::vector<int32_t>& next =
      impl->specs[static_cast<size_t>(before)].successors;
  if (std::find(next.begin(), next.end(), node) != next.end()) return;
  next.push_back(node);
  ++impl->specs[static_cast<size_t>(node)].num_before;
}

}  // namespace

GraphLaunch::~GraphLaunch() = default;
void GraphLaunch::RunTraced(const Threadgroup& group) { Run(group); }
void GraphLaunch::Done(bool /*complete*/) noexcept {}

LaunchGraph::Impl::Impl()
    : id([] {
        static std::atomic<uint64_t> next = 1;
        return next.fetch_add(1, std::memory_order_relaxed);
      }()) {}

std::unique_ptr<GraphRun> LaunchGraph::Impl::Take(int num_numa_nodes) {
  {
    const std::lock_guard lock(mutex_);
    for (Idle& idle : idle_) {
      if (idle.num_numa_nodes != num_numa_nodes) continue;
      std::swap(idle, idle_.back());
      std::unique_ptr<GraphRun> run = std::move(idle_.back().run);
      idle_.pop_back();
      return run;
    }
  }
  return std::make_unique<GraphRun>(specs, num_numa_nodes);
}

void LaunchGraph::Impl::Put(std::unique_ptr<GraphRun> run,
                            int num_numa_nodes) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    idle_.push_back({num_numa_nodes, std::move(run)});
  } catch (const std::bad_alloc&) {
    // Then the next run makes its own.
  }
}

LaunchGraph::LaunchGraph() : impl_(std::make_unique<Impl>()) {}
LaunchGraph::~LaunchGraph() = default;
LaunchGraph::LaunchGraph(LaunchGraph&&) noexcept = default;
LaunchGraph& LaunchGraph::operator=(LaunchGraph&&) noexcept = default;

Result<GraphNode> LaunchGraph::AddLaunch(std::string name, MakeLaunch make,
                                         After after) {
  try {
    VARLANE_RETURN_IF_ERROR(CheckOpen(*impl_));
    VARLANE_REQUIRE_ARG(make != nullptr, "node \"", name,
                        "\" has nothing to run");
    for (size_t i = 0; i < after.size(); ++i) {
      VARLANE_RETURN_IF_ERROR(CheckNode(
          *impl_, after[i], StrCat("after[", i, "] of node \"", name, "\"")));
    }
    const auto index = static_cast<int32_t>(impl_->specs.size());
    GraphNodeSpec spec;
    spec.name = std::move(name);
    spec.make = std::move(make);
    impl_->specs.push_back(std::move(spec));
    for (const GraphNode& before : after) {
      Connect(impl_.get(), before.index, index);
    }
    return GraphNode{impl_->id, index};
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for a node");
  }
}

Result<GraphNode> LaunchGraph::AddLaunch(std::string name,
                                         int64_t num_threadgroups, Body body,
                                         After after, size_t scratch_bytes) {
  if (body == nullptr) return AddLaunch(std::move(name), MakeLaunch(), after);
  auto shared = std::make_shared<const Body>(std::move(body));
  return AddLaunch(
      std::move(name),
      [=] {
        return std::make_unique<FixedLaunch>(num_threadgroups, scratch_bytes,
                                             shared);
      },
      after);
}

Result<GraphNode> LaunchGraph::AddCopy(
    std::string name, std::function<GraphCopy(void* args)> bind, After after) {
  if (bind == nullptr) return AddLaunch(std::move(name), MakeLaunch(), after);
  auto shared = std::make_shared<const CopyLaunch::Bind>(std::move(bind));
  return AddLaunch(
      std::move(name), [=] { return std::make_unique<CopyLaunch>(shared); },
      after);
}

Result<GraphNode> LaunchGraph::AddHost(
    std::string name, std::function<Status(void* args)> function, After after) {
  if (function == nullptr) {
    return AddLaunch(std::move(name), MakeLaunch(), after);
  }
  auto shared = std::make_shared<const HostCall::Function>(std::move(function));
  return AddLaunch(
      std::move(name), [=] { return std::make_unique<HostCall>(shared); },
      after);
}

Status LaunchGraph::AddDependency(GraphNode before, GraphNode node) {
  try {
    VARLANE_RETURN_IF_ERROR(CheckOpen(*impl_));
    VARLANE_RETURN_IF_ERROR(CheckNode(*impl_, before, "before"));
    VARLANE_RETURN_IF_ERROR(CheckNode(*impl_, node, "node"));
    Connect(impl_.get(), before.index, node.index);
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted, "no memory for a dependency"};
  }
}

Status LaunchGraph::SetPriority(GraphNode node, int priority) {
  VARLANE_RETURN_IF_ERROR(CheckOpen(*impl_));
  VARLANE_RETURN_IF_ERROR(CheckNode(*impl_, node, "node"));
  impl_->specs[static_cast<size_t>(node.index)].priority = priority;
  return {};
}

Status LaunchGraph::Build() {
  try {
    if (impl_->is_built) return {};
    const std::string cycle = CycleFinder(impl_->specs).Find();
    VARLANE_REQUIRE_ARG(cycle.empty(), "the graph has a cycle: ", cycle);
    impl_->is_built = true;
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted, "no memory to build a graph"};
  }
}

bool LaunchGraph::is_built() const noexcept {
  return impl_ != nullptr && impl_->is_built;
}
int LaunchGraph::num_nodes() const noexcept {
  return static_cast<int>(impl_->specs.size());
}
uint64_t LaunchGraph::id() const noexcept { return impl_->id; }

std::string_view LaunchGraph::name(GraphNode node) const noexcept {
  if (node.graph != impl_->id || node.index < 0 ||
      std::cmp_greater_equal(node.index, impl_->specs.size())) {
    return {};
  }
  return impl_->specs[static_cast<size_t>(node.index)].name;
}

}  // namespace varlane
