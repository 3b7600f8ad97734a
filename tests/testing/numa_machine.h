// Fixture of the tests of a machine with several NUMA nodes.
//
// tests/numa/run_numa_machine.py runs them on virtual ones; on a machine with
// one node every case is skipped.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_NUMA_MACHINE_H_
#define VARLANE_TESTS_TESTING_NUMA_MACHINE_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"
#include "varlane/log.h"
#include "varlane/runtime.h"

namespace varlane::testing {

// Which of its layouts run_numa_machine.py built; null on a real machine.
inline const char* VirtualMachine() {
  return std::getenv("VARLANE_NUMA_MACHINE");
}

// Of every pool here. A block is a whole number of pages.
inline constexpr KvLayout kNumaLayout = {.dtype = DType::kBF16,
                                         .num_layers = 1,
                                         .num_kv_heads = 4,
                                         .head_size = 64,
                                         .v_head_size = 64,
                                         .block_size = 16};

class NumaMachine : public ::testing::Test {
 protected:
  void SetUp() override {
    runtime_ = MakeRuntime(RuntimeOptions());
    ASSERT_NE(runtime_, nullptr);
    if (topology().nodes.size() > 1) return;
    // The virtual machines have several: not to find them is no reason to skip.
    ASSERT_EQ(VirtualMachine(), nullptr) << "one node was found";
    GTEST_SKIP() << "this machine has one NUMA node";
  }
  void TearDown() override { SetLog({}); }

  // All nodes as one.
  static std::unique_ptr<Runtime> OneNodeRuntime(int num_threads) {
    RuntimeOptions options;
    options.num_threads = num_threads;
    options.numa = NumaPolicy::kOff;
    return MakeRuntime(options);
  }

  Runtime* runtime() const { return runtime_.get(); }
  const Topology& topology() const { return runtime_->topology(); }
  int OsNode(int node) const {
    return topology().nodes[static_cast<size_t>(node)].os_index;
  }
  // Whether the layout's heads can be sharded over the nodes.
  bool CanShard() const {
    return kNumaLayout.num_kv_heads % runtime_->num_nodes() == 0;
  }

 private:
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_NUMA_MACHINE_H_
