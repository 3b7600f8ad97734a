// SPDX-License-Identifier: Apache-2.0

#include "runtime/page_sizes.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "base/strings.h"
#include "runtime/numa_memory.h"

namespace varlane {
namespace {

constexpr const char* kHugeTlbDirectory = "/sys/kernel/mm/hugepages";
constexpr const char* kTransparentFile =
    "/sys/kernel/mm/transparent_hugepage/enabled";

// The number in a one-line file, or -1.
int64_t ReadNumber(const std::filesystem::path& file) {
  std::ifstream in(file);
  int64_t value = -1;
  if (!(in >> value)) return -1;
  return value;
}

// "hugepages-2048kB" -> 2 MiB; 0 for any other name.
int64_t ParsePoolName(std::string_view name) {
  constexpr std::string_view kPrefix = "hugepages-";
  if (!name.starts_with(kPrefix)) return 0;
  name.remove_prefix(kPrefix.size());
  int64_t kib = 0;
  std::from_chars(name.data(), name.data() + name.size(), kib);
  return kib * 1024;
}

}  // namespace

std::vector<PageSize> DetectPageSizes(std::vector<std::string>* warnings) {
  std::vector<PageSize> sizes = {{.bytes = BasePageBytes()}};
  std::error_code error;
  std::filesystem::directory_iterator pools(kHugeTlbDirectory, error);
  if (error) {
    warnings->push_back(StrCat("explicit huge pages are unknown: ",
                               kHugeTlbDirectory, ": ", error.message()));
    return sizes;
  }
  for (; pools != std::filesystem::directory_iterator();
       pools.increment(error)) {
    const int64_t bytes = ParsePoolName(pools->path().filename().string());
    if (bytes == 0) continue;
    const int64_t total = ReadNumber(pools->path() / "nr_hugepages");
    const int64_t free = ReadNumber(pools->path() / "free_hugepages");
    if (total < 0 || free < 0) {
      warnings->push_back(
          StrCat("the pool of ", FormatBytes(bytes), " pages is unreadable"));
    }
    sizes.push_back({.bytes = bytes,
                     .total = std::max<int64_t>(total, 0),
                     .free = std::max<int64_t>(free, 0)});
    if (error) break;
  }
  std::sort(
      sizes.begin() + 1, sizes.end(),
      [](const PageSize& a, const PageSize& b) { return a.bytes < b.bytes; });
  return sizes;
}

std::string DetectTransparentHugePages(std::vector<std::string>* warnings) {
  std::ifstream in(kTransparentFile);
  std::string line;  // "always [madvise] never"
  std::getline(in, line);
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    warnings->push_back(StrCat(
        "the mode of transparent huge pages is unknown: ", kTransparentFile,
        " is not readable"));
    return "";
  }
  return line.substr(open + 1, close - open - 1);
}

}  // namespace varlane
