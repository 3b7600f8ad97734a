// Attention shapes of well-known models, by name.
//
// Only models whose layers are all full attention of one shape: the numbers are
// those of each model's published config.json.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_MODEL_PRESETS_H_
#define VARLANE_TOOLS_MODEL_PRESETS_H_

#include <span>
#include <string>
#include <string_view>

#include "varlane/status.h"

namespace varlane::tools {

struct ModelShape {
  std::string name;
  int num_layers = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_size = 0;
};

std::span<const ModelShape> ModelPresets();

// By name, any case. Errors: kNotFound listing the names there are.
Result<ModelShape> FindModel(std::string_view name);

// "Qwen3-0.6B: 28 layers, 16 query heads, 8 KV heads, head size 128".
std::string DescribeModel(const ModelShape& model);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_MODEL_PRESETS_H_
