// Safetensors: tensors of a file, read with every claim of its header checked.
//
// File: u64 little-endian header length, JSON header, data. The header maps a
// name to {dtype, shape, data_offsets: [begin, end)}, offsets counting from the
// end of the header; "__metadata__" maps strings to strings. As the format
// demands, tensors cover the data without gap or overlap. A file is input from
// strangers: nothing in it is believed, and nothing is read past its end.
// Source: the format's README, huggingface/safetensors.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_SAFETENSORS_H_
#define VARLANE_TOOLS_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "varlane/status.h"

namespace varlane::tools {

enum class TensorType : uint8_t { kF32, kF16, kBF16, kI32, kI64 };
const char* TensorTypeName(TensorType type);  // "F32" ...
size_t SizeOf(TensorType type);               // bytes

using TensorShape = std::vector<int64_t>;
std::string ShapeToString(const TensorShape& shape);  // "[3, 16, 128]"

// What the header says of one tensor.
struct TensorInfo {
  TensorType type = TensorType::kF32;
  TensorShape shape;
  int64_t begin = 0;  // bytes from the start of the data
  int64_t end = 0;
};

// An opened file: its header, checked; tensors are read on demand.
class SafetensorsFile {
 public:
  // Errors: kNotFound (cannot be opened), kInvalidArgument naming file, tensor
  //         and what is wrong (truncated, header, dtype, offsets, shape).
  static Result<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }
  // Null where there is no such tensor.
  const TensorInfo* Find(const std::string& name) const;
  // The tensor's bytes, aligned for any element type.
  // Errors: kNotFound (no such tensor), kUnavailable (the file changed),
  //         kResourceExhausted (no memory).
  Result<std::vector<std::byte>> Read(const std::string& name);

 private:
  explicit SafetensorsFile(std::string path) : path_(std::move(path)) {}
  Status ReadHeader(int64_t file_bytes);
  Status ParseHeader(const std::string& text, int64_t data_bytes);
  Status CheckCoverage(int64_t data_bytes) const;

  std::string path_;
  std::ifstream file_;
  int64_t data_begin_ = 0;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// A tensor to be written; `data` is borrowed.
struct TensorToWrite {
  std::string name;
  TensorType type = TensorType::kF32;
  TensorShape shape;
  const void* data = nullptr;  // product of shape x SizeOf(type) bytes
};

// Errors: kInvalidArgument (a negative extent, a name twice), kUnavailable
//         naming path and reason. A file that could not be finished is removed.
Status WriteSafetensors(const std::string& path,
                        const std::vector<TensorToWrite>& tensors,
                        const std::map<std::string, std::string>& metadata);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_SAFETENSORS_H_
