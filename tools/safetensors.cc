// Safetensors: reading and writing.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/safetensors.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using JsonValue = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
// The format's own limit.
constexpr int64_t kMaxHeaderBytes = 100'000'000;

std::optional<TensorType> ParseTensorType(std::string_view name) {
  for (const TensorType type :
       {TensorType::kF32, TensorType::kF16, TensorType::kBF16, TensorType::kI32,
        TensorType::kI64}) {
    if (name == TensorTypeName(type)) return type;
  }
  return std::nullopt;
}

// Elements of a shape, or nothing for a negative extent or an overflow.
std::optional<int64_t> NumElements(const TensorShape& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(count, extent, &count)) {
      return std::nullopt;
    }
  }
  return count;
}

// A JSON array of non-negative integers.
std::optional<std::vector<int64_t>> ParseInts(const JsonValue& json) {
  if (!json.is_array()) return std::nullopt;
  std::vector<int64_t> values;
  for (const JsonValue& value : json) {
    if (!value.is_number_unsigned()) return std::nullopt;
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    values.push_back(static_cast<int64_t>(number));
  }
  return values;
}

// Parses JSON; `duplicate` receives a top-level key that stands twice, which
// the parser itself would silently resolve.
JsonValue ParseJson(const std::string& text, std::string* duplicate) {
  std::set<std::string> keys;
  return JsonValue::parse(
      text,
      [&](int depth, JsonValue::parse_event_t event, JsonValue& parsed) {
        if (event == JsonValue::parse_event_t::key && depth == 1 &&
            !keys.insert(parsed.get<std::string>()).second) {
          *duplicate = parsed.get<std::string>();
        }
        return true;
      },
      false);
}

Result<TensorInfo> ParseTensor(const std::string& path, const std::string& name,
                               const JsonValue& json, int64_t data_bytes) {
  const auto wrong = [&](const std::string& why) {
    return BadArgument("{}: tensor \"{}\": {}", path, name, why);
  };
  if (!json.is_object()) return wrong("its header entry is not an object");
  for (const auto& [key, value] : json.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return wrong(fmt::format("unknown header field \"{}\"", key));
    }
  }
  const JsonValue type_name = json.value("dtype", JsonValue());
  const auto type = type_name.is_string()
                        ? ParseTensorType(type_name.get<std::string>())
                        : std::nullopt;
  if (!type) {
    return wrong(fmt::format("dtype {} is not F32, F16, BF16, I32 or I64",
                             type_name.dump()));
  }
  const auto shape = ParseInts(json.value("shape", JsonValue()));
  if (!shape) return wrong("shape is not an array of integers from 0");
  const auto offsets = ParseInts(json.value("data_offsets", JsonValue()));
  if (!offsets || offsets->size() != 2) {
    return wrong("data_offsets is not [begin, end]");
  }
  TensorInfo info{*type, *shape, (*offsets)[0], (*offsets)[1]};
  if (info.begin > info.end || info.end > data_bytes) {
    return wrong(fmt::format(
        "data_offsets [{}, {}) are not inside the file's {} data bytes",
        info.begin, info.end, data_bytes));
  }
  const auto elements = NumElements(info.shape);
  int64_t bytes = 0;
  if (!elements ||
      __builtin_mul_overflow(*elements, static_cast<int64_t>(SizeOf(*type)),
                             &bytes) ||
      bytes != info.end - info.begin) {
    return wrong(fmt::format("shape {} of {} does not make {} bytes",
                             ShapeToString(info.shape), TensorTypeName(*type),
                             info.end - info.begin));
  }
  return info;
}

}  // namespace

const char* TensorTypeName(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return "F32";
    case TensorType::kF16:
      return "F16";
    case TensorType::kBF16:
      return "BF16";
    case TensorType::kI32:
      return "I32";
    case TensorType::kI64:
      return "I64";
  }
  return "?";
}

size_t SizeOf(TensorType type) {
  switch (type) {
    case TensorType::kF32:
    case TensorType::kI32:
      return 4;
    case TensorType::kF16:
    case TensorType::kBF16:
      return 2;
    case TensorType::kI64:
      return 8;
  }
  return 0;
}

std::string ShapeToString(const TensorShape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Result<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  SafetensorsFile file(path);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return Fail(StatusCode::kNotFound, "{} cannot be read: it is a directory",
                path);
  }
  errno = 0;
  file.file_.open(path, std::ios::binary | std::ios::ate);
  if (!file.file_) {
    return Fail(StatusCode::kNotFound, "{} cannot be read: {}", path,
                std::strerror(errno));
  }
  VARLANE_TOOLS_TRY(file.ReadHeader(static_cast<int64_t>(file.file_.tellg())));
  return file;
}

Status SafetensorsFile::ReadHeader(int64_t file_bytes) {
  if (file_bytes < kLengthBytes) {
    return BadArgument(
        "{}: truncated: {} bytes, but a safetensors file starts with an 8-byte "
        "header length",
        path_, file_bytes);
  }
  std::array<unsigned char, kLengthBytes> raw{};
  file_.seekg(0);
  file_.read(reinterpret_cast<char*>(raw.data()), kLengthBytes);
  uint64_t length = 0;
  for (size_t i = raw.size(); i-- > 0;) length = length << 8 | raw[i];
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return BadArgument("{}: header length {} is above the limit of {}", path_,
                       length, kMaxHeaderBytes);
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > file_bytes - kLengthBytes) {
    return BadArgument(
        "{}: truncated: the header is {} bytes long, but only {} follow", path_,
        header_bytes, file_bytes - kLengthBytes);
  }
  std::string text(static_cast<size_t>(header_bytes), '\0');
  file_.read(text.data(), header_bytes);
  if (!file_) {
    return Fail(StatusCode::kUnavailable, "{}: reading the header failed",
                path_);
  }
  data_begin_ = kLengthBytes + header_bytes;
  return ParseHeader(text, file_bytes - data_begin_);
}

Status SafetensorsFile::ParseHeader(const std::string& text,
                                    int64_t data_bytes) {
  std::string duplicate;
  const JsonValue header = ParseJson(text, &duplicate);
  if (header.is_discarded() || !header.is_object()) {
    return BadArgument("{}: the header is not a JSON object", path_);
  }
  if (!duplicate.empty()) {
    return BadArgument("{}: the header names \"{}\" twice", path_, duplicate);
  }
  // A cut file first: then every later complaint is about the header.
  int64_t claimed = 0;
  for (const auto& [name, json] : header.items()) {
    if (name == "__metadata__" || !json.is_object()) continue;
    const auto offsets = ParseInts(json.value("data_offsets", JsonValue()));
    if (offsets && offsets->size() == 2) {
      claimed = std::max(claimed, (*offsets)[1]);
    }
  }
  if (claimed > data_bytes) {
    return BadArgument(
        "{}: truncated: the header promises {} data bytes, but the file has {}",
        path_, claimed, data_bytes);
  }
  for (const auto& [name, json] : header.items()) {
    if (name != "__metadata__") {
      VARLANE_TOOLS_ASSIGN(TensorInfo info,
                           ParseTensor(path_, name, json, data_bytes));
      tensors_.emplace(name, std::move(info));
      continue;
    }
    if (!json.is_object()) {
      return BadArgument("{}: __metadata__ is not an object", path_);
    }
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) {
        return BadArgument("{}: metadata \"{}\" = {} is not a string", path_,
                           key, value.dump());
      }
      metadata_.emplace(key, value.get<std::string>());
    }
  }
  return CheckCoverage(data_bytes);
}

Status SafetensorsFile::CheckCoverage(int64_t data_bytes) const {
  using Entry = std::pair<const std::string, TensorInfo>;
  std::vector<const Entry*> order;
  for (const Entry& entry : tensors_) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->second.begin, a->second.end) <
           std::pair(b->second.begin, b->second.end);
  });
  int64_t covered = 0;
  const std::string* previous = nullptr;
  for (const Entry* entry : order) {
    if (entry->second.begin < covered) {
      return BadArgument("{}: tensors \"{}\" and \"{}\" overlap at byte {}",
                         path_, *previous, entry->first, entry->second.begin);
    }
    if (entry->second.begin > covered) {
      return BadArgument("{}: data bytes [{}, {}) belong to no tensor", path_,
                         covered, entry->second.begin);
    }
    covered = entry->second.end;
    previous = &entry->first;
  }
  if (covered != data_bytes) {
    return BadArgument("{}: data bytes [{}, {}) belong to no tensor", path_,
                       covered, data_bytes);
  }
  return {};
}

const TensorInfo* SafetensorsFile::Find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

Result<std::vector<std::byte>> SafetensorsFile::Read(const std::string& name) {
  const TensorInfo* const info = Find(name);
  if (info == nullptr) {
    return Fail(StatusCode::kNotFound, "{}: there is no tensor \"{}\"", path_,
                name);
  }
  const int64_t size = info->end - info->begin;
  std::vector<std::byte> bytes;
  try {
    bytes.resize(static_cast<size_t>(size));
  } catch (const std::bad_alloc&) {
    return Fail(StatusCode::kResourceExhausted,
                "{}: no memory for the {} bytes of tensor \"{}\"", path_, size,
                name);
  }
  file_.clear();
  file_.seekg(data_begin_ + info->begin);
  file_.read(reinterpret_cast<char*>(bytes.data()), size);
  if (file_.gcount() != size) {
    return Fail(StatusCode::kUnavailable, "{}: reading tensor \"{}\" failed",
                path_, name);
  }
  return bytes;
}

namespace {

// The header of a file that holds `tensors` one after the other.
Result<std::string> MakeHeader(
    const std::vector<TensorToWrite>& tensors,
    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    const auto elements = NumElements(tensor.shape);
    if (!elements) {
      return BadArgument("tensor \"{}\": shape {} is not a shape", tensor.name,
                         ShapeToString(tensor.shape));
    }
    if (tensor.name == "__metadata__" || header.contains(tensor.name)) {
      return BadArgument("tensor name \"{}\" is taken", tensor.name);
    }
    const int64_t end =
        offset + *elements * static_cast<int64_t>(SizeOf(tensor.type));
    header[tensor.name] = {{"dtype", TensorTypeName(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts aligned
  return text;
}

}  // namespace

Status WriteSafetensors(const std::string& path,
                        const std::vector<TensorToWrite>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  VARLANE_TOOLS_ASSIGN(const std::string header, MakeHeader(tensors, metadata));
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (file) {
    for (uint64_t i = 0, length = header.size(); i < kLengthBytes; ++i) {
      file.put(static_cast<char>(length >> (8 * i) & 0xff));
    }
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    for (const TensorToWrite& tensor : tensors) {
      const int64_t bytes = *NumElements(tensor.shape) *
                            static_cast<int64_t>(SizeOf(tensor.type));
      if (bytes > 0) file.write(static_cast<const char*>(tensor.data), bytes);
    }
    file.close();
  }
  if (file) return {};
  const int reason = errno;
  std::remove(path.c_str());
  return Fail(StatusCode::kUnavailable, "{} cannot be written: {}", path,
              std::strerror(reason));
}

}  // namespace varlane::tools
