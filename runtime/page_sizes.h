// What pages the kernel offers: sizes, explicit pools, transparent mode.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_PAGE_SIZES_H_
#define VARLANE_RUNTIME_PAGE_SIZES_H_

#include <string>
#include <vector>

#include "varlane/runtime.h"

namespace varlane {

// This machine's page sizes, base size first, then explicit sizes ascending.
// What /sys does not show is named in `warnings`.
std::vector<PageSize> DetectPageSizes(std::vector<std::string>* warnings);

// "always", "madvise" or "never"; "" and a warning where /sys does not say.
std::string DetectTransparentHugePages(std::vector<std::string>* warnings);

}  // namespace varlane

#endif  // VARLANE_RUNTIME_PAGE_SIZES_H_
