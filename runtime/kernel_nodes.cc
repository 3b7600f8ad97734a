// SPDX-License-Identifier: Apache-2.0

#include "runtime/kernel_nodes.h"

#include <cstdio>
#include <fstream>
#include <sstream>

#include "base/strings.h"

namespace varlane {
namespace {

// The numbers in a list such as "0-3,8"; -1 for what is none.
int CountList(const std::string& text) {
  std::istringstream parts(text);
  int count = 0;
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0;
    int last = 0;
    switch (std::sscanf(part.c_str(), "%d-%d", &first, &last)) {
      case 1:
        ++count;
        break;
      case 2:
        count += last - first + 1;
        break;
      default:
        return -1;
    }
  }
  return count;
}

}  // namespace

void CompareWithKernelsNodes(const std::string& file, int num_nodes,
                             std::vector<std::string>* warnings) {
  std::string text;
  const bool was_read = bool(std::getline(std::ifstream(file), text));
  const int online = was_read ? CountList(text) : -1;
  if (online < 0) {
    warnings->push_back(StrCat("the NUMA nodes are not known for sure: ", file,
                               was_read ? " is no list: " : " cannot be read",
                               text, "; ", num_nodes, " found otherwise"));
  } else if (online != num_nodes) {
    warnings->push_back(StrCat("the kernel has ", online, " NUMA nodes (", text,
                               "), but only ", num_nodes,
                               " may be used or were found"));
  }
}

}  // namespace varlane
