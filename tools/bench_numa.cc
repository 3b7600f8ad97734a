// SPDX-License-Identifier: Apache-2.0

#include "tools/bench_numa.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "tools/bench_session.h"
#include "tools/parse.h"
#include "tools/status_util.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/memory_budget.h"

namespace varlane::tools {
namespace {

using bench::kBlockTokens;

constexpr int kQueryHeads = 16;
constexpr int kMostContext = 2048;

KvLayout Layout() {
  KvLayout layout;
  layout.dtype = DType::kBF16;
  layout.num_layers = 1;
  layout.num_kv_heads = 4;
  layout.head_size = layout.v_head_size = 128;
  layout.block_size = kBlockTokens;
  return layout;
}

// What each node holds: sequences of as many blocks each.
struct NodeShare {
  int num_seqs = 0;
  int blocks = 0;

  int64_t bytes() const {
    return int64_t{num_seqs} * blocks * Layout().block_bytes();
  }
};

// A pool over all nodes with as many sequences at home on each, or, with
// sharded heads, as many in all. What they hold does not matter to how long it
// takes to read.
class Pool {
 public:
  static Result<Pool> Create(Runtime* runtime, const NodeShare& share,
                             bool shard_heads = false) {
    Pool made;
    made.share_ = share;
    KvPoolOptions options;
    options.layout = Layout();
    options.shard_heads = shard_heads;
    options.num_blocks =
        int64_t{share.blocks} * share.num_seqs * runtime->num_nodes();
    VARLANE_TOOLS_ASSIGN(made.pool_, KvPool::Create(options, runtime));
    made.tables_.resize(static_cast<size_t>(runtime->num_nodes()));
    for (int node = 0; node < runtime->num_nodes(); ++node) {
      for (int i = 0; i < share.num_seqs; ++i) {
        const SeqId seq = made.pool_->CreateSequence({.home_node = node});
        VARLANE_TOOLS_ASSIGN(
            const Admission grown,
            made.pool_->Append(seq, share.blocks * kBlockTokens));
        if (!grown.admitted()) {
          return Fail(StatusCode::kInternal, "the pool has too few blocks");
        }
        std::vector<int32_t>& table =
            made.tables_[static_cast<size_t>(node)].emplace_back(share.blocks);
        VARLANE_TOOLS_TRY(made.pool_->CopyBlockTable(seq, table).status());
      }
    }
    return made;
  }

  KvPool& pool() const { return *pool_; }
  const NodeShare& share() const { return share_; }
  int num_nodes() const { return static_cast<int>(tables_.size()); }

  // Block tables of the sequences of `node`; of as many whose blocks are on all
  // nodes in turn where it is num_nodes(); of all of them where it is -1.
  std::vector<int32_t> Tables(int node) const {
    std::vector<int32_t> all;
    for (size_t n = 0; n < tables_.size(); ++n) {
      if (node >= 0 && n != static_cast<size_t>(node)) continue;
      for (const std::vector<int32_t>& table : tables_[n]) {
        all.insert(all.end(), table.begin(), table.end());
      }
    }
    if (node < num_nodes()) return all;
    for (size_t i = 0; i < tables_[0].size(); ++i) {
      for (size_t b = 0; b < tables_[0][i].size(); ++b) {
        all.push_back(tables_[b % tables_.size()][i][b]);
      }
    }
    return all;
  }

 private:
  Pool() = default;

  NodeShare share_;
  std::unique_ptr<KvPool> pool_;
  std::vector<std::vector<std::vector<int32_t>>> tables_;  // [nodes][seqs]
};

// A decode step over the sequences that Pool::Tables names by `node`, or over
// as many of their blocks as one sequence each.
class DecodeStep {
 public:
  DecodeStep(Attention* attention, const Pool& pool, int node)
      : DecodeStep(attention, pool, node, pool.share().blocks) {}
  DecodeStep(Attention* attention, const Pool& pool, int node, int64_t blocks)
      : attention_(attention),
        kv_(pool.pool().view()),
        tables_(pool.Tables(node)),
        blocks_(blocks) {
    const size_t num_seqs = tables_.size() / static_cast<size_t>(blocks);
    seq_lens_.assign(num_seqs, static_cast<int32_t>(blocks * kBlockTokens));
    for (size_t i = 0; i <= num_seqs; ++i) {
      cu_seqlens_q_.push_back(static_cast<int32_t>(i));
    }
    q_.assign(num_seqs * kQueryHeads * 128, 0.5f);
    out_.resize(q_.size());
  }

  Status Plan(bool follow_homes = true) {
    return attention_->Plan({cu_seqlens_q_, seq_lens_, tables_, blocks_},
                            {.num_q_heads = kQueryHeads}, kv_,
                            {.follow_homes = follow_homes}, &plan_);
  }
  // Bytes a second.
  Result<double> Run() {
    VARLANE_TOOLS_TRY(attention_->Run(
        &plan_, kv_, 0, {.q = {q_.data()}, .out = {out_.data()}}, &report_));
    total_ += report_;
    return static_cast<double>(report_.kv_bytes) / report_.seconds;
  }
  const LaunchReport& total() const { return total_; }

 private:
  Attention* attention_;
  KvView kv_;
  std::vector<int32_t> tables_;
  int64_t blocks_;  // of a sequence
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<float> q_;
  std::vector<float> out_;
  AttentionPlan plan_;
  LaunchReport report_;
  LaunchReport total_;
};

// One engine a node that has only that node's CPUs: a Runtime keeps to those
// that its maker may run on.
Result<std::vector<Engine>> EnginesOfNodes(Runtime* runtime,
                                           RuntimeOptions options) {
  std::vector<Engine> engines;
  options.num_threads = 0;
  for (int node = 0; node < runtime->num_nodes(); ++node) {
    Result<Engine> made = Status(StatusCode::kInternal, "not made");
    VARLANE_TOOLS_TRY(
        runtime->RunOnNode(node, [&] { made = MakeEngine(options); }));
    VARLANE_TOOLS_TRY(made.status());
    engines.push_back(*std::move(made));
  }
  return engines;
}

class NumaBench {
 public:
  explicit NumaBench(const BenchNumaOptions& options) : options_(options) {}

  Result<BenchNumaResult> Run() {
    VARLANE_TOOLS_ASSIGN(all_, MakeEngine(options_.runtime));
    VARLANE_TOOLS_ASSIGN(const NodeShare share, ShareOfANode());
    VARLANE_TOOLS_ASSIGN(Pool pool, Pool::Create(all_.runtime.get(), share));
    pool_.emplace(std::move(pool));
    result_.machine = Machine();
    AddPlacement(pool_->pool(), "local bytes");
    VARLANE_TOOLS_TRY(AddHomes());
    VARLANE_TOOLS_TRY(AddShards());
    VARLANE_TOOLS_TRY(AddMatrix());
    VARLANE_TOOLS_TRY(AddScaling());
    return std::move(result_);
  }

 private:
  int num_nodes() const { return all_.runtime->num_nodes(); }
  SampleBudget Budget() const {
    return {.seconds = options_.seconds,
            .min_rounds = options_.quick ? 3 : 7,
            .retries = !options_.quick};
  }

  Result<NodeShare> ShareOfANode() const {
    int64_t bytes = options_.node_bytes;
    if (bytes == 0) {
      VARLANE_TOOLS_ASSIGN(const MemoryLimits limits, MemoryLimits::Detect());
      bytes = std::min((options_.quick ? 64 : 256) * kMiB,
                       limits.available_bytes / 4 / num_nodes());
    }
    // Where no whole sequence fits, one as long as does.
    const int64_t blocks = std::max<int64_t>(1, bytes / Layout().block_bytes());
    const int64_t most = kMostContext / kBlockTokens;
    return NodeShare{static_cast<int>(std::max<int64_t>(1, blocks / most)),
                     static_cast<int>(std::min(blocks, most))};
  }

  Json Machine() const {
    const Topology& topology = all_.runtime->topology();
    Json nodes = Json::array();
    for (const NumaNode& node : topology.nodes) {
      nodes.push_back({{"os_index", node.os_index},
                       {"memory_bytes", node.memory_bytes},
                       {"cores", node.cores.size()}});
    }
    return {{"nodes", nodes},
            {"distances", topology.distances},
            {"arenas", num_nodes()},
            {"workers", all_.runtime->num_workers()},
            {"bytes_a_node", pool_->share().bytes()},
            {"warnings", topology.warnings}};
  }

  BenchRow& AddRow(std::string name, const char* unit) {
    BenchRow& row = result_.rows.emplace_back();
    row.name = std::move(name);
    row.unit = unit;
    return row;
  }

  // What the kernel says of a pool's pages.
  void AddPlacement(const KvPool& pool, const char* name) {
    const KvPlacement found = pool.MeasurePlacement();
    BenchRow& row = AddRow(name, "MiB");
    row.must = 0.99;
    row.rounds = 1;
    const int64_t known = found.local_bytes + found.remote_bytes;
    if (found.unknown_bytes > 0) {
      row.reason = fmt::format(
          "unknown: the kernel does not tell where pages are (errno {})",
          found.error);
      return;
    }
    row.value = static_cast<double>(found.local_bytes) / kMiB;
    row.limit = static_cast<double>(known) / kMiB;
    row.ratio = *row.value / *row.limit;
    Judge(&row);
    const int error = pool.stats().mempolicy_error;
    if (error != 0) {
      row.detail = fmt::format("mbind refused (errno {}): first touch", error);
    }
  }

  // All workers over all sequences: to their homes, or to whoever comes first.
  Status AddHomes() {
    constexpr const char* kSpeed = "all nodes, homes followed or not";
    constexpr const char* kShare =
        "K/V read on its node, homes followed or not";
    if (num_nodes() == 1) {
      AddRow(kSpeed, "GB/s").reason = kOneNode;
      AddRow(kShare, "share").reason = kOneNode;
      return {};
    }
    DecodeStep home(all_.attention.get(), *pool_, -1);
    DecodeStep any(all_.attention.get(), *pool_, -1);
    VARLANE_TOOLS_TRY(home.Plan());
    VARLANE_TOOLS_TRY(any.Plan(false));
    const std::vector<Sampler> samplers = {{[&] { return home.Run(); }},
                                           {[&] { return any.Run(); }}};
    VARLANE_TOOLS_ASSIGN(const Samples samples, Interleave(samplers, Budget()));
    SetRates(samples, 0, 1, &AddRow(kSpeed, "GB/s"));
    const LaunchReport& with = home.total();
    const LaunchReport& without = any.total();
    BenchRow& share = AddRow(kShare, "share");
    share.value = LocalShare(with);
    share.limit = LocalShare(without);
    share.rounds = samples.rounds;
    share.detail =
        fmt::format("{} threadgroups at home, {} stolen",
                    with.home_threadgroups, with.stolen_threadgroups);
    return {};
  }

  // Heads sharded over the nodes, beside sequences at home: one long sequence,
  // whose K/V would all be on one node, and as many as the nodes have.
  Status AddShards() {
    constexpr const char* kPages = "local bytes, heads sharded";
    constexpr const char* kOne = "one long sequence, heads sharded or at home";
    constexpr const char* kAll = "all sequences, heads sharded or at home";
    const int heads = Layout().num_kv_heads;
    if (num_nodes() == 1 || heads % num_nodes() != 0) {
      const std::string reason =
          num_nodes() == 1
              ? kOneNode
              : fmt::format("{} KV heads cannot be cut into {} equal shards",
                            heads, num_nodes());
      AddRow(kPages, "MiB").reason = reason;
      AddRow(kOne, "GB/s").reason = reason;
      AddRow(kAll, "GB/s").reason = reason;
      return {};
    }
    VARLANE_TOOLS_ASSIGN(const Pool shards, Pool::Create(all_.runtime.get(),
                                                         pool_->share(), true));
    AddPlacement(shards.pool(), kPages);
    const NodeShare& share = pool_->share();
    const int64_t long_blocks = int64_t{share.num_seqs} * share.blocks;
    Attention* const attention = all_.attention.get();
    DecodeStep steps[] = {{attention, shards, 0, long_blocks},
                          {attention, *pool_, 0, long_blocks},
                          {attention, shards, -1},
                          {attention, *pool_, -1}};
    std::vector<Sampler> samplers;
    for (DecodeStep& step : steps) {
      VARLANE_TOOLS_TRY(step.Plan());
      samplers.push_back({[&step] { return step.Run(); }});
    }
    VARLANE_TOOLS_ASSIGN(const Samples samples, Interleave(samplers, Budget()));
    const auto add = [&](const char* name, size_t sharded) {
      BenchRow& row = AddRow(name, "GB/s");
      SetRates(samples, sharded, sharded + 1, &row);
      row.detail = fmt::format("K/V read on its node: {:.0f}% against {:.0f}%",
                               100 * LocalShare(steps[sharded].total()),
                               100 * LocalShare(steps[sharded + 1].total()));
    };
    add(kOne, 0);
    add(kAll, 2);
    return {};
  }

  static double LocalShare(const LaunchReport& report) {
    const auto all =
        static_cast<double>(report.local_bytes + report.remote_bytes);
    return all > 0 ? static_cast<double>(report.local_bytes) / all : 0;
  }

  // Workers of every node over memory of every node, and of all in turn.
  Status AddMatrix() {
    VARLANE_TOOLS_ASSIGN(const std::vector<Engine> engines,
                         EnginesOfNodes(all_.runtime.get(), options_.runtime));
    const int columns = num_nodes() == 1 ? 1 : num_nodes() + 1;
    std::vector<std::unique_ptr<DecodeStep>> steps;
    std::vector<Sampler> samplers;
    for (const Engine& engine : engines) {
      for (int memory = 0; memory < columns; ++memory) {
        DecodeStep* const step =
            steps
                .emplace_back(std::make_unique<DecodeStep>(
                    engine.attention.get(), *pool_, memory))
                .get();
        VARLANE_TOOLS_TRY(step->Plan());
        samplers.push_back({[step] { return step->Run(); }});
      }
    }
    VARLANE_TOOLS_ASSIGN(const Samples samples, Interleave(samplers, Budget()));
    for (int workers = 0; workers < num_nodes(); ++workers) {
      std::vector<double>& line = result_.matrix.emplace_back();
      for (int memory = 0; memory < columns; ++memory) {
        const auto at = static_cast<size_t>(workers * columns + memory);
        const auto own = static_cast<size_t>(workers * columns + workers);
        BenchRow& row = AddRow(CellName(workers, memory), "GB/s");
        SetRates(samples, at, own, &row);
        line.push_back(Median(samples.of[at]));
      }
    }
    if (num_nodes() > 1) return {};
    for (const char* what : {"remote", "interleaved"}) {
      AddRow(fmt::format("workers of node 0, {} memory", what), "GB/s").reason =
          kOneNode;
    }
    return {};
  }

  std::string CellName(int workers, int memory) const {
    // With an arena for every L3, by the arena's number.
    const auto index = [&](int node) {
      const Runtime& runtime = *all_.runtime;
      return runtime.options().numa == NumaPolicy::kL3
                 ? node
                 : runtime.topology().nodes[static_cast<size_t>(node)].os_index;
    };
    const std::string of = fmt::format("workers of node {}, ", index(workers));
    if (memory == num_nodes()) return of + "memory of all in turn";
    if (memory == workers) return of + "its own memory";
    return of + fmt::format("memory of node {}", index(memory));
  }

  // More and more workers over all nodes' sequences.
  Status AddScaling() {
    const int most = all_.runtime->num_workers();
    for (int workers = 1; workers < most; workers *= 2) {
      result_.workers.push_back(workers);
    }
    result_.workers.push_back(most);
    std::vector<Engine> engines;
    std::vector<std::unique_ptr<DecodeStep>> steps;
    std::vector<Sampler> samplers;
    for (const int workers : result_.workers) {
      RuntimeOptions options = options_.runtime;
      options.num_threads = workers;
      VARLANE_TOOLS_ASSIGN(Engine engine, MakeEngine(options));
      DecodeStep* const step = steps
                                   .emplace_back(std::make_unique<DecodeStep>(
                                       engine.attention.get(), *pool_, -1))
                                   .get();
      engines.push_back(std::move(engine));
      VARLANE_TOOLS_TRY(step->Plan());
      samplers.push_back({[step] { return step->Run(); }});
    }
    VARLANE_TOOLS_ASSIGN(const Samples samples, Interleave(samplers, Budget()));
    for (size_t i = 0; i < samplers.size(); ++i) {
      const int workers = result_.workers[i];
      BenchRow& row =
          AddRow(fmt::format("{} workers over all nodes", workers), "GB/s");
      SetRates(samples, i, 0, &row);
      // Of what one worker alone would give so many.
      row.limit = *row.limit * workers;
      row.ratio = *row.ratio / workers;
      result_.scaling.push_back(Median(samples.of[i]));
    }
    return {};
  }

  // Sampler `at` beside sampler `limit`, in GB/s.
  static void SetRates(const Samples& samples, size_t at, size_t limit,
                       BenchRow* row) {
    std::vector<double> ratios;
    for (size_t i = 0; i < samples.of[at].size(); ++i) {
      ratios.push_back(samples.of[at][i] / samples.of[limit][i]);
    }
    row->value = Median(samples.of[at]) * 1e-9;
    row->limit = Median(samples.of[limit]) * 1e-9;
    SetRatios(ratios, samples.disturbed, row);
  }

  static constexpr const char* kOneNode =
      "one NUMA node: nothing is remote here";

  BenchNumaOptions options_;
  Engine all_;
  std::optional<Pool> pool_;  // on all_'s runtime
  BenchNumaResult result_;
};

}  // namespace

Result<BenchNumaResult> BenchNuma(const BenchNumaOptions& options) {
  return NumaBench(options).Run();
}

}  // namespace varlane::tools
