// What this process holds of the system: mappings and file descriptors. For
// tests that nothing leaks.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_PROCESS_USE_H_
#define VARLANE_TESTS_TESTING_PROCESS_USE_H_

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <sstream>
#include <string>

#include "tests/testing/sanitizers.h"

namespace varlane::testing {

struct ProcessUse {
  // Anonymous and nameless: no heap, stack or library. Always 0 in a build with
  // a sanitizer, which maps memory of its own.
  int64_t mapped_bytes = 0;
  int64_t files = 0;  // descriptors

  bool operator==(const ProcessUse&) const = default;

  static ProcessUse Now() {
    ProcessUse use;
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (!kSanitized && std::getline(maps, line)) {
      std::istringstream fields(line);
      std::string range, mode, offset, device, inode, name;
      fields >> range >> mode >> offset >> device >> inode >> name;
      if (!name.empty()) continue;
      const size_t dash = range.find('-');
      use.mapped_bytes += static_cast<int64_t>(
          std::strtoull(range.c_str() + dash + 1, nullptr, 16) -
          std::strtoull(range.c_str(), nullptr, 16));
    }
    maps.close();
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++use.files;
    }
    return use;
  }
};

inline void PrintTo(const ProcessUse& use, std::ostream* out) {
  *out << use.mapped_bytes << " bytes mapped, " << use.files << " files";
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_PROCESS_USE_H_
