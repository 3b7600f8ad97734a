// The public face of attention/: varlane/attention.h.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/attention.h"

#include <new>
#include <utility>

#include "attention/graph_nodes.h"
#include "attention/kernels_of.h"
#include "attention/plan.h"
#include "attention/run.h"
#include "attention/write_kv.h"
#include "base/check.h"
#include "kernels/kernel_table.h"

namespace varlane {

const char* OwnerPatternName(OwnerPattern pattern) {
  switch (pattern) {
    case OwnerPattern::kSearch:
      return "search";
    case OwnerPattern::kMap:
      return "map";
    case OwnerPattern::kPlanned:
      return "planned";
    case OwnerPattern::kPadded:
      return "padded";
  }
  return "?";
}

const char* PartitionModeName(PartitionMode mode) {
  switch (mode) {
    case PartitionMode::kAuto:
      return "auto";
    case PartitionMode::kSpread:
      return "spread";
    case PartitionMode::kWalk:
      return "walk";
  }
  return "?";
}

std::vector<std::string> SupportedSimdTargets() {
  std::vector<std::string> names;
  for (const KernelTable* table : SupportedKernels()) {
    names.emplace_back(table->name);
  }
  return names;
}

namespace {

// Of all last-level caches; 0 where the machine shows none.
int64_t L3Bytes(const Topology& topology) {
  int64_t bytes = 0;
  for (const Cache& cache : topology.l3) bytes += cache.size_bytes;
  return bytes;
}

}  // namespace

Result<const KernelTable*> KernelsOf(const Runtime& runtime) {
  const std::string& name = runtime.options().simd_target;
  const KernelTable* table = FindKernels(name == "best" ? "" : name);
  if (table != nullptr) return table;
  std::string known;
  for (const std::string& target : SupportedSimdTargets()) {
    known += (known.empty() ? "" : ", ") + target;
  }
  return Status(StatusCode::kNotFound,
                StrCat("simd_target = \"", name,
                       "\" is not supported here; there are: ", known));
}

// --- AttentionPlan -----------------------------------------------------------

AttentionPlan::AttentionPlan() = default;
AttentionPlan::~AttentionPlan() = default;
AttentionPlan::AttentionPlan(AttentionPlan&&) noexcept = default;
AttentionPlan& AttentionPlan::operator=(AttentionPlan&&) noexcept = default;

bool AttentionPlan::spreads_partitions() const noexcept {
  return impl_ && impl_->ready && impl_->spread_blocks > 0;
}
int AttentionPlan::kv_heads_per_threadgroup() const noexcept {
  return impl_ && impl_->ready ? impl_->heads_together : 0;
}
int64_t AttentionPlan::num_threadgroups() const noexcept {
  return impl_ && impl_->ready ? impl_->grid_size : 0;
}
int64_t AttentionPlan::total_q() const noexcept {
  return impl_ && impl_->ready ? impl_->total_q : 0;
}
int64_t AttentionPlan::workspace_bytes() const noexcept {
  if (!impl_) return 0;
  return static_cast<int64_t>(impl_->partials.capacity() * sizeof(float)) +
         impl_->arrived_size * static_cast<int64_t>(sizeof(int32_t));
}

namespace {

std::string Partitions(const AttentionPlan::Impl& plan) {
  if (plan.spread_blocks == 0) return PartitionModeName(PartitionMode::kWalk);
  const char* const spread = PartitionModeName(PartitionMode::kSpread);
  if (plan.spread_blocks == plan.num_query_blocks) return spread;
  return StrCat(PartitionModeName(PartitionMode::kWalk), ", ", spread,
                " in query blocks 0 to ", plan.spread_blocks - 1);
}

}  // namespace

std::string AttentionPlan::ToString() const {
  if (!impl_ || !impl_->ready) return "empty plan";
  const Impl& plan = *impl_;
  const int together = plan.heads_together;
  std::string grid = together == 1
                         ? StrCat(plan.layout.num_kv_heads, " heads x ")
                         : StrCat(plan.layout.num_kv_heads / together,
                                  " groups of ", together, " KV heads x ");
  switch (plan.owner) {
    case OwnerPattern::kSearch:
    case OwnerPattern::kMap:
      grid += StrCat(plan.num_query_blocks, " query blocks of ", plan.block_q,
                     " x ", plan.num_partitions, " partitions");
      break;
    case OwnerPattern::kPlanned:
      grid += StrCat(plan.descriptors.size(), " descriptors");
      break;
    case OwnerPattern::kPadded:
      grid += StrCat(plan.num_seqs, " sequences x ", plan.padded_query_blocks,
                     " query blocks of ", plan.block_q, " x ",
                     plan.num_partitions, " partitions");
      break;
  }
  std::string homes;
  const char* const what = plan.grid_shards > 1 ? "shards: " : "homes: ";
  for (size_t node = 0; node + 1 < plan.node_begin.size(); ++node) {
    homes += StrCat(node == 0 ? what : ", ",
                    plan.node_begin[node + 1] - plan.node_begin[node],
                    " threadgroups of node ", node);
  }
  if (!homes.empty()) homes += "\n";
  return StrCat("batch: ", plan.num_seqs, " sequences, ", plan.total_q,
                " query tokens\nheads: ", plan.num_q_heads, " query, ",
                plan.layout.num_kv_heads, " KV (group ", plan.group,
                ")\ngrid: ", grid, " = ", plan.grid_size,
                " threadgroups\nowner: ", OwnerPatternName(plan.owner),
                "\npartitions: ", Partitions(plan), "\n", homes,
                "workspace: ", FormatBytes(workspace_bytes()), "\n");
}

// --- Attention ---------------------------------------------------------------

class Attention::Impl {
 public:
  Impl(Runtime* runtime, const KernelTable* table)
      : runtime_(runtime), table_(table) {}
  Runtime* runtime() const { return runtime_; }
  const KernelTable& table() const { return *table_; }

 private:
  Runtime* runtime_;
  const KernelTable* table_;
};

Attention::Attention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Attention::~Attention() = default;

Result<std::unique_ptr<Attention>> Attention::Create(Runtime* runtime) {
  VARLANE_REQUIRE_ARG(runtime != nullptr, "runtime is null");
  const Result<const KernelTable*> table = KernelsOf(*runtime);
  if (!table.ok()) return table.status();
  try {
    return std::unique_ptr<Attention>(
        new Attention(std::make_unique<Impl>(runtime, table.value())));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for Attention");
  }
}

const char* Attention::simd_target() const noexcept {
  return impl_->table().name;
}

Status Attention::Plan(const Batch& batch, const AttentionShape& shape,
                       const KvView& kv, const PlanOptions& options,
                       AttentionPlan* plan) const {
  VARLANE_REQUIRE_ARG(plan != nullptr, "plan is null");
  if (!plan->impl_) {
    plan->impl_.reset(new (std::nothrow) AttentionPlan::Impl);
    VARLANE_REQUIRE(plan->impl_ != nullptr, StatusCode::kResourceExhausted,
                    "no memory for a plan");
  }
  const Runtime& runtime = *impl_->runtime();
  VARLANE_RETURN_IF_ERROR(MakePlan(batch, shape, kv, options,
                                   runtime.num_workers(), plan->impl_.get(),
                                   runtime.num_nodes()));
  plan->impl_->cache_bytes = L3Bytes(runtime.topology());
  return {};
}

Status Attention::Run(AttentionPlan* plan, const KvView& kv, int layer,
                      const AttentionTensors& tensors,
                      const RunOptions& options) const {
  VARLANE_REQUIRE_ARG(plan != nullptr, "plan is null");
  VARLANE_REQUIRE(plan->impl_ != nullptr, StatusCode::kFailedPrecondition,
                  "the plan is empty: Plan was not called");
  return RunPlan(impl_->runtime(), impl_->table(), plan->impl_.get(), kv, layer,
                 tensors, options);
}

Status Attention::Run(AttentionPlan* plan, const KvView& kv, int layer,
                      const AttentionTensors& tensors, LaunchReport* report,
                      std::stop_token stop) const {
  RunOptions options;
  options.report = report;
  options.stop = std::move(stop);
  return Run(plan, kv, layer, tensors, options);
}

Status Attention::WriteKv(const KvView& kv, int layer, const ConstTensor& k,
                          const ConstTensor& v,
                          std::span<const int64_t> slot_mapping) const {
  return WriteKvTokens(impl_->runtime(), impl_->table(), kv, layer, k, v,
                       slot_mapping);
}

Result<GraphNode> Attention::AddRun(
    LaunchGraph* graph, std::string name,
    std::function<AttentionNodeArgs(void* args)> bind,
    LaunchGraph::After after) const {
  VARLANE_REQUIRE_ARG(graph != nullptr, "graph is null");
  VARLANE_REQUIRE_ARG(bind != nullptr, "bind of node \"", name, "\" is empty");
  const auto check = [bind = std::move(bind)](void* args, BoundRun* bound) {
    bound->args = bind(args);
    const AttentionPlan* const plan = bound->args.plan;
    VARLANE_REQUIRE_ARG(plan != nullptr, "plan is null");
    VARLANE_REQUIRE(plan->impl_ != nullptr, StatusCode::kFailedPrecondition,
                    "the plan is empty: Plan was not called");
    bound->plan = plan->impl_.get();
    return Status();
  };
  return graph->AddLaunch(std::move(name), RunNodes(impl_->table(), check),
                          after);
}

Result<GraphNode> Attention::AddWriteKv(
    LaunchGraph* graph, std::string name,
    std::function<WriteKvNodeArgs(void* args)> bind,
    LaunchGraph::After after) const {
  VARLANE_REQUIRE_ARG(graph != nullptr, "graph is null");
  VARLANE_REQUIRE_ARG(bind != nullptr, "bind of node \"", name, "\" is empty");
  return graph->AddLaunch(
      std::move(name),
      WriteKvNodes(impl_->table(), impl_->runtime()->num_nodes(),
                   std::move(bind)),
      after);
}

}  // namespace varlane
