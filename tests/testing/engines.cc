// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/engines.h"

#include <utility>

#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"

#if defined(__SANITIZE_ADDRESS__)
// What TBB keeps of an observer is freed by the last worker to leave: on a busy
// machine that is after main, when leaks are looked for.
extern "C" const char* __lsan_default_suppressions() {
  return "leak:tbb::detail::r1::observe\n";
}
#endif

namespace varlane::testing {

Engine MakeEngine(const RuntimeOptions& options) {
  Engine engine = {MakeRuntime(options), nullptr};
  if (engine.runtime == nullptr) return engine;
  auto attention = Attention::Create(engine.runtime.get());
  EXPECT_TRUE(IsOk(attention));
  if (attention.ok()) engine.attention = std::move(attention).value();
  return engine;
}

Engine MakeEngine(int threads, const std::string& simd) {
  RuntimeOptions options;
  options.num_threads = threads;
  options.simd_target = simd;
  return MakeEngine(options);
}

Engine MakeNodes(int num_nodes, int cores_of_node) {
  RuntimeOptions options;
  options.topology = NodesTopology(num_nodes, cores_of_node);
  return MakeEngine(options);
}

Engine MakeL3Arenas(int l3s_of_node) {
  RuntimeOptions options;
  options.topology =
      "numa:2 l3:" + std::to_string(l3s_of_node) + " core:1 pu:1";
  options.numa = NumaPolicy::kL3;
  return MakeEngine(options);
}

Engine MakeCaches(int64_t bytes, const std::string& simd) {
  RuntimeOptions options;
  options.topology = "l3:1(size=" + std::to_string(bytes) + ") core:2 pu:1";
  options.simd_target = simd;
  return MakeEngine(options);
}

Engine MakeSmallCaches(const std::string& simd) {
  return MakeCaches(4096, simd);
}

const std::vector<Engine>& EnginesOfAllTargets() {
  static const std::vector<Engine> engines = [] {
    std::vector<Engine> all;
    for (const std::string& target : SupportedSimdTargets()) {
      all.push_back(MakeEngine(2, target));
      EXPECT_EQ(all.back().attention->simd_target(), target);
    }
    return all;
  }();
  return engines;
}

}  // namespace varlane::testing
