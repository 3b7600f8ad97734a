// The environment variables Varlane knows, for tools that list them.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ENVIRONMENT_H_
#define VARLANE_ENVIRONMENT_H_

#include <span>
#include <string>

#include "varlane/export.h"

namespace varlane {

struct EnvVariable {
  const char* name;           // "VARLANE_THREADS"
  const char* default_value;  // as a person would write it
  const char* meaning;        // one sentence
};

// Every variable, sorted by name. Static data.
VARLANE_EXPORT std::span<const EnvVariable> EnvironmentVariables();

// What the variable is set to now; "" where it is unset, empty or unknown.
VARLANE_EXPORT std::string EnvironmentValue(const EnvVariable& variable);

}  // namespace varlane

#endif  // VARLANE_ENVIRONMENT_H_
