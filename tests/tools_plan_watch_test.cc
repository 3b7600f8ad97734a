// varlane plan --watch: a line for each change, and two ways to end.
//
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "tests/testing/machine_fixture.h"

namespace varlane {
namespace {

using namespace testing;  // NOLINT(*using-namespace*)

class PlanWatchTest : public MachineTest {
 protected:
  void SetUp() override {
    MachineTest::SetUp();
    Write("/proc/self/cgroup", "0::/a\n");
    Write("/proc/self/mountinfo", kV2Mount);
    V2("/sys/fs/cgroup/a", 16 * kGiB, kGiB);
  }
  void TearDown() override {
    if (child_ > 0) kill(child_, SIGKILL);
    if (child_ > 0) waitpid(child_, nullptr, 0);
    MachineTest::TearDown();
  }

  void Start(const std::string& for_seconds) {
    child_ = fork();
    if (child_ != 0) return;
    const int fd = open((root_ + "/out").c_str(), O_WRONLY | O_CREAT, 0600);
    dup2(fd, 1);
    dup2(fd, 2);
    unsetenv("MEMORY_PRESSURE_WATCH");
    execl(VARLANE_CLI_PATH, "varlane", "plan", "--watch", "--interval", "0.02",
          "--for", for_seconds.c_str(), "--fraction", "0.5", "--memory-root",
          root_.c_str(), nullptr);
    _exit(97);
  }
  std::string Output() const {
    std::ifstream in(root_ + "/out");
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  // Waits until `text` was printed.
  void Expect(const std::string& text) {
    for (int i = 0; i < 1000; ++i) {
      if (Output().find(text) != std::string::npos) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ADD_FAILURE() << "no \"" << text << "\" in\n" << Output();
  }
  int Join() {
    int status = -1;
    waitpid(child_, &status, 0);
    child_ = -1;
    return status;
  }
  int Count(const std::string& text) const {
    const std::string output = Output();
    int count = 0;
    for (size_t at = 0; (at = output.find(text, at)) != std::string::npos;
         ++at) {
      ++count;
    }
    return count;
  }

  pid_t child_ = -1;
};

TEST_F(PlanWatchTest, EachChangeIsALineAndSigintEndsIt) {
  Start("600");
  Expect("pressure none");
  Expect("cgroup v2 memory.max /a: limit 16");
  Expect("plan granted: 8");
  V2("/sys/fs/cgroup/a", 4 * kGiB, kGiB);
  Expect("cgroup v2 memory.max /a: limit 4");
  Expect("plan granted: 2");
  V2("/sys/fs/cgroup/a", 4 * kGiB, 4 * kGiB - kMiB);
  Expect("pressure critical (cgroup v2 memory.max /a: 1 MiB available)");
  Expect("plan refused: claim of 0.50 x 4 GiB");
  V2("/sys/fs/cgroup/a", -1, kGiB);
  Expect("cgroup v2 memory.max /a: gone");
  Expect("plan granted: 32");
  kill(child_, SIGINT);
  EXPECT_EQ(Join(), 0) << "an end by signal is no failure";
  EXPECT_EQ(Count("pressure none"), 2);
  EXPECT_EQ(Count("host RAM: limit"), 1) << Output();
}

TEST_F(PlanWatchTest, ItEndsByItselfAndSaysWhatItListensTo) {
  Start("0.2");
  EXPECT_EQ(Join(), 0);
  EXPECT_EQ(Count("not listening to PSI"), 4) << Output();
  EXPECT_EQ(Count("  listening to MemAvailable every 500 ms"), 1);
  EXPECT_EQ(Count("plan granted"), 1) << "nothing has changed";
}

}  // namespace
}  // namespace varlane
