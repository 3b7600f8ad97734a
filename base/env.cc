// SPDX-License-Identifier: Apache-2.0

#include "base/env.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "base/strings.h"

namespace varlane {
namespace {

constexpr std::array kVariables = {
    EnvVariable{"MEMORY_PRESSURE_WATCH", "(none)",
                "what to watch for memory pressure, as systemd sets it"},
    EnvVariable{"MEMORY_PRESSURE_WRITE", "(none)",
                "what to write there first, in base64, as systemd sets it"},
    EnvVariable{"VARLANE_CPUS", "(all)",
                "CPUs that workers may use, e.g. 0-3,8; of those we may use"},
    EnvVariable{"VARLANE_HUGE_PAGES", "transparent",
                "pages of the KV pool: explicit, transparent or off"},
    EnvVariable{"VARLANE_MEMORY_FRACTION", "0.9",
                "share of total memory that the claim policy may use, (0, 1]"},
    EnvVariable{"VARLANE_NUMA", "auto",
                "one arena per NUMA node (auto), one per L3 (l3) or one (off)"},
    EnvVariable{"VARLANE_PIN", "1", "pin workers to their cores (0 or 1)"},
    EnvVariable{"VARLANE_SIMD", "best",
                "kernel table to use, by the name `varlane info` lists"},
    EnvVariable{"VARLANE_SMT", "0", "use SMT siblings as workers too (0 or 1)"},
    EnvVariable{"VARLANE_THREADS", "0",
                "workers; 0 = one for each physical core we may run on"},
    EnvVariable{"VARLANE_TOPOLOGY", "(this machine)",
                "hwloc topology to load: an XML file or a synthetic string"},
};

[[maybe_unused]] bool Known(const char* name) {
  return std::any_of(kVariables.begin(), kVariables.end(),
                     [&](const EnvVariable& variable) {
                       return std::strcmp(variable.name, name) == 0;
                     });
}

Status Malformed(const char* name, const std::string& value,
                 const std::string& expected) {
  return {StatusCode::kInvalidArgument,
          StrCat("environment variable ", name, " = \"", value, "\", expected ",
                 expected)};
}

}  // namespace

std::span<const EnvVariable> EnvironmentVariables() { return kVariables; }

std::string EnvironmentValue(const EnvVariable& variable) {
  if (!Known(variable.name)) return "";
  return EnvString(variable.name).value_or("");
}

std::optional<std::string> EnvString(const char* name) {
  VARLANE_DCHECK(Known(name));
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

Result<std::optional<int64_t>> EnvInt(const char* name, int64_t min,
                                      int64_t max) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<int64_t>();
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() ||
      value < min || value > max) {
    return Malformed(name, *text,
                     StrCat("an integer in [", min, ", ", max, "]"));
  }
  return std::optional<int64_t>(value);
}

Result<std::optional<double>> EnvDouble(const char* name, double min,
                                        double max) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<double>();
  double value = 0;
  const auto [end, error] =
      std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() ||
      !(value >= min && value <= max)) {
    return Malformed(name, *text, StrCat("a number in [", min, ", ", max, "]"));
  }
  return std::optional<double>(value);
}

Result<std::optional<bool>> EnvBool(const char* name) {
  const std::optional<std::string> text = EnvString(name);
  if (!text) return std::optional<bool>();
  if (*text == "1" || *text == "true" || *text == "on") {
    return std::optional<bool>(true);
  }
  if (*text == "0" || *text == "false" || *text == "off") {
    return std::optional<bool>(false);
  }
  return Malformed(name, *text, "0, 1, true, false, on or off");
}

}  // namespace varlane
