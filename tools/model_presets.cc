// Attention shapes of well-known models, by name.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/model_presets.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "tools/status_util.h"

namespace varlane::tools {
namespace {

bool SameName(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  });
}

}  // namespace

std::span<const ModelShape> ModelPresets() {
  // name, layers, query heads, KV heads, head size
  static const std::vector<ModelShape> kPresets = {
      {"Qwen3-0.6B", 28, 16, 8, 128},   {"Qwen3-1.7B", 28, 16, 8, 128},
      {"Qwen3-4B", 36, 32, 8, 128},     {"Qwen3-8B", 36, 32, 8, 128},
      {"Qwen3-14B", 40, 40, 8, 128},    {"Qwen3-32B", 64, 64, 8, 128},
      {"Qwen2.5-0.5B", 24, 14, 2, 64},  {"Qwen2.5-7B", 28, 28, 4, 128},
      {"Llama-3.2-1B", 16, 32, 8, 64},  {"Llama-3.2-3B", 28, 24, 8, 128},
      {"Llama-3.1-8B", 32, 32, 8, 128}, {"Llama-3.1-70B", 80, 64, 8, 128},
      {"Llama-2-7B", 32, 32, 32, 128},  {"Mistral-7B", 32, 32, 8, 128},
      {"gemma-2b", 18, 8, 1, 256},      {"TinyLlama-1.1B", 22, 32, 4, 64},
  };
  return kPresets;
}

Result<ModelShape> FindModel(std::string_view name) {
  std::string names;
  for (const ModelShape& shape : ModelPresets()) {
    if (SameName(shape.name, name)) return shape;
    names += (names.empty() ? "" : ", ") + shape.name;
  }
  return Fail(StatusCode::kNotFound, "model \"{}\" is not one of {}", name,
              names);
}

std::string DescribeModel(const ModelShape& model) {
  return fmt::format("{}: {} layers, {} query heads, {} KV heads, head size {}",
                     model.name, model.num_layers, model.num_q_heads,
                     model.num_kv_heads, model.head_size);
}

}  // namespace varlane::tools
