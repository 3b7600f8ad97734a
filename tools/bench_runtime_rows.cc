// Rows on the runtime: graphs beside launches, tracing, idling and sharing a
// core.
//
// SPDX-License-Identifier: Apache-2.0

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/status_util.h"
#include "varlane/graph.h"
#include "varlane/trace.h"

namespace varlane::tools {
namespace {

using bench::Heads;

constexpr int kEmptyNodes = 64;
constexpr int kLayers = 28;

BenchRow MakeRow(std::string name, const char* unit, Sense sense, double must) {
  BenchRow row;
  row.name = std::move(name);
  row.unit = unit;
  row.sense = sense;
  row.must = must;
  return row;
}

// --- pairs -------------------------------------------------------------------

std::vector<double> Means(const std::vector<double>& a,
                          const std::vector<double>& b) {
  std::vector<double> means;
  for (size_t i = 0; i < a.size(); ++i) means.push_back((a[i] + b[i]) / 2);
  return means;
}

// Samples of `ours` and `theirs` (see Sampler), as the first and the second.
// The first of a round is slower on a busy machine, whichever it is, and speeds
// drift: one goes before that does not count, and either is taken twice, in
// mirrored order.
template <typename Ours, typename Theirs, typename Budget>
Result<Samples> InterleaveMirrored(const Ours& ours, const Theirs& theirs,
                                   const Budget& budget) {
  const std::vector<Sampler> samplers = {
      {theirs}, {theirs}, {ours}, {ours}, {theirs}};
  VARLANE_TOOLS_ASSIGN(const Samples samples, Interleave(samplers, budget));
  Samples pair = samples;
  pair.of = {Means(samples.of[2], samples.of[3]),
             Means(samples.of[1], samples.of[4])};
  pair.low = {std::min(samples.low[2], samples.low[3]),
              std::min(samples.low[1], samples.low[4])};
  pair.high = {std::max(samples.high[2], samples.high[3]),
               std::max(samples.high[1], samples.high[4])};
  return pair;
}

// --- empty graphs ------------------------------------------------------------

// Nodes in `chains` chains side by side.
Status MeasureEmptyGraph(BenchSession* session, int chains, BenchRow* row) {
  LaunchGraph graph;
  std::vector<GraphNode> nodes;
  for (int i = 0; i < kEmptyNodes; ++i) {
    std::vector<GraphNode> after;
    if (i >= chains) after.push_back(nodes[static_cast<size_t>(i - chains)]);
    VARLANE_TOOLS_ASSIGN(
        const GraphNode node,
        graph.AddLaunch(
            "empty", 1, [](const Threadgroup&, void*) {}, after));
    nodes.push_back(node);
  }
  VARLANE_TOOLS_TRY(graph.Build());
  const std::vector<Sampler> samplers = {{[&]() -> Result<double> {
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(session->runtime()->Run(graph));
    return SecondsSince(start);
  }}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> micros;
  for (const double seconds : samples.of[0]) micros.push_back(seconds * 1e6);
  SetValues(micros, samples.disturbed, row);
  return {};
}

// --- steps -------------------------------------------------------------------

// Decode steps of one or more independent models: each layer writes the step's
// K/V and attends. All layers use the fixture's one; what a launch costs does
// not depend on that.
class Steps {
 public:
  // `branches` models, each with `seqs` sequences of `context` tokens.
  static Result<std::unique_ptr<Steps>> Create(BenchSession* session,
                                               const Heads& heads, int branches,
                                               int seqs, int context) {
    std::unique_ptr<Steps> steps(new Steps(session));
    const int per_seq =
        (context + bench::kBlockTokens - 1) / bench::kBlockTokens;
    VARLANE_TOOLS_ASSIGN(const bench::KvFixture* const fixture,
                         session->Fixture(DType::kBF16, heads,
                                          int64_t{branches} * seqs * per_seq));
    steps->kv_ = fixture->view();
    auto block = fixture->blocks().begin();
    for (int b = 0; b < branches; ++b) {
      auto branch = std::make_unique<Branch>();
      std::vector<int32_t> tables;
      branch->cu_seqlens_q = {0};
      for (int i = 0; i < seqs; ++i) {
        branch->cu_seqlens_q.push_back(i + 1);
        branch->seq_lens.push_back(context);
        tables.insert(tables.end(), block, block + per_seq);
        block += per_seq;
        branch->slots.push_back(int64_t{tables.back()} * bench::kBlockTokens +
                                (context - 1) % bench::kBlockTokens);
      }
      AttentionShape shape;
      shape.num_q_heads = heads.q;
      VARLANE_TOOLS_TRY(session->attention()->Plan(
          {branch->cu_seqlens_q, branch->seq_lens, tables, per_seq}, shape,
          steps->kv_, {}, &branch->plan));
      branch->q.resize(static_cast<size_t>(seqs * heads.q * heads.size), 0.1F);
      branch->out.resize(branch->q.size());
      branch->k.resize(static_cast<size_t>(seqs * heads.kv * heads.size), 0.2F);
      steps->branches_.push_back(std::move(branch));
    }
    VARLANE_TOOLS_TRY(steps->BuildGraph());
    return steps;
  }

  Result<double> ByLaunches() {
    const Attention* const attention = session_->attention();
    const Clock::time_point start = Clock::now();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const auto& branch : branches_) {
        const WriteKvNodeArgs write = WriteArgs(branch.get());
        VARLANE_TOOLS_TRY(attention->WriteKv(write.kv, 0, write.k, write.v,
                                             write.slot_mapping));
        VARLANE_TOOLS_TRY(attention->Run(&branch->plan, kv_, 0,
                                         RunArgs(branch.get()).tensors));
      }
    }
    return SecondsSince(start);
  }

  Result<double> ByGraph() {
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(session_->runtime()->Run(graph_, this));
    return SecondsSince(start);
  }

 private:
  struct Branch {
    std::vector<int32_t> cu_seqlens_q;
    std::vector<int32_t> seq_lens;
    std::vector<int64_t> slots;
    AttentionPlan plan;
    std::vector<float> q;
    std::vector<float> k;  // and v
    std::vector<float> out;
  };

  explicit Steps(BenchSession* session) : session_(session) {}

  WriteKvNodeArgs WriteArgs(Branch* branch) const {
    const ConstTensor k = {branch->k.data(), DType::kF32};
    return {kv_, 0, k, k, branch->slots};
  }
  AttentionNodeArgs RunArgs(Branch* branch) const {
    AttentionNodeArgs args;
    args.plan = &branch->plan;
    args.kv = kv_;
    args.tensors.q = {branch->q.data(), DType::kF32};
    args.tensors.out = {branch->out.data(), DType::kF32};
    return args;
  }

  // A chain a branch; no edge between branches.
  Status BuildGraph() {
    const Attention* const attention = session_->attention();
    for (const auto& owned : branches_) {
      Branch* const branch = owned.get();
      std::vector<GraphNode> after;
      for (int layer = 0; layer < kLayers; ++layer) {
        VARLANE_TOOLS_ASSIGN(
            const GraphNode write,
            attention->AddWriteKv(
                &graph_, "write_kv",
                [branch](void* steps) {
                  return static_cast<Steps*>(steps)->WriteArgs(branch);
                },
                after));
        after = {write};
        VARLANE_TOOLS_ASSIGN(
            const GraphNode run,
            attention->AddRun(
                &graph_, "attention",
                [branch](void* steps) {
                  return static_cast<Steps*>(steps)->RunArgs(branch);
                },
                after));
        after = {run};
      }
    }
    return graph_.Build();
  }

  BenchSession* session_;
  KvView kv_;
  std::vector<std::unique_ptr<Branch>> branches_;
  LaunchGraph graph_;
};

// value and limit in us a step; ratio = launches / graph.
Status MeasureSteps(BenchSession* session, const Heads& heads, int branches,
                    int seqs, int context, BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Steps> steps,
                       Steps::Create(session, heads, branches, seqs, context));
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       InterleaveMirrored([&] { return steps->ByGraph(); },
                                          [&] { return steps->ByLaunches(); },
                                          session->budget()));
  SetPair(samples, true, row);
  return {};
}

// --- tracing -----------------------------------------------------------------

// Seconds of a launch with `tracer` attached against the plain one.
Status MeasureTracing(BenchSession* session, const bench::Shape& shape,
                      bool is_on, BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(
      const bench::KvFixture* const fixture,
      session->Fixture(DType::kBF16, Heads{}, shape.num_blocks()));
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<bench::Workload> work,
      bench::Workload::Create(session->attention(), fixture, shape));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Tracer> tracer, Tracer::Create());
  Runtime* const runtime = session->runtime();
  const auto traced = [&]() -> Result<double> {
    runtime->SetTracer(tracer.get());
    if (!is_on) runtime->SetTracer(nullptr);
    Result<double> seconds = work->Run();
    runtime->SetTracer(nullptr);
    return seconds;
  };
  VARLANE_TOOLS_ASSIGN(
      const Samples samples,
      InterleaveMirrored(
          traced, [&] { return work->Run(); }, session->budget()));
  SetPair(samples, false, row);
  return {};
}

// --- idling and sharing ------------------------------------------------------

double ProcessCpuSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         static_cast<double>(now.tv_nsec) * 1e-9;
}

// CPU time of the whole process while nobody launches, in % of one core.
Status MeasureIdle(BenchSession* session, BenchRow* row) {
  std::vector<double> shares;
  for (int round = 0; round < 3; ++round) {
    VARLANE_TOOLS_TRY(
        session->runtime()->Launch(Grid{1000}, [](const Threadgroup&) {}));
    // What TBB's threads take to fall asleep is not idling.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double before = ProcessCpuSeconds();
    const Clock::time_point start = Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    shares.push_back((ProcessCpuSeconds() - before) / SecondsSince(start) *
                     100);
  }
  SetValues(shares, 0, row);
  return {};
}

// A process that never sleeps, on one CPU; stopped until resumed.
class BusyProcess {
 public:
  explicit BusyProcess(int cpu) : child_(fork()) {
    if (child_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    sched_setaffinity(0, sizeof(set), &set);
    while (true) asm volatile("");
  }
  ~BusyProcess() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  BusyProcess(const BusyProcess&) = delete;
  BusyProcess& operator=(const BusyProcess&) = delete;

  bool ok() const { return child_ > 0; }
  void Pause() const { kill(child_, SIGSTOP); }
  void Resume() const { kill(child_, SIGCONT); }

 private:
  pid_t child_;
};

// Throughput with a busy process on the last worker's core against none.
Status MeasureCoRunner(BenchSession* session, BenchRow* row) {
  Runtime* const runtime = session->runtime();
  const int cpu = runtime->PuOfWorker(runtime->num_workers() - 1);
  if (cpu < 0) {
    return Fail(StatusCode::kUnavailable, "workers are not pinned here");
  }
  const bench::Shape shape = {"decode", {{32, 1, 512}}};
  VARLANE_TOOLS_ASSIGN(
      const bench::KvFixture* const fixture,
      session->Fixture(DType::kBF16, Heads{}, shape.num_blocks()));
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<bench::Workload> work,
      bench::Workload::Create(session->attention(), fixture, shape));
  const BusyProcess other(cpu);
  if (!other.ok()) return Fail(StatusCode::kUnavailable, "cannot fork");
  // Launches a second, over many of the scheduler's time slices.
  const auto rate = [&]() -> Result<double> {
    constexpr double kWindow = 0.15;
    const Clock::time_point start = Clock::now();
    int launches = 0;
    while (SecondsSince(start) < kWindow) {
      VARLANE_TOOLS_TRY(work->Run().status());
      ++launches;
    }
    return launches / SecondsSince(start);
  };
  std::vector<double> ratios;
  std::vector<double> with;
  std::vector<double> without;
  for (int round = 0; round < session->budget().min_rounds; ++round) {
    other.Pause();
    VARLANE_TOOLS_ASSIGN(const double alone, rate());
    other.Resume();
    VARLANE_TOOLS_ASSIGN(const double shared, rate());
    with.push_back(shared);
    without.push_back(alone);
    ratios.push_back(shared / alone);
  }
  row->value = Median(with);
  row->limit = Median(without);
  SetRatios(ratios, 0, row);
  return {};
}

}  // namespace

void AddRuntimeRows(BenchSession* session) {
  AddLaunchRows(session);
  for (const int chains : {1, 4, kEmptyNodes}) {
    session->Add(
        MakeRow(fmt::format("graph of 64 empty nodes, {} chains", chains), "us",
                Sense::kValueAtMost, 40),
        [=](BenchRow* row) { return MeasureEmptyGraph(session, chains, row); });
  }
  const auto steps = [&](const char* name, const Heads& heads, int branches,
                         int seqs, int context, double must) {
    session->Add(
        MakeRow(name, "us", Sense::kRatioAtLeast, must), [=](BenchRow* row) {
          return MeasureSteps(session, heads, branches, seqs, context, row);
        });
  };
  steps("28-layer decode 1x1@128 as a graph", Heads{}, 1, 1, 128, 1);
  steps("28-layer decode 8x1@512 as a graph", Heads{}, 1, 8, 512, 1);
  steps("28 layers, 2 branches of decode 1x1@128, 8/1/128 heads",
        Heads{8, 1, 128}, 2, 1, 128, 1.15);
  steps("28 layers, 4 branches of decode 1x1@200, 8/1/128 heads",
        Heads{8, 1, 128}, 4, 1, 200, 1.15);
  for (const bench::Shape& shape :
       {bench::Shape{"decode 64x1@128", {{64, 1, 128}}},
        bench::Shape{"mixed 32x1@512 2x128@512",
                     {{32, 1, 512}, {2, 128, 512}}}}) {
    session->Add(
        MakeRow("tracing on, " + shape.name, "us", Sense::kRatioAtMost, 1.03),
        [=](BenchRow* row) {
          return MeasureTracing(session, shape, true, row);
        });
  }
  session->Add(
      MakeRow("tracing off again, decode 64x1@128", "us", Sense::kRatioAtMost,
              1.01),
      [=](BenchRow* row) {
        return MeasureTracing(session, {"decode", {{64, 1, 128}}}, false, row);
      });
  session->Add(MakeRow("idle runtime", "% CPU", Sense::kValueAtMost, 0.1),
               [=](BenchRow* row) { return MeasureIdle(session, row); });
  session->Add(MakeRow("decode 32x1@512 beside a busy process on one core",
                       "launches/s", Sense::kRatioAtLeast, 0.45),
               [=](BenchRow* row) { return MeasureCoRunner(session, row); });
}

}  // namespace varlane::tools
