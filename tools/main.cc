// varlane: the command line of the library.
//
// Exit codes: 0 done, 1 refused or failed, 2 wrong command line. Errors are one
// line on stderr.
// SPDX-License-Identifier: Apache-2.0

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>

#include "tools/flags.h"
#include "varlane/version.h"

namespace varlane::tools {
namespace {

constexpr int kExitOk = 0;
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

void PrintError(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::fprintf(stderr, "varlane: %s\n", message.c_str());
}

// CLI11 would only say that a subcommand is required.
void RefuseUnknownCommand(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string names;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == argv[1]) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  ThrowUsage("\"" + std::string(argv[1]) + "\" is not a command: " + names);
}

int ParseAndRun(int argc, char** argv) {
  CLI::App app("Varlane: varlen paged attention on CPUs", "varlane");
  app.footer(
      "Examples:\n"
      "  varlane info\n"
      "  varlane plan --model Qwen3-0.6B\n"
      "  varlane replay --demo\n"
      "`varlane COMMAND --help` explains each command.");
  app.set_version_flag("--version", VersionString());
  app.require_subcommand(1);
  Run run;
  AddInfoCommand(&app, &run);
  AddPlanCommand(&app, &run);
  AddAttendCommand(&app, &run);
  AddReplayCommand(&app, &run);
  AddStressCommand(&app, &run);
  AddTraceCommand(&app, &run);
  AddBenchCommand(&app, &run);
  try {
    RefuseUnknownCommand(app, argc, argv);
    app.parse(argc, argv);
    const Status status = run();
    if (status.ok()) return kExitOk;
    PrintError(std::string(status.message()));
    return kExitFailed;
  } catch (const CLI::ParseError& error) {
    // Help and version are "errors" with code 0 that CLI11 prints itself.
    if (error.get_exit_code() == 0) return app.exit(error);
    PrintError(std::string(error.what()) + " (see varlane --help)");
    return kExitUsage;
  }
}

}  // namespace
}  // namespace varlane::tools

int main(int argc, char** argv) {
  try {
    return varlane::tools::ParseAndRun(argc, argv);
  } catch (const std::exception& error) {
    varlane::tools::PrintError(std::string("failed: ") + error.what());
    return varlane::tools::kExitFailed;
  }
}
