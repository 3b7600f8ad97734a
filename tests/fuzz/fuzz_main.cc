// Runs files through a fuzz target's entry point, without a fuzzer: seeds and
// inputs that once failed, in every build and with every compiler.
//
// Usage: NAME_seeds FOLDER | FILE...; fails where there is no file.
// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_file.h"

namespace {

bool RunFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const std::vector<uint8_t> input(bytes.begin(), bytes.end());
  // Each cut as well: what a truncated file does to the reader.
  for (size_t size = 0; size <= input.size();
       size += 1 + (input.size() - size) / 64) {
    const std::vector<uint8_t> cut(
        input.begin(), input.begin() + static_cast<std::ptrdiff_t>(size));
    LLVMFuzzerTestOneInput(cut.data(), cut.size());
  }
  LLVMFuzzerTestOneInput(input.data(), input.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  for (int i = 1; i < argc; ++i) {
    std::vector<std::string> paths = {argv[i]};
    if (std::filesystem::is_directory(argv[i])) {
      paths.clear();
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
        paths.push_back(entry.path().string());
      }
    }
    for (const std::string& path : paths) {
      if (!RunFile(path)) {
        std::fprintf(stderr, "%s cannot be read\n", path.c_str());
        return 1;
      }
      ++count;
    }
  }
  std::printf("%d files\n", count);
  return count > 0 ? 0 : 1;
}
