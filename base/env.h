// The one place that reads environment variables, and the table of them all.
//
// Only *::FromEnvironment() functions, tools and tests call this; the library
// never reads the environment behind a service's back.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_ENV_H_
#define VARLANE_BASE_ENV_H_

#include <cstdint>
#include <optional>
#include <string>

#include "varlane/environment.h"
#include "varlane/status.h"

namespace varlane {

// The raw value, or nothing where the variable is unset or empty.
// Requires: `name` stands in EnvironmentVariables().
std::optional<std::string> EnvString(const char* name);

// Parsed values. Nothing where unset; kInvalidArgument naming the variable and
// its value where it does not parse or lies outside [min, max].
Result<std::optional<int64_t>> EnvInt(const char* name, int64_t min,
                                      int64_t max);
Result<std::optional<double>> EnvDouble(const char* name, double min,
                                        double max);
Result<std::optional<bool>> EnvBool(const char* name);  // 0/1/true/false/on/off

}  // namespace varlane

#endif  // VARLANE_BASE_ENV_H_
