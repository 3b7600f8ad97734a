// The built `varlane` command, run as a user runs it.
//
// For the tests of the layer tools, which know VARLANE_CLI_PATH.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_CLI_H_
#define VARLANE_TESTS_TESTING_CLI_H_

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <string>

#include "tests/testing/files.h"

namespace varlane::testing {

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// A folder of its own for each test, and the command.
class CliTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.file(name); }
  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = Path(name);
    WriteWholeFile(path, text);
    return path;
  }

  // `arguments` goes through the shell; paths of ours need no quotes.
  Outcome Varlane(const std::string& arguments) const {
    const std::string command = std::string(VARLANE_CLI_PATH) + " " +
                                arguments + " >" + Path("stdout") + " 2>" +
                                Path("stderr") + " </dev/null";
    const int status = system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1,
            ReadWholeFile(Path("stdout")), ReadWholeFile(Path("stderr"))};
  }

  // The text that it writes to --json; it must end well.
  std::string JsonOf(const std::string& arguments) const {
    const Outcome outcome = Varlane(arguments + " --json " + Path("json"));
    EXPECT_EQ(outcome.exit_code, 0) << arguments << "\n"
                                    << outcome.out << outcome.err;
    return ReadWholeFile(Path("json"));
  }

  // One line on stderr that starts with "varlane: " and holds `message`.
  void ExpectRefusal(const std::string& arguments, int exit_code,
                     const std::string& message) const {
    const Outcome outcome = Varlane(arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments << outcome.err;
    EXPECT_EQ(outcome.err.substr(0, 9), "varlane: ") << arguments;
    EXPECT_NE(outcome.err.find(message), std::string::npos) << arguments << "\n"
                                                            << outcome.err;
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
  }

  // The command finds two NUMA nodes, until the test has ended.
  void FindTwoNodes() {
    ASSERT_EQ(setenv("VARLANE_TOPOLOGY", "numa:2 core:1 pu:1", 1), 0);
  }
  void TearDown() override { unsetenv("VARLANE_TOPOLOGY"); }

 private:
  TemporaryFolder folder_;
};

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_CLI_H_
