// What this process has in memory.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_PROCESS_MEMORY_H_
#define VARLANE_TOOLS_PROCESS_MEMORY_H_

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace varlane::tools {

// Resident bytes (RSS), to a few hundred KiB: the kernel counts by CPU. 0 where
// /proc does not tell.
inline int64_t ResidentBytes() {
  std::ifstream in("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  in >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_PROCESS_MEMORY_H_
