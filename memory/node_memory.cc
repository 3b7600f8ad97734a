// SPDX-License-Identifier: Apache-2.0

#include "memory/node_memory.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>

#include "base/strings.h"
#include "memory/proc_file.h"

namespace varlane {
namespace {

constexpr const char* kDirectory = "/sys/devices/system/node";
// No machine has more; guards against a list such as "0-2000000000".
constexpr int kMaxNodes = 4096;

// A file's text; nothing where it is not there, with a warning where it is but
// cannot be read.
std::optional<std::string> ReadText(const std::string& path,
                                    std::vector<std::string>* warnings,
                                    Status* exhausted) {
  Result<std::string> text = ReadProcFile(path);
  if (text.ok()) return std::move(text).value();
  if (text.status().code() == StatusCode::kResourceExhausted) {
    *exhausted = text.status();
  } else if (text.status().code() != StatusCode::kNotFound) {
    warnings->emplace_back(text.status().message());
  }
  return std::nullopt;
}

// Lines such as "Node 0 MemFree:   6888204 kB".
NodeMemory ParseNode(int index, std::string_view text) {
  const std::string prefix = StrCat("Node ", index, " ");
  const auto bytes = [&](const char* field) {
    return FindKilobytes(text, prefix + field).value_or(0);
  };
  NodeMemory node;
  node.os_index = index;
  node.total_bytes = bytes("MemTotal:");
  node.free_bytes = bytes("MemFree:");
  node.available_bytes =
      std::min(node.total_bytes, node.free_bytes + bytes("Inactive(file):") +
                                     bytes("SReclaimable:"));
  return node;
}

}  // namespace

std::vector<int> ParseIndexList(std::string_view text) {
  std::vector<int> indices;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    int first = 0;
    auto [next, error] = std::from_chars(at, end, first);
    if (error != std::errc() || first < 0) break;
    int last = first;
    if (next != end && *next == '-') {
      const auto range = std::from_chars(next + 1, end, last);
      if (range.ec != std::errc()) break;
      next = range.ptr;
    }
    for (int i = first; i <= std::min(last, kMaxNodes); ++i) {
      indices.push_back(i);
    }
    if (next == end || *next != ',') break;
    at = next + 1;
  }
  return indices;
}

std::vector<NodeMemory> ReadNodeMemory(const std::string& root,
                                       std::vector<std::string>* warnings,
                                       Status* exhausted) {
  const auto read = [&](const std::string& path) {
    return ReadText(root + path, warnings, exhausted);
  };
  std::vector<NodeMemory> nodes;
  const auto online = read(StrCat(kDirectory, "/online"));
  if (!online) return nodes;
  const auto status = read("/proc/self/status");
  std::optional<std::vector<int>> allowed;
  if (status) {
    constexpr std::string_view kField = "Mems_allowed_list:";
    for (std::string_view line : Split(*status, '\n')) {
      if (!line.starts_with(kField)) continue;
      line.remove_prefix(
          std::min(line.find_first_of("0123456789"), line.size()));
      allowed = ParseIndexList(line);
    }
  }
  for (const int index : ParseIndexList(*online)) {
    const auto text = read(StrCat(kDirectory, "/node", index, "/meminfo"));
    if (!text) continue;
    NodeMemory node = ParseNode(index, *text);
    if (node.total_bytes == 0) continue;
    node.allowed = !allowed || std::find(allowed->begin(), allowed->end(),
                                         index) != allowed->end();
    nodes.push_back(node);
  }
  return nodes;
}

}  // namespace varlane
