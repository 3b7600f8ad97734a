// Options that several subcommands share, and how a subcommand is registered.
//
// A subcommand's file declares its options in Add<Name>Command and leaves a
// function in *run when it was chosen. Its Status decides the exit code: 0 or
// 1. A wrong command line throws CLI::ParseError, which main turns into 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_FLAGS_H_
#define VARLANE_TOOLS_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "tools/model_presets.h"
#include "varlane/attention.h"
#include "varlane/dtype.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::tools {

using Run = std::function<Status()>;

void AddInfoCommand(CLI::App* app, Run* run);
void AddPlanCommand(CLI::App* app, Run* run);
void AddAttendCommand(CLI::App* app, Run* run);
void AddReplayCommand(CLI::App* app, Run* run);
void AddStressCommand(CLI::App* app, Run* run);
void AddTraceCommand(CLI::App* app, Run* run);
void AddBenchCommand(CLI::App* app, Run* run);
void AddBenchNumaCommand(CLI::App* bench, Run* run);  // of `varlane bench`

// Ends with exit code 2 and this sentence.
[[noreturn]] void ThrowUsage(const std::string& message);

// --json FILE; "-" = stdout, instead of the table.
CLI::Option* AddJsonFlag(CLI::App* app, std::string* path);
// "--trace FILE", see TraceFile.
CLI::Option* AddTraceFlag(CLI::App* app, std::string* path);

// An option whose text a parser of ours understands. `parse` returns Result<T>.
template <typename T, typename Parse>
CLI::Option* AddParsedOption(CLI::App* app, const std::string& name, T* value,
                             Parse parse, const std::string& help) {
  const auto store = [name, value, parse](const std::string& text) {
    auto result = parse(text);
    if (!result.ok()) {
      throw CLI::ValidationError(name, std::string(result.status().message()));
    }
    *value = std::move(result).value();
  };
  return app->add_option_function<std::string>(name, store, help);
}

CLI::Option* AddDTypeFlag(CLI::App* app, const std::string& name, DType* dtype,
                          const std::string& help);
CLI::Option* AddBytesFlag(CLI::App* app, const std::string& name,
                          int64_t* bytes, const std::string& help);
// A share in [0, 1].
CLI::Option* AddShareFlag(CLI::App* app, const std::string& name, double* share,
                          const std::string& help);

// --threads, --simd: the rest comes from the environment.
struct RuntimeFlags {
  int threads = 0;   // 0 = environment or default
  std::string simd;  // "" = environment or default
};
void AddRuntimeFlags(CLI::App* app, RuntimeFlags* flags);
Result<RuntimeOptions> MakeRuntimeOptions(const RuntimeFlags& flags);

// --kv-heads-per-threadgroup
void AddHeadsTogetherFlag(CLI::App* app, int* heads);
// --owner, --partitions, --kv-heads-per-threadgroup
void AddPlanOptionFlags(CLI::App* app, PlanOptions* options);
// --shard-heads
CLI::Option* AddShardHeadsFlag(CLI::App* app, bool* shard_heads);

// --model, --layers, --q-heads, --kv-heads, --head-size; numbers override the
// model's. 0 = not given.
struct ModelFlags {
  std::string model;
  int layers = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_size = 0;
};
void AddModelFlags(CLI::App* app, ModelFlags* flags);
// Errors: kNotFound (model); kInvalidArgument when neither a model nor all of
//         its numbers are given.
Result<ModelShape> ResolveModel(const ModelFlags& flags);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_FLAGS_H_
