// Runtime: this machine's topology and pinned workers, and the launch engine.
//
// The engine is general: attention runs on it, and a service can launch its
// own grids (norms, GEMMs) on the same workers. Layer 1.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_H_
#define VARLANE_RUNTIME_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "varlane/export.h"
#include "varlane/function_ref.h"
#include "varlane/status.h"
#include "varlane/trace.h"

namespace varlane {

enum class NumaPolicy : uint8_t {
  kAuto,  // one arena per NUMA node that has CPUs we may run on
  kOff,   // one arena for all
  // One arena per L3 of each such node, for CPUs with several. What is said of
  // nodes elsewhere then holds for these arenas: they are the homes of blocks,
  // sequences and threadgroups. Their blocks are in their NUMA node's memory.
  kL3,
};

enum class HugePages : uint8_t {
  kOff,          // base pages (4 KiB on x86)
  kTransparent,  // ask with madvise; take what comes
  kExplicit,     // hugetlb pool first, then transparent
};

// How a Runtime is built. Every field has an environment variable of the same
// meaning (`varlane info` lists them).
struct VARLANE_EXPORT RuntimeOptions {
  int num_threads = 0;   // workers, the caller included; 0 = one per core
  bool use_smt = false;  // count SMT siblings as cores
  bool pin = true;       // pin workers; off where the topology is not ours
  // Only these CPUs, as the kernel writes lists: "0-3,8". "" = all that
  // affinity and cpuset allow. Runtimes with disjoint lists share a machine
  // where they pin; otherwise it bounds the number of workers.
  std::string cpus;
  NumaPolicy numa = NumaPolicy::kAuto;
  HugePages huge_pages = HugePages::kTransparent;
  std::string simd_target;  // kernel table name; "" = best this CPU has
  std::string topology;     // "" = this machine; else XML file or synthetic,
                            // e.g. "numa:2 core:4 pu:1"

  // Runs a task on a thread of the service's own, some time. Where it is set,
  // launches get their helpers through it and no arena is made; e.g. for the
  // service's tbb::task_arena:
  //   [&](auto task) { arena.enqueue(std::move(task)); }
  // Each task must be run once, or the executor throw when it is given; it
  // must outlive the Runtime. Workers are then neither pinned nor cut up by
  // NUMA node: where they run is the service's business.
  using Executor = std::function<void(std::function<void()> task)>;
  Executor executor;

  // Reads VARLANE_*. Errors: kInvalidArgument naming variable and value.
  static Result<RuntimeOptions> FromEnvironment();
};

// One core the runtime may use. Indices are positions in Topology's vectors.
struct Core {
  int package = 0;
  int node = 0;
  int l3 = -1;  // -1: the machine shows none
  int l2 = -1;
  // On a hybrid CPU: its kind's rank, the fastest kind's highest; else 0.
  int speed = 0;
  std::vector<int> pus;  // OS indices of its hardware threads we may run on
};

struct NumaNode {
  int os_index = 0;
  int64_t memory_bytes = 0;  // local memory; 0 = a node without memory
  std::vector<int> cores;    // indices into Topology::cores: those that take
                             // their memory from here; may be empty
};

struct Cache {
  int level = 0;
  int64_t size_bytes = 0;
  std::vector<int> cores;
};

struct PageSize {
  int64_t bytes = 0;
  int64_t total = 0;  // explicit pages in the pool; 0 for the base size
  int64_t free = 0;
};

// What the runtime knows of the machine: a value, immutable once made, limited
// to the CPUs that affinity and cpuset allow.
struct VARLANE_EXPORT Topology {
  std::string source;  // "this machine", "xml:FILE" or "synthetic:STRING"
  bool is_this_machine = true;
  int num_packages = 0;
  int num_pus = 0;          // hardware threads we may run on
  int num_pus_machine = 0;  // hardware threads there are
  std::vector<NumaNode> nodes;
  std::vector<Core> cores;  // in node order
  // [nodes, nodes]: what memory of node j costs a core of node i, 10 being its
  // own node's. Empty where the machine does not tell.
  std::vector<int> distances;
  std::vector<Cache> l3;
  std::vector<Cache> l2;
  std::vector<PageSize> page_sizes;    // base size first
  std::string transparent_huge_pages;  // "always", "madvise", "never", ""
  std::vector<std::string> warnings;   // what could not be detected

  // Errors: kNotFound (unreadable file), kInvalidArgument (bad string, a CPU of
  // options.cpus that is not ours), kUnavailable (hwloc failed): detection
  // never fails silently.
  static Result<Topology> Detect(const RuntimeOptions& options);
};

// A launch's index space: flat, over-provisioned; surplus threadgroups return
// early. With several NUMA nodes `node_begin` may cut it into one contiguous
// range a node; each node's workers drain their own range first. Then they
// steal, from the nearest node on, where that wins: from a range that no worker
// of its own node is at, or that has at least as many unclaimed threadgroups as
// such workers. (What is left when there are fewer would be begun at home
// within one threadgroup's time; over remote memory it may take two.)
struct Grid {
  int64_t num_threadgroups = 0;
  std::span<const int64_t> node_begin = {};  // [nodes + 1] or empty
  // Workers claim what they run next before they run a threadgroup, while there
  // is enough for all, so that it can fetch the next one's data.
  bool claims_ahead = false;
};

// What a threadgroup's body sees. Valid during the call.
class Threadgroup {
 public:
  static constexpr int64_t kUnknown = -1;

  Threadgroup(int64_t index, int worker, int node, std::span<std::byte> scratch,
              bool (*is_cancelled)(const void*), const void* launch,
              int64_t next = kUnknown) noexcept
      : index_(index),
        next_(next),
        worker_(worker),
        node_(node),
        scratch_(scratch),
        cancelled_(is_cancelled),
        launch_(launch) {}

  int64_t index() const noexcept { return index_; }  // [0, num_threadgroups)
  // The index that this worker runs after this one, unless the launch is
  // cancelled; kUnknown where that is open still.
  int64_t next() const noexcept { return next_; }
  // [0, Runtime::num_workers()); no two concurrent bodies of one launch share
  // it, so per-worker accumulators indexed by it need no atomics.
  int worker() const noexcept { return worker_; }
  int node() const noexcept { return node_; }  // [0, Runtime::num_nodes())
  // Private to this body while it runs; 64-byte aligned, contents arbitrary,
  // at least LaunchOptions::scratch_bytes.
  std::span<std::byte> scratch() const noexcept { return scratch_; }
  // True once another body threw, a stop was asked for or the deadline passed:
  // long bodies may poll it and return.
  bool cancelled() const noexcept { return cancelled_(launch_); }

  // For traced bodies: what this threadgroup's slice says, or that it was
  // surplus, which is counted and has no slice. Nothing happens where the
  // launch is not traced.
  VARLANE_EXPORT void Annotate(const TraceNote& note) const noexcept;
  VARLANE_EXPORT void MarkSurplus() const noexcept;

 private:
  int64_t index_;
  int64_t next_;
  int worker_;
  int node_;
  std::span<std::byte> scratch_;
  bool (*cancelled_)(const void*);
  const void* launch_;
};

struct LaunchOptions {
  size_t scratch_bytes = 0;   // per worker
  std::stop_token stop = {};  // asking it to stop cancels the launch
  int max_workers = 0;        // 0 = all
  // Workers go to the open launch or graph of the highest priority, leaving
  // others between two threadgroups (two nodes of a graph); all but callers,
  // who stay with their own. E.g. decode 1, prefill 0.
  int priority = 0;
  // Cancels the launch when it passes before the last threadgroup has begun.
  std::chrono::steady_clock::time_point deadline =
      std::chrono::steady_clock::time_point::max();
  std::string_view name = {};  // of its slices in traces, and in logs
  // [num_workers] or empty: what each worker spent in bodies and between them
  // is added to its entry, for whoever wants to know the imbalance.
  std::span<double> worker_seconds = {};
  // Runs in place of the body where the launch is traced, so that the body
  // itself need not know: does the same and annotates.
  const FunctionRef<void(const Threadgroup&)>* traced_body = nullptr;
};

class LaunchGraph;  // varlane/graph.h

// Workers pinned to cores, one TBB arena per NUMA node (RuntimeOptions::numa),
// and scratch per worker.
//
// Threads: every member is safe from any thread, several launches at once and
//          launches from inside bodies included.
// Fork:    the child of a fork() must not use the parent's Runtime, but may
//          destroy it, or end.
// End:     destroy it when nobody launches any more. TBB's threads stay, with
//          the affinity the process had.
class VARLANE_EXPORT Runtime {
 public:
  // Errors: those of Topology::Detect; kInvalidArgument for a bad option, and
  //         for NumaPolicy::kL3 where the topology shows no L3.
  static Result<std::unique_ptr<Runtime>> Create(const RuntimeOptions& options);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const RuntimeOptions& options() const noexcept;
  const Topology& topology() const noexcept;
  int num_workers() const noexcept;
  int num_nodes() const noexcept;  // arenas
  // Worker w's arena; [0, num_nodes()).
  int NodeOfWorker(int worker) const noexcept;
  // Whose memory arena `node` uses: an index into Topology::nodes, its own
  // index where NUMA nodes have an arena each; -1 where one arena has all.
  int MemoryOfNode(int node) const noexcept;
  // OS index of the hardware thread worker w is pinned to; -1 = not pinned.
  int PuOfWorker(int worker) const noexcept;

  // Runs `body` once for every index of `grid`; returns when all have run.
  // The caller takes part as one worker.
  //
  // Errors:   kAborted when a body threw: the first exception's text; the rest
  //           of the grid is cancelled, and the runtime is as good as new.
  //           kCancelled when options.stop asked. kDeadlineExceeded when
  //           options.deadline passed. kResourceExhausted when scratch cannot
  //           be had. kInvalidArgument for a bad grid. What a failed launch
  //           wrote is unspecified.
  // Cost:     warm, one threadgroup runs inline in the caller; no allocation
  //           once every worker has had its scratch.
  Status Launch(const Grid& grid, FunctionRef<void(const Threadgroup&)> body,
                const LaunchOptions& options = {});

  // Runs every node of `graph`, each when those before it are done; returns
  // when all are. `args` is what the nodes' bodies are given. The caller takes
  // part as one worker. Of `options`, scratch_bytes is the least of any node.
  //
  // Errors:  as Launch, with the node's name; those that Prepare and host
  //          functions return; kFailedPrecondition for a graph not built. The
  //          first failure cancels all nodes; the next run is right.
  // Threads: runs of one graph may overlap, where its nodes' memory allows.
  // Cost:    warm, no allocation; docs/graphs.md has figures.
  Status Run(const LaunchGraph& graph, void* args = nullptr,
             const LaunchOptions& options = {});

  // Launches and graphs that begin from now on record into `tracer`; null ends
  // that. It must outlive those that began meanwhile.
  void SetTracer(Tracer* tracer) noexcept;

  // Runs `body` once on a worker pinned to `node` (first touch, without any
  // privilege); returns when done. Errors: as Launch.
  Status RunOnNode(int node, FunctionRef<void()> body);

 private:
  class Impl;
  explicit Runtime(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace varlane

#endif  // VARLANE_RUNTIME_H_
