// RuntimeOptions from VARLANE_* environment variables.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <optional>
#include <string>

#include "base/check.h"
#include "base/env.h"
#include "base/strings.h"
#include "runtime/placement.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

Status Unknown(const char* name, const std::string& value,
               const char* expected) {
  return {StatusCode::kInvalidArgument,
          StrCat("environment variable ", name, " = \"", value, "\", expected ",
                 expected)};
}

Status ReadNuma(NumaPolicy* numa) {
  const std::optional<std::string> text = EnvString("VARLANE_NUMA");
  if (!text) return {};
  if (*text == "auto") {
    *numa = NumaPolicy::kAuto;
  } else if (*text == "l3") {
    *numa = NumaPolicy::kL3;
  } else if (*text == "off") {
    *numa = NumaPolicy::kOff;
  } else {
    return Unknown("VARLANE_NUMA", *text, "auto, l3 or off");
  }
  return {};
}

Status ReadHugePages(HugePages* pages) {
  const std::optional<std::string> text = EnvString("VARLANE_HUGE_PAGES");
  if (!text) return {};
  if (*text == "explicit") {
    *pages = HugePages::kExplicit;
  } else if (*text == "transparent") {
    *pages = HugePages::kTransparent;
  } else if (*text == "off") {
    *pages = HugePages::kOff;
  } else {
    return Unknown("VARLANE_HUGE_PAGES", *text, "explicit, transparent or off");
  }
  return {};
}

Status ReadBool(const char* name, bool* value) {
  const Result<std::optional<bool>> read = EnvBool(name);
  VARLANE_RETURN_IF_ERROR(read.status());
  *value = read->value_or(*value);
  return {};
}

}  // namespace

Result<RuntimeOptions> RuntimeOptions::FromEnvironment() {
  RuntimeOptions options;
  const Result<std::optional<int64_t>> threads =
      EnvInt("VARLANE_THREADS", 0, kMaxWorkers);
  VARLANE_RETURN_IF_ERROR(threads.status());
  options.num_threads = static_cast<int>(threads->value_or(0));
  VARLANE_RETURN_IF_ERROR(ReadBool("VARLANE_SMT", &options.use_smt));
  VARLANE_RETURN_IF_ERROR(ReadBool("VARLANE_PIN", &options.pin));
  options.cpus = EnvString("VARLANE_CPUS").value_or("");
  VARLANE_RETURN_IF_ERROR(ReadNuma(&options.numa));
  VARLANE_RETURN_IF_ERROR(ReadHugePages(&options.huge_pages));
  options.simd_target = EnvString("VARLANE_SIMD").value_or("");
  if (options.simd_target == "best") options.simd_target.clear();
  options.topology = EnvString("VARLANE_TOPOLOGY").value_or("");
  return options;
}

}  // namespace varlane
