// Runtimes of so many threads, or over a machine that is not there.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_RUNTIMES_H_
#define VARLANE_TESTS_TESTING_RUNTIMES_H_

#include <memory>
#include <string>
#include <utility>

#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane::testing {

// A machine of `num_nodes` NUMA nodes, for RuntimeOptions::topology.
inline std::string NodesTopology(int num_nodes, int cores_of_node = 1) {
  return "numa:" + std::to_string(num_nodes) +
         " core:" + std::to_string(cores_of_node) + " pu:1";
}

// Null, and the test fails, where there can be none.
inline std::unique_ptr<Runtime> MakeRuntime(const RuntimeOptions& options) {
  Result<std::unique_ptr<Runtime>> runtime = Runtime::Create(options);
  EXPECT_TRUE(IsOk(runtime));
  return runtime.ok() ? *std::move(runtime) : nullptr;
}
inline std::unique_ptr<Runtime> MakeRuntime(int num_threads,
                                            const std::string& topology = "") {
  RuntimeOptions options;
  options.num_threads = num_threads;
  options.topology = topology;
  return MakeRuntime(options);
}

// One worker that is not pinned.
inline std::unique_ptr<Runtime> MakeOneWorker() {
  RuntimeOptions options;
  options.num_threads = 1;
  options.pin = false;
  return MakeRuntime(options);
}
// The same, made once for all tests of a program.
inline Runtime* OneWorker() {
  static const std::unique_ptr<Runtime> runtime = MakeOneWorker();
  return runtime.get();
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_RUNTIMES_H_
