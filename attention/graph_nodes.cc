// SPDX-License-Identifier: Apache-2.0

#include "attention/graph_nodes.h"

#include <utility>

#include "attention/run.h"
#include "attention/write_kv.h"
#include "base/check.h"

namespace varlane {
namespace {

class RunNode final : public GraphLaunch {
 public:
  RunNode(const KernelTable& table, std::shared_ptr<const BindRun> bind)
      : table_(table), bind_(std::move(bind)) {}

  Status Prepare(void* args, GraphGrid* grid) override {
    BoundRun bound;
    VARLANE_RETURN_IF_ERROR((*bind_)(args, &bound));
    const AttentionNodeArgs& with = bound.args;
    VARLANE_RETURN_IF_ERROR(
        run_.Begin(table_, bound.plan, with.kv, with.layer, with.tensors));
    report_ = with.report;
    fill_nan_ = with.fill_nan;
    *grid = {.grid = run_.grid(), .scratch_bytes = run_.scratch_bytes()};
    if (report_ != nullptr) grid->worker_seconds = run_.worker_seconds();
    return {};
  }
  void Run(const Threadgroup& group) override { run_(group); }
  void RunTraced(const Threadgroup& group) override { run_.RunTraced(group); }
  void Done(bool complete) noexcept override {
    run_.End(complete, fill_nan_, report_);
  }

 private:
  const KernelTable& table_;
  std::shared_ptr<const BindRun> bind_;
  PlanRun run_;
  LaunchReport* report_ = nullptr;
  bool fill_nan_ = false;
};

class WriteKvNode final : public GraphLaunch {
 public:
  WriteKvNode(const KernelTable& table, int num_nodes,
              std::shared_ptr<const BindWriteKv> bind)
      : table_(table), num_nodes_(num_nodes), bind_(std::move(bind)) {}

  Status Prepare(void* args, GraphGrid* grid) override {
    const WriteKvNodeArgs with = (*bind_)(args);
    VARLANE_RETURN_IF_ERROR(write_.Begin(table_, num_nodes_, with.kv,
                                         with.layer, with.k, with.v,
                                         with.slot_mapping));
    grid->grid = write_.grid();
    return {};
  }
  void Run(const Threadgroup& group) override { write_(group); }

 private:
  const KernelTable& table_;
  const int num_nodes_;
  std::shared_ptr<const BindWriteKv> bind_;
  KvWrite write_;
};

}  // namespace

LaunchGraph::MakeLaunch RunNodes(const KernelTable& table, BindRun bind) {
  // The nodes share what binds them.
  auto shared = std::make_shared<const BindRun>(std::move(bind));
  return [&table, shared] { return std::make_unique<RunNode>(table, shared); };
}

LaunchGraph::MakeLaunch WriteKvNodes(const KernelTable& table, int num_nodes,
                                     BindWriteKv bind) {
  auto shared = std::make_shared<const BindWriteKv>(std::move(bind));
  return [&table, num_nodes, shared] {
    return std::make_unique<WriteKvNode>(table, num_nodes, shared);
  };
}

}  // namespace varlane
