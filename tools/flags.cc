// Options that several subcommands share.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/flags.h"

#include <map>

#include "tools/parse.h"
#include "tools/status_util.h"

namespace varlane::tools {

void ThrowUsage(const std::string& message) {
  throw CLI::ValidationError(message);
}

CLI::Option* AddJsonFlag(CLI::App* app, std::string* path) {
  return app
      ->add_option("--json", *path,
                   "Write the result as JSON too; \"-\" = to stdout, without "
                   "the table")
      ->type_name("FILE");
}

CLI::Option* AddTraceFlag(CLI::App* app, std::string* path) {
  return app
      ->add_option("--trace", *path,
                   "Write what each worker did when, for ui.perfetto.dev or "
                   "chrome://tracing (JSON)")
      ->type_name("FILE");
}

CLI::Option* AddDTypeFlag(CLI::App* app, const std::string& name, DType* dtype,
                          const std::string& help) {
  const auto parse = [](const std::string& text) -> Result<DType> {
    if (const auto parsed = ParseDType(text)) return *parsed;
    return BadArgument("\"{}\" is not f32, bf16 or f16", text);
  };
  return AddParsedOption(app, name, dtype, parse, help)->type_name("TYPE");
}

CLI::Option* AddBytesFlag(CLI::App* app, const std::string& name,
                          int64_t* bytes, const std::string& help) {
  return AddParsedOption(app, name, bytes, ParseBytes, help)
      ->type_name("BYTES");
}

CLI::Option* AddShareFlag(CLI::App* app, const std::string& name, double* share,
                          const std::string& help) {
  const auto parse = [](const std::string& text) -> Result<double> {
    const auto value = ParseNumber<double>(text);
    if (value && *value >= 0 && *value <= 1) return *value;
    return BadArgument("\"{}\" is not a share in [0, 1]", text);
  };
  return AddParsedOption(app, name, share, parse, help)->type_name("SHARE");
}

void AddRuntimeFlags(CLI::App* app, RuntimeFlags* flags) {
  app->add_option("--threads", flags->threads,
                  "Workers; 0 = VARLANE_THREADS or one for each core")
      ->check(CLI::Range(0, 4096))
      ->type_name("N");
  app->add_option("--simd", flags->simd,
                  "Kernel table, by the name `varlane info` lists")
      ->type_name("NAME");
}

Result<RuntimeOptions> MakeRuntimeOptions(const RuntimeFlags& flags) {
  VARLANE_TOOLS_ASSIGN(RuntimeOptions options,
                       RuntimeOptions::FromEnvironment());
  if (flags.threads != 0) options.num_threads = flags.threads;
  if (!flags.simd.empty()) options.simd_target = flags.simd;
  return options;
}

void AddPlanOptionFlags(CLI::App* app, PlanOptions* options) {
  static const std::map<std::string, OwnerPattern> kOwners = {
      {"search", OwnerPattern::kSearch},
      {"map", OwnerPattern::kMap},
      {"planned", OwnerPattern::kPlanned},
      {"padded", OwnerPattern::kPadded}};
  static const std::map<std::string, PartitionMode> kModes = {
      {"auto", PartitionMode::kAuto},
      {"spread", PartitionMode::kSpread},
      {"walk", PartitionMode::kWalk}};
  const auto owner = [](const std::string& text) -> Result<OwnerPattern> {
    const auto it = kOwners.find(text);
    if (it != kOwners.end()) return it->second;
    return BadArgument("\"{}\" is not search, map, planned or padded", text);
  };
  const auto mode = [](const std::string& text) -> Result<PartitionMode> {
    const auto it = kModes.find(text);
    if (it != kModes.end()) return it->second;
    return BadArgument("\"{}\" is not spread, walk or auto", text);
  };
  AddParsedOption(
      app, "--owner", &options->owner, owner,
      "How a threadgroup finds its sequence: search (default), map, "
      "planned or padded")
      ->type_name("PATTERN");
  AddParsedOption(app, "--partitions", &options->partitions, mode,
                  "Long contexts: spread over threadgroups, walked by one, or "
                  "auto (default)")
      ->type_name("MODE");
  AddHeadsTogetherFlag(app, &options->kv_heads_per_threadgroup);
}

void AddHeadsTogetherFlag(CLI::App* app, int* heads) {
  app->add_option("--kv-heads-per-threadgroup", *heads,
                  "KV heads that a threadgroup computes, at most; 0 (default) "
                  "= up to 8, as the batch suggests")
      ->check(CLI::Range(0, 65536))
      ->type_name("N");
}

CLI::Option* AddShardHeadsFlag(CLI::App* app, bool* shard_heads) {
  return app->add_flag("--shard-heads", *shard_heads,
                       "Cut the KV heads over the NUMA nodes, in place of "
                       "sequences with homes; nothing changes on one node");
}

void AddModelFlags(CLI::App* app, ModelFlags* flags) {
  std::string names;
  for (const ModelShape& shape : ModelPresets()) {
    names += (names.empty() ? "" : ", ") + shape.name;
  }
  app->add_option("--model", flags->model, "Shape of a known model: " + names)
      ->type_name("NAME");
  const auto number = [&](const char* name, int* value, const char* help) {
    app->add_option(name, *value, help)
        ->check(CLI::Range(1, 65536))
        ->type_name("N");
  };
  number("--layers", &flags->layers, "Layers, instead of the model's");
  number("--q-heads", &flags->q_heads, "Query heads, instead of the model's");
  number("--kv-heads", &flags->kv_heads, "KV heads, instead of the model's");
  number("--head-size", &flags->head_size,
         "Elements of a head, instead of the model's");
}

Result<ModelShape> ResolveModel(const ModelFlags& flags) {
  ModelShape model;
  model.name = "custom";
  if (!flags.model.empty()) {
    VARLANE_TOOLS_ASSIGN(model, FindModel(flags.model));
  } else if (flags.layers == 0 || flags.kv_heads == 0 || flags.head_size == 0) {
    return BadArgument(
        "give --model NAME, or --layers, --kv-heads and --head-size");
  }
  if (flags.layers != 0) model.num_layers = flags.layers;
  if (flags.kv_heads != 0) model.num_kv_heads = flags.kv_heads;
  if (flags.head_size != 0) model.head_size = flags.head_size;
  if (flags.q_heads != 0) model.num_q_heads = flags.q_heads;
  if (model.num_q_heads == 0) model.num_q_heads = model.num_kv_heads;
  if (model.num_q_heads % model.num_kv_heads != 0) {
    return BadArgument("{} query heads are not a multiple of {} KV heads",
                       model.num_q_heads, model.num_kv_heads);
  }
  return model;
}

}  // namespace varlane::tools
