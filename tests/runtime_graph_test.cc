// Proves what a graph promises: every node after those before it, every index
// once, independent nodes at once, and failures that leave nothing behind.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using testing::MakeRuntime;

std::string Numbered(const char* name, int number) {
  return std::string(name).append(std::to_string(number));
}

GraphNode Added(Result<GraphNode> node) {
  EXPECT_TRUE(testing::IsOk(node));
  return node.ok() ? *node : GraphNode{};
}

// A random graph over a shared clock: each node notes when its first body began
// and its last one ended, and how often each index ran.
class RandomGraph {
 public:
  RandomGraph(uint64_t seed, int num_nodes) : random_(seed) {
    for (int i = 0; i < num_nodes; ++i) {
      auto& node = nodes_.emplace_back(std::make_unique<Node>());
      node->num_threadgroups = Draw(0, 3) == 0 ? Draw(0, 200) : Draw(0, 3);
      node->counts = std::vector<std::atomic<int>>(
          static_cast<size_t>(node->num_threadgroups));
      std::vector<GraphNode> after;
      for (int j = 0; j < i; ++j) {
        if (Draw(0, i) > 2) continue;
        after.push_back(handles_[static_cast<size_t>(j)]);
        node->before.push_back(j);
      }
      handles_.push_back(Add(*node, i, after));
    }
    EXPECT_TRUE(testing::IsOk(graph_.Build()));
  }

  const LaunchGraph& graph() const { return graph_; }

  void Clear() {
    clock_ = 0;
    for (const auto& node : nodes_) {
      node->first = std::numeric_limits<int>::max();
      node->last = -1;
      node->ran = 0;
      for (std::atomic<int>& count : node->counts) count = 0;
    }
  }

  // After one run.
  void ExpectRight() const {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = *nodes_[i];
      const bool is_host = node.num_threadgroups == 0;
      EXPECT_EQ(node.ran, is_host ? 1 : node.num_threadgroups) << "node " << i;
      for (const std::atomic<int>& count : node.counts) {
        EXPECT_EQ(count.load(), 1) << "node " << i;
      }
      for (const int j : node.before) {
        EXPECT_LT(nodes_[static_cast<size_t>(j)]->last, node.first)
            << "node " << i << " did not wait for " << j;
      }
    }
  }

 private:
  struct Node {
    int num_threadgroups = 0;  // 0: a host function
    std::vector<int> before;
    std::vector<std::atomic<int>> counts;
    std::atomic<int> first = 0;
    std::atomic<int> last = 0;
    std::atomic<int> ran = 0;
  };

  int Draw(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random_);
  }

  void Note(Node* node) {
    const int begin = clock_.fetch_add(1);
    node->ran.fetch_add(1);
    const int end = clock_.fetch_add(1);
    int seen = node->first.load();
    while (begin < seen && !node->first.compare_exchange_weak(seen, begin)) {
    }
    seen = node->last.load();
    while (end > seen && !node->last.compare_exchange_weak(seen, end)) {
    }
  }

  GraphNode Add(Node& node, int i, const std::vector<GraphNode>& after) {
    const std::string name = Numbered("node", i);
    if (node.num_threadgroups == 0) {
      return Added(graph_.AddHost(
          name,
          [this, &node](void*) {
            Note(&node);
            return Status();
          },
          after));
    }
    return Added(graph_.AddLaunch(
        name, node.num_threadgroups,
        [this, &node](const Threadgroup& group, void*) {
          node.counts[static_cast<size_t>(group.index())].fetch_add(1);
          Note(&node);
        },
        after));
  }

  std::mt19937_64 random_;
  LaunchGraph graph_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<GraphNode> handles_;
  std::atomic<int> clock_ = 0;
};

TEST(GraphTest, NodesWaitForThoseBeforeThemAndEveryIndexRunsOnce) {
  for (const int threads : {1, 2, 4}) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    for (uint64_t seed = 0; seed < 30; ++seed) {
      RandomGraph random(seed, static_cast<int>(seed * 2));
      for (int repeat = 0; repeat < 10; ++repeat) {
        random.Clear();
        VARLANE_ASSERT_OK(runtime->Run(random.graph()));
        random.ExpectRight();
      }
    }
  }
}

TEST(GraphTest, ArgumentsAreThoseOfTheRun) {
  struct Args {
    int64_t num_threadgroups;
    std::vector<int> out;
  };
  // Its grid is the run's, too.
  class Fill final : public GraphLaunch {
   public:
    Status Prepare(void* args, GraphGrid* grid) override {
      args_ = static_cast<Args*>(args);
      *grid = {.grid = {args_->num_threadgroups}, .scratch_bytes = 100};
      return {};
    }
    void Run(const Threadgroup& group) override {
      EXPECT_GE(group.scratch().size(), 100u);
      args_->out[static_cast<size_t>(group.index())] += 1;
    }

   private:
    Args* args_ = nullptr;
  };
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  ASSERT_NE(runtime, nullptr);
  LaunchGraph graph;
  const GraphNode first =
      Added(graph.AddLaunch("fill", [] { return std::make_unique<Fill>(); }));
  const std::array<GraphNode, 1> after = {first};
  Added(graph.AddLaunch(
      "double", 1,
      [](const Threadgroup&, void* args) {
        for (int& value : static_cast<Args*>(args)->out) value *= 2;
      },
      after));
  VARLANE_ASSERT_OK(graph.Build());
  for (const int64_t n : {5, 0, 300, 1}) {
    Args args = {n, std::vector<int>(static_cast<size_t>(n))};
    VARLANE_ASSERT_OK(runtime->Run(graph, &args));
    EXPECT_EQ(args.out, std::vector<int>(static_cast<size_t>(n), 2));
  }
}

TEST(GraphTest, CopiesCopyEveryByte) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  ASSERT_NE(runtime, nullptr);
  LaunchGraph graph;
  Added(graph.AddCopy(
      "copy", [](void* args) { return *static_cast<GraphCopy*>(args); }));
  VARLANE_ASSERT_OK(graph.Build());
  for (const size_t bytes : {0, 1, 262143, 262144, 262145, 3000001}) {
    std::vector<unsigned char> from(bytes);
    std::iota(from.begin(), from.end(), 3);
    std::vector<unsigned char> to(bytes + 1, 77);
    GraphCopy copy = {to.data(), from.data(), static_cast<int64_t>(bytes)};
    VARLANE_ASSERT_OK(runtime->Run(graph, &copy));
    EXPECT_TRUE(std::equal(from.begin(), from.end(), to.begin()));
    EXPECT_EQ(to.back(), 77);
  }
  GraphCopy bad = {nullptr, nullptr, 5};
  const Status refused = runtime->Run(graph, &bad);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "node \"copy\": to is null");
}

TEST(GraphTest, IndependentNodesRunAtTheSameTime) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  std::atomic<int> arrived = 0;
  const auto meet = [&] {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(60);
    arrived.fetch_add(1);
    while (arrived.load() < 4 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  };
  LaunchGraph graph;
  for (int i = 0; i < 3; ++i) {
    Added(graph.AddLaunch(Numbered("launch", i), 1,
                          [&](const Threadgroup&, void*) { meet(); }));
  }
  Added(graph.AddHost("host", [&](void*) {
    meet();
    return Status();
  }));
  VARLANE_ASSERT_OK(graph.Build());
  for (int repeat = 0; repeat < 20; ++repeat) {
    arrived = 0;
    VARLANE_ASSERT_OK(runtime->Run(graph));
    EXPECT_EQ(arrived.load(), 4);
  }
}

// A worker that was sent away for want of work must be sent for again.
TEST(GraphTest, WorkersComeBackAfterALongSerialNode) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  std::atomic<int> arrived = 0;
  LaunchGraph graph;
  std::vector<GraphNode> after;
  for (int i = 0; i < 4; ++i) {
    after = {Added(graph.AddHost(
        "serial",
        [&](void*) {
          arrived = 0;
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
          return Status();
        },
        after))};
    after = {Added(graph.AddLaunch(
        "wide", 4,
        [&](const Threadgroup&, void*) {
          const auto deadline =
              std::chrono::steady_clock::now() + std::chrono::seconds(60);
          arrived.fetch_add(1);
          while (arrived.load() < 4 &&
                 std::chrono::steady_clock::now() < deadline) {
            std::this_thread::yield();
          }
        },
        after))};
  }
  VARLANE_ASSERT_OK(graph.Build());
  VARLANE_ASSERT_OK(runtime->Run(graph));
  EXPECT_EQ(arrived.load(), 4);
}

TEST(GraphTest, BodiesOfOneNodeNeverShareAWorker) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  LaunchGraph graph;
  std::array<std::atomic<int>, 4> busy = {};
  for (int i = 0; i < 10; ++i) {
    Added(graph.AddLaunch(
        "n", 500,
        [&](const Threadgroup& group, void*) {
          std::atomic<int>& mine = busy[static_cast<size_t>(group.worker())];
          EXPECT_EQ(mine.fetch_add(1), 0);
          std::memset(group.scratch().data(), 1, 64);
          mine.fetch_sub(1);
        },
        {}, 64));
  }
  VARLANE_ASSERT_OK(graph.Build());
  VARLANE_ASSERT_OK(runtime->Run(graph));
  VARLANE_ASSERT_OK(runtime->Run(graph, nullptr, {.max_workers = 2}));
  VARLANE_ASSERT_OK(runtime->Run(graph, nullptr, {.max_workers = 1}));
}

TEST(GraphTest, HigherPriorityBeginsFirst) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(1);
  ASSERT_NE(runtime, nullptr);
  LaunchGraph graph;
  std::string order;
  for (const char* name : {"a", "b", "c", "d"}) {
    const GraphNode node = Added(graph.AddHost(name, [&order, name](void*) {
      order += name;
      return Status();
    }));
    VARLANE_ASSERT_OK(
        graph.SetPriority(node, *name == 'c' ? 5 : (*name == 'b' ? -1 : 0)));
  }
  VARLANE_ASSERT_OK(graph.Build());
  VARLANE_ASSERT_OK(runtime->Run(graph));
  EXPECT_EQ(order, "cadb");
}

TEST(GraphTest, BadGraphsAreRefusedByName) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  ASSERT_NE(runtime, nullptr);
  const auto nothing = [](void*) { return Status(); };
  LaunchGraph graph;
  LaunchGraph other;
  const GraphNode a = Added(graph.AddHost("a", nothing));
  const std::array<GraphNode, 2> foreign = {a,
                                            Added(other.AddHost("x", nothing))};
  const Result<GraphNode> refused = graph.AddHost("b", nothing, foreign);
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      refused.status().message(),
      "after[1] of node \"b\" is node 0 of another graph, not of this one");
  EXPECT_EQ(graph.num_nodes(), 1) << "a refused node is not added";
  EXPECT_EQ(graph.AddDependency(GraphNode{}, a).message(),
            "before is node -1 of no graph, not of this one");
  EXPECT_EQ(graph.AddDependency({graph.id(), 7}, a).message(),
            "before is node 7, but the graph has 1");
  EXPECT_EQ(graph.AddHost("empty", nullptr).status().message(),
            "node \"empty\" has nothing to run");

  EXPECT_EQ(runtime->Run(graph).code(), StatusCode::kFailedPrecondition);
  const std::array<GraphNode, 1> after_a = {a};
  const GraphNode b = Added(graph.AddHost("b", nothing, after_a));
  const std::array<GraphNode, 1> after_b = {b};
  const GraphNode c = Added(graph.AddHost("c", nothing, after_b));
  VARLANE_ASSERT_OK(graph.AddDependency(c, b));
  const Status cycle = graph.Build();
  EXPECT_EQ(cycle.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cycle.message(), "the graph has a cycle: \"b\" -> \"c\" -> \"b\"");
  EXPECT_EQ(runtime->Run(graph).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(graph.name(b), "b");
  EXPECT_EQ(graph.name(foreign[1]), "");

  VARLANE_ASSERT_OK(other.AddDependency(foreign[1], foreign[1]));
  EXPECT_EQ(other.Build().message(), "the graph has a cycle: \"x\" -> \"x\"");
}

TEST(GraphTest, ABuiltGraphStaysAsItIsAndAnEmptyOneRuns) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  ASSERT_NE(runtime, nullptr);
  LaunchGraph graph;
  VARLANE_ASSERT_OK(graph.Build());
  VARLANE_ASSERT_OK(graph.Build());
  VARLANE_EXPECT_OK(runtime->Run(graph));
  EXPECT_EQ(
      graph.AddHost("late", [](void*) { return Status(); }).status().code(),
      StatusCode::kFailedPrecondition);
  EXPECT_EQ(runtime->Run(graph, nullptr, {.max_workers = -1}).code(),
            StatusCode::kInvalidArgument);
}

// Counts what each Prepare was told in the end.
struct Ledger {
  std::atomic<int> prepared = 0;
  std::atomic<int> completed = 0;
  std::atomic<int> abandoned = 0;
};

class Counted final : public GraphLaunch {
 public:
  Counted(Ledger* ledger, int node) : ledger_(ledger), node_(node) {}
  Status Prepare(void* args, GraphGrid* grid) override {
    const int bad = *static_cast<int*>(args);
    if (bad == node_ * 100) throw std::runtime_error("in Prepare");
    if (bad == node_ * 100 + 1) {
      return {StatusCode::kOutOfRange, "by Prepare"};
    }
    bad_index_ = bad - node_ * 100 - 2;
    grid->grid.num_threadgroups = 8;
    ledger_->prepared.fetch_add(1);
    return {};
  }
  void Run(const Threadgroup& group) override {
    if (group.index() == bad_index_) throw std::runtime_error("in Run");
  }
  void Done(bool complete) noexcept override {
    (complete ? ledger_->completed : ledger_->abandoned).fetch_add(1);
  }

 private:
  Ledger* ledger_;
  int node_;
  int bad_index_ = -1;
};

TEST(GraphTest, AFailureAnywhereSurfacesOnceAndTheNextRunIsRight) {
  constexpr int kNodes = 12;
  for (const int threads : {1, 2, 4}) {
    const std::unique_ptr<Runtime> runtime = MakeRuntime(threads);
    ASSERT_NE(runtime, nullptr);
    Ledger ledger;
    LaunchGraph graph;
    std::vector<GraphNode> nodes;
    std::vector<std::string> names;  // as messages have them
    for (int i = 0; i < kNodes; ++i) {
      std::string& name = names.emplace_back("node \"n");
      name.append(std::to_string(i)).append("\"");
      std::vector<GraphNode> after;
      if (i >= 3) after.push_back(nodes[static_cast<size_t>(i - 3)]);
      if (i >= 4) after.push_back(nodes[static_cast<size_t>(i - 4)]);
      nodes.push_back(Added(graph.AddLaunch(
          Numbered("n", i),
          [&ledger, i] { return std::make_unique<Counted>(&ledger, i); },
          after)));
    }
    VARLANE_ASSERT_OK(graph.Build());
    for (int node = 0; node < kNodes; ++node) {
      for (int place = 0; place < 10; ++place) {
        int bad = node * 100 + place;
        const Status status = runtime->Run(graph, &bad);
        const std::string message(status.message());
        EXPECT_EQ(status.code(),
                  place == 1 ? StatusCode::kOutOfRange : StatusCode::kAborted)
            << message;
        EXPECT_EQ(message.rfind(names[static_cast<size_t>(node)], 0), 0u)
            << message;
        EXPECT_EQ(ledger.completed + ledger.abandoned, ledger.prepared);
        bad = -1;
        const int before = ledger.completed;
        VARLANE_ASSERT_OK(runtime->Run(graph, &bad));
        EXPECT_EQ(ledger.completed - before, kNodes);
        EXPECT_EQ(ledger.completed + ledger.abandoned, ledger.prepared);
      }
    }
  }
}

TEST(GraphTest, AStopOrADeadlineCancelsTheRest) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  ASSERT_NE(runtime, nullptr);
  std::stop_source stop;
  std::atomic<bool> asks = true;
  std::atomic<int> ran = 0;
  LaunchGraph graph;
  std::vector<GraphNode> after;
  for (int i = 0; i < 20; ++i) {
    after = {Added(graph.AddLaunch(
        "n", 50,
        [&, i](const Threadgroup& group, void*) {
          ran.fetch_add(1);
          if (i == 5 && group.index() == 20 && asks) stop.request_stop();
          if (!asks) std::this_thread::sleep_for(std::chrono::microseconds(50));
        },
        after))};
  }
  VARLANE_ASSERT_OK(graph.Build());
  EXPECT_EQ(runtime->Run(graph, nullptr, {.stop = stop.get_token()}).code(),
            StatusCode::kCancelled);
  EXPECT_LT(ran.load(), 7 * 50);
  asks = false;
  ran = 0;
  LaunchOptions late;
  late.deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(3);
  EXPECT_EQ(runtime->Run(graph, nullptr, late).code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_LT(ran.load(), 20 * 50);
  ran = 0;
  late.deadline = std::chrono::steady_clock::now() + std::chrono::hours(1);
  VARLANE_EXPECT_OK(runtime->Run(graph, nullptr, late));
  EXPECT_EQ(ran.load(), 20 * 50);
}

TEST(GraphTest, ADeadlineEndsAGraphOfHostFunctionsToo) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  ASSERT_NE(runtime, nullptr);
  std::atomic<int> ran = 0;
  LaunchGraph graph;
  std::vector<GraphNode> after;
  for (int i = 0; i < 200; ++i) {
    after = {Added(graph.AddHost(
        "h",
        [&](void*) {
          ran.fetch_add(1);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return Status();
        },
        after))};
  }
  VARLANE_ASSERT_OK(graph.Build());
  LaunchOptions late;
  late.deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  EXPECT_EQ(runtime->Run(graph, nullptr, late).code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_LT(ran.load(), 200);
}

TEST(GraphTest, RunsOverlapNestAndMixWithLaunches) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(4);
  ASSERT_NE(runtime, nullptr);
  struct Args {
    std::atomic<int> sum = 0;
  };
  LaunchGraph inner;
  Added(inner.AddLaunch("i", 20, [](const Threadgroup&, void* args) {
    static_cast<Args*>(args)->sum.fetch_add(1);
  }));
  VARLANE_ASSERT_OK(inner.Build());
  LaunchGraph outer;
  std::vector<GraphNode> after;
  for (int i = 0; i < 3; ++i) {
    const GraphNode node = Added(outer.AddLaunch(
        "o", 5,
        [&](const Threadgroup&, void* args) {
          VARLANE_EXPECT_OK(runtime->Run(inner, args));
          VARLANE_EXPECT_OK(runtime->Launch({4}, [&](const Threadgroup&) {
            static_cast<Args*>(args)->sum.fetch_add(1);
          }));
        },
        after));
    after = {node};
  }
  VARLANE_ASSERT_OK(outer.Build());
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        Args args;
        VARLANE_EXPECT_OK(runtime->Run(outer, &args));
        EXPECT_EQ(args.sum.load(), 3 * 5 * 24);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(GraphTest, OneGraphRunsOnRuntimesOfDifferentNodes) {
  const std::unique_ptr<Runtime> one = MakeRuntime(2);
  const std::unique_ptr<Runtime> two = MakeRuntime(4, "numa:2 core:2 pu:1");
  ASSERT_NE(one, nullptr);
  ASSERT_NE(two, nullptr);
  RandomGraph random(3, 20);
  for (int i = 0; i < 10; ++i) {
    for (Runtime* const runtime : {one.get(), two.get()}) {
      random.Clear();
      VARLANE_ASSERT_OK(runtime->Run(random.graph()));
      random.ExpectRight();
    }
  }
}

}  // namespace
}  // namespace varlane
