// SPDX-License-Identifier: Apache-2.0

#include "varlane/version.h"

namespace varlane {
const char* VersionString() { return VARLANE_VERSION_STRING; }
}  // namespace varlane
