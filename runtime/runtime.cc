// Runtime: topology, placement, arenas and the launch engine put together.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/strings.h"
#include "runtime/affinity.h"
#include "runtime/arenas.h"
#include "runtime/launch.h"
#include "runtime/launch_graph.h"
#include "runtime/placement.h"

namespace varlane {
namespace {

// Whether workers can be pinned; a reason why not goes to the warnings.
bool CanPin(const RuntimeOptions& options, Topology* topology) {
  if (options.executor || !options.pin || !topology->is_this_machine)
    return false;
  CpuMask mask;
  Status status = CpuMask::ReadThread(&mask);
  if (status.ok()) status = mask.ApplyToThread();  // changes nothing
  if (!status.ok()) {
    topology->warnings.push_back(
        StrCat("workers are not pinned: ", status.message()));
  }
  return status.ok();
}

void WarnOfCoresWithoutL3(const RuntimeOptions& options, Topology* topology) {
  if (options.numa != NumaPolicy::kL3) return;
  const auto count =
      std::count_if(topology->cores.begin(), topology->cores.end(),
                    [](const Core& core) { return core.l3 < 0; });
  if (count == 0) return;
  topology->warnings.push_back(
      StrCat(count, " cores have no L3: those of a node share an arena"));
}

std::vector<CpuMask> NodeMasks(const Placement& placement) {
  std::vector<CpuMask> masks;
  for (const std::vector<int>& pus : placement.pus_of_node) {
    CpuMask& mask = masks.emplace_back();
    for (const int pu : pus) mask.Add(pu);
  }
  return masks;
}

void LogCreated(const Topology& topology, const Placement& placement,
                bool pin) noexcept {
  for (const std::string& warning : topology.warnings) {
    Log(LogLevel::kWarning, "runtime_warning", warning);
  }
  Log(LogLevel::kInfo, "runtime_created", "workers are ready",
      {{"workers", int64_t{placement.num_workers()}},
       {"nodes", int64_t{placement.num_nodes()}},
       {"pinned", int64_t{pin}},
       {"source", topology.source}});
}

}  // namespace

class Runtime::Impl {
 public:
  Impl(RuntimeOptions opts, Topology topo, Placement places, bool pin,
       std::unique_ptr<Arenas> made)
      : options(std::move(opts)),
        topology(std::move(topo)),
        placement(std::move(places)),
        is_pinned(pin),
        node_masks(NodeMasks(placement)),
        arenas(std::move(made)),
        engine(placement, *arenas, pin, !options.cpus.empty()) {}

  const pid_t process = getpid();
  const RuntimeOptions options;
  const Topology topology;
  const Placement placement;
  const bool is_pinned;
  const std::vector<CpuMask> node_masks;  // [nodes]
  const std::unique_ptr<Arenas> arenas;
  LaunchEngine engine;
};

Runtime::Runtime(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// A forked child has none of the threads, and locks they held when it was made
// stay taken for ever, TBB's among them: there everything is left as it is.
Runtime::~Runtime() {
  if (impl_ != nullptr && impl_->process != getpid()) (void)impl_.release();
}

Result<std::unique_ptr<Runtime>> Runtime::Create(
    const RuntimeOptions& options) {
  try {
    Result<Topology> topology = Topology::Detect(options);
    VARLANE_RETURN_IF_ERROR(topology.status());
    RuntimeOptions placing = options;
    if (options.executor) placing.numa = NumaPolicy::kOff;
    Result<Placement> placement = PlaceWorkers(*topology, placing);
    VARLANE_RETURN_IF_ERROR(placement.status());
    WarnOfCoresWithoutL3(placing, &*topology);
    const bool pin = CanPin(options, &*topology);
    Result<std::unique_ptr<Arenas>> arenas =
        options.executor ? Arenas::On(options.executor, *placement)
                         : Arenas::Create(*placement, pin);
    VARLANE_RETURN_IF_ERROR(arenas.status());
    std::unique_ptr<Runtime> runtime(new Runtime(std::make_unique<Impl>(
        options, *std::move(topology), *std::move(placement), pin,
        *std::move(arenas))));
    LogCreated(runtime->topology(), runtime->impl_->placement, pin);
    return runtime;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for a Runtime");
  }
}

const RuntimeOptions& Runtime::options() const noexcept {
  return impl_->options;
}
const Topology& Runtime::topology() const noexcept { return impl_->topology; }
int Runtime::num_workers() const noexcept {
  return impl_->placement.num_workers();
}
int Runtime::num_nodes() const noexcept { return impl_->placement.num_nodes(); }

int Runtime::NodeOfWorker(int worker) const noexcept {
  const std::vector<int>& first = impl_->placement.first_worker;
  int node = 0;
  while (node + 1 < num_nodes() &&
         worker >= first[static_cast<size_t>(node) + 1]) {
    ++node;
  }
  return node;
}

int Runtime::MemoryOfNode(int node) const noexcept {
  return impl_->placement.memory_of_node[static_cast<size_t>(node)];
}

int Runtime::PuOfWorker(int worker) const noexcept {
  if (!impl_->is_pinned || worker < 0 || worker >= num_workers()) return -1;
  return impl_->placement.pu_of_worker[static_cast<size_t>(worker)];
}

Status Runtime::Launch(const Grid& grid,
                       FunctionRef<void(const Threadgroup&)> body,
                       const LaunchOptions& options) {
  return impl_->engine.Launch(grid, body, options);
}

Status Runtime::Run(const LaunchGraph& graph, void* args,
                    const LaunchOptions& options) {
  try {
    VARLANE_REQUIRE(graph.is_built(), StatusCode::kFailedPrecondition,
                    "the graph is not built: Build was not called, or failed");
    VARLANE_RETURN_IF_ERROR(impl_->engine.Validate({}, options));
    std::unique_ptr<GraphRun> run = graph.impl_->Take(num_nodes());
    run->SetArgs(args);
    Status status = impl_->engine.Run(run.get(), options);
    graph.impl_->Put(std::move(run), num_nodes());
    return status;
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted, "no memory to run a graph"};
  } catch (const std::exception& error) {
    return {StatusCode::kAborted, error.what()};
  } catch (...) {
    return {StatusCode::kAborted,
            "making a node threw something that is not a std::exception"};
  }
}

void Runtime::SetTracer(Tracer* tracer) noexcept {
  impl_->engine.SetTracer(tracer);
}

// The caller itself goes to the node for a while: no thread has to be free,
// so this cannot deadlock, from inside a body either.
Status Runtime::RunOnNode(int node, FunctionRef<void()> body) {
  try {
    VARLANE_REQUIRE_ARG(node >= 0 && node < num_nodes(), "node = ", node,
                        ", but the runtime has ", num_nodes(), " nodes");
    const ScopedAffinity there(
        impl_->is_pinned ? &impl_->node_masks[static_cast<size_t>(node)]
                         : nullptr);
    body();
    return {};
  } catch (const std::exception& error) {
    return {StatusCode::kAborted, error.what()};
  } catch (...) {
    return {StatusCode::kAborted,
            "the body threw something that is not a std::exception"};
  }
}

}  // namespace varlane
