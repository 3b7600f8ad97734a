// Runtimes with attention on them.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_ENGINES_H_
#define VARLANE_TESTS_TESTING_ENGINES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "varlane/attention.h"
#include "varlane/runtime.h"

namespace varlane::testing {

// A runtime and the operation on it; `simd` "" = best.
struct Engine {
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Attention> attention;
};
Engine MakeEngine(const RuntimeOptions& options);
Engine MakeEngine(int threads, const std::string& simd = "");
// On so many NUMA nodes.
Engine MakeNodes(int num_nodes, int cores_of_node = 1);
// On two nodes, with an arena for each of their L3s.
Engine MakeL3Arenas(int l3s_of_node);
// Two cores whose L3 holds so many bytes.
Engine MakeCaches(int64_t bytes, const std::string& simd = "");
// 4 KiB: less than any launch reads and writes.
Engine MakeSmallCaches(const std::string& simd);
// One engine per supported target, made once; 2 workers.
const std::vector<Engine>& EnginesOfAllTargets();

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_ENGINES_H_
