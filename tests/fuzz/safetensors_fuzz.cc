// Fuzzes the safetensors reader: whatever the bytes, an answer; what is
// accepted keeps the reader's promises.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "tests/fuzz/fuzz_file.h"
#include "tools/safetensors.h"

using varlane::fuzzing::FuzzFile;
using varlane::fuzzing::Require;
using varlane::tools::SafetensorsFile;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const FuzzFile file({data, size});
  auto opened = SafetensorsFile::Open(file.path());
  if (!opened.ok()) {
    Require(!opened.status().message().empty());
    return 0;
  }
  int64_t total = 0;
  for (const auto& [name, tensor] : opened->tensors()) {
    int64_t elements = 1;
    for (const int64_t extent : tensor.shape) elements *= extent;
    const auto bytes = elements * int64_t(varlane::tools::SizeOf(tensor.type));
    Require(tensor.end - tensor.begin == bytes);
    const auto contents = opened->Read(name);
    Require(contents.ok() && int64_t(contents->size()) == bytes);
    total += bytes;
  }
  Require(total <= int64_t(size));
  return 0;
}
