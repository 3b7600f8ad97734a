// AttentionCase: loading, checking, making.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/attention_case.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <set>
#include <utility>

#include "tools/kv_synth.h"
#include "tools/parse.h"
#include "tools/safetensors.h"
#include "tools/status_util.h"
#include "varlane/memory_account.h"

namespace varlane::tools {
namespace {

// --- tensors -----------------------------------------------------------------

// Under a memory cgroup taking too much is the process's end, so it is asked
// for first.
Status CheckRoom(double bytes, const std::string& what) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<MemoryAccount> account,
                       MemoryAccount::Create({}));
  MemoryClaimRequest request;
  request.name = what;
  request.bytes = static_cast<int64_t>(std::min(bytes, 4e18));
  return account->Claim(request).status();
}

Result<DType> ToDType(const std::string& path, const std::string& name,
                      TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return DType::kF32;
    case TensorType::kBF16:
      return DType::kBF16;
    case TensorType::kF16:
      return DType::kF16;
    default:
      return BadArgument("{}: tensor \"{}\" is {}, expected F32, BF16 or F16",
                         path, name, TensorTypeName(type));
  }
}

Result<const TensorInfo*> Require(const SafetensorsFile& file,
                                  const std::string& name) {
  if (const TensorInfo* const info = file.Find(name)) return info;
  return BadArgument("{}: tensor \"{}\" is missing", file.path(), name);
}

// Reads one of q, k, v, whose shape must be `axes`, three of them.
Result<CaseTensor> ReadTensor(SafetensorsFile* file, const std::string& name,
                              const char* axes) {
  VARLANE_TOOLS_ASSIGN(const TensorInfo* const info, Require(*file, name));
  CaseTensor tensor;
  VARLANE_TOOLS_ASSIGN(tensor.dtype, ToDType(file->path(), name, info->type));
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const bool fits = info->shape.size() == 3 &&
                    std::all_of(info->shape.begin(), info->shape.end(),
                                [](int64_t extent) { return extent <= kMax; });
  if (!fits || info->shape[1] == 0 || info->shape[2] == 0) {
    return BadArgument("{}: tensor \"{}\" has shape {}, expected {}",
                       file->path(), name, ShapeToString(info->shape), axes);
  }
  tensor.tokens = info->shape[0];
  tensor.heads = static_cast<int>(info->shape[1]);
  tensor.head_size = static_cast<int>(info->shape[2]);
  VARLANE_TOOLS_TRY(CheckRoom(static_cast<double>(info->end - info->begin),
                              "tensor " + name));
  VARLANE_TOOLS_ASSIGN(tensor.bytes, file->Read(name));
  return tensor;
}

// An exclusive prefix sum that starts at 0, never falls and ends at `total`.
Result<std::vector<int32_t>> ReadCuSeqlens(SafetensorsFile* file,
                                           const std::string& name,
                                           int64_t total,
                                           const char* tokens_of) {
  VARLANE_TOOLS_ASSIGN(const TensorInfo* const info, Require(*file, name));
  if (info->type != TensorType::kI32) {
    return BadArgument("{}: tensor \"{}\" is {}, expected I32", file->path(),
                       name, TensorTypeName(info->type));
  }
  if (info->shape.size() != 1 || info->shape[0] < 2) {
    return BadArgument("{}: tensor \"{}\" has shape {}, expected [N + 1]",
                       file->path(), name, ShapeToString(info->shape));
  }
  VARLANE_TOOLS_ASSIGN(const std::vector<std::byte> bytes, file->Read(name));
  std::vector<int32_t> values(static_cast<size_t>(info->shape[0]));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  if (values.front() != 0) {
    return BadArgument("{}: {}[0] = {}, expected 0", file->path(), name,
                       values.front());
  }
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] < values[i - 1]) {
      return BadArgument("{}: {}[{}] = {} is less than {}[{}] = {}",
                         file->path(), name, i, values[i], name, i - 1,
                         values[i - 1]);
    }
  }
  if (values.back() != total) {
    return BadArgument("{}: {}[{}] = {}, but {} has {} tokens", file->path(),
                       name, values.size() - 1, values.back(), tokens_of,
                       total);
  }
  return values;
}

// An optional F32 [Hq] tensor; empty where it is missing.
Result<std::vector<float>> ReadPerHead(SafetensorsFile* file,
                                       const std::string& name,
                                       int num_q_heads) {
  std::vector<float> values;
  const TensorInfo* const info = file->Find(name);
  if (info == nullptr) return values;
  if (info->type != TensorType::kF32 ||
      info->shape != TensorShape{num_q_heads}) {
    return BadArgument("{}: tensor \"{}\" is {} {}, expected F32 [{}]",
                       file->path(), name, TensorTypeName(info->type),
                       ShapeToString(info->shape), num_q_heads);
  }
  VARLANE_TOOLS_ASSIGN(const std::vector<std::byte> bytes, file->Read(name));
  values.resize(static_cast<size_t>(num_q_heads));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

Status ReadModifiers(SafetensorsFile* file, AttentionCase* c) {
  VARLANE_TOOLS_ASSIGN(c->alibi_slopes,
                       ReadPerHead(file, "alibi_slopes", c->q.heads));
  for (size_t head = 0; head < c->alibi_slopes.size(); ++head) {
    if (!std::isfinite(c->alibi_slopes[head])) {
      return BadArgument("{}: alibi_slopes[{}] = {}, expected a finite number",
                         file->path(), head, c->alibi_slopes[head]);
    }
  }
  VARLANE_TOOLS_ASSIGN(c->sinks, ReadPerHead(file, "sinks", c->q.heads));
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  for (size_t head = 0; head < c->sinks.size(); ++head) {
    if (!std::isfinite(c->sinks[head]) && c->sinks[head] != kMinusInfinity) {
      return BadArgument(
          "{}: sinks[{}] = {}, expected a finite number, or -inf for none",
          file->path(), head, c->sinks[head]);
    }
  }
  return {};
}

Status RefuseUnknown(const SafetensorsFile& file) {
  static const std::set<std::string> kTensors = {
      "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sinks"};
  // "format" is what frameworks write about themselves.
  static const std::set<std::string> kKeys = {"scale", "causal", "window",
                                              "softcap", "format"};
  for (const auto& [name, info] : file.tensors()) {
    if (kTensors.count(name) == 0) {
      return BadArgument("{}: tensor \"{}\" is not known here; known: {}",
                         file.path(), name, fmt::join(kTensors, ", "));
    }
  }
  for (const auto& [key, value] : file.metadata()) {
    if (kKeys.count(key) == 0) {
      return BadArgument(
          "{}: metadata \"{}\" = \"{}\" is not known here; known: {}",
          file.path(), key, value, fmt::join(kKeys, ", "));
    }
  }
  return {};
}

// --- metadata ----------------------------------------------------------------

Result<double> MetadataNumber(const SafetensorsFile& file,
                              const std::string& key, double fallback) {
  const auto it = file.metadata().find(key);
  if (it == file.metadata().end()) return fallback;
  const auto value = ParseNumber<double>(it->second);
  if (value && std::isfinite(*value)) return *value;
  return BadArgument("{}: metadata \"{}\" = \"{}\", expected a number",
                     file.path(), key, it->second);
}

Result<bool> MetadataBool(const SafetensorsFile& file, const std::string& key,
                          bool fallback) {
  const auto it = file.metadata().find(key);
  if (it == file.metadata().end()) return fallback;
  std::string lower = it->second;  // Python writes "True"
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  if (lower == "true") return true;
  if (lower == "false") return false;
  return BadArgument("{}: metadata \"{}\" = \"{}\", expected true or false",
                     file.path(), key, it->second);
}

// What a window means where later tokens are seen too is not defined.
Status ReadWindow(const SafetensorsFile& file, AttentionCase* c) {
  const auto it = file.metadata().find("window");
  if (it == file.metadata().end()) return {};
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const auto window = ParseNumber<int64_t>(it->second);
  if (!window || *window < 0 || *window > kMax) {
    return BadArgument(
        "{}: metadata \"window\" = \"{}\", expected 0 for none or a number of "
        "tokens up to {}",
        file.path(), it->second, kMax);
  }
  if (*window != 0 && !c->causal) {
    return BadArgument(
        "{}: metadata \"window\" = \"{}\" with \"causal\" = \"{}\": a window "
        "is defined for causal attention only",
        file.path(), it->second, file.metadata().at("causal"));
  }
  c->window = static_cast<int32_t>(*window);
  return {};
}

Status ReadMetadata(const SafetensorsFile& file, AttentionCase* c) {
  VARLANE_TOOLS_ASSIGN(c->causal, MetadataBool(file, "causal", true));
  const double default_scale = 1.0 / std::sqrt(double(c->q.head_size));
  VARLANE_TOOLS_ASSIGN(c->scale, MetadataNumber(file, "scale", default_scale));
  if (c->scale == 0) {
    return Fail(StatusCode::kUnimplemented,
                "{}: metadata \"scale\" = \"{}\": a scale of zero is not "
                "supported",
                file.path(), file.metadata().at("scale"));
  }
  VARLANE_TOOLS_ASSIGN(c->softcap, MetadataNumber(file, "softcap", 0));
  const auto softcap = static_cast<float>(c->softcap);
  if (c->softcap != 0 &&
      !(std::isnormal(softcap) && std::isnormal(1 / softcap) && softcap > 0)) {
    return BadArgument(
        "{}: metadata \"softcap\" = \"{}\", expected 0 for none or a positive "
        "normal float",
        file.path(), file.metadata().at("softcap"));
  }
  return ReadWindow(file, c);
}

Status CheckShapes(const std::string& path, const AttentionCase& c) {
  const auto shape = [](const CaseTensor& tensor) {
    return ShapeToString({tensor.tokens, tensor.heads, tensor.head_size});
  };
  if (c.k.head_size != c.q.head_size) {
    return BadArgument("{}: tensor \"k\" has shape {}, but q's head size is {}",
                       path, shape(c.k), c.q.head_size);
  }
  if (c.v.tokens != c.k.tokens || c.v.heads != c.k.heads) {
    return BadArgument("{}: tensor \"v\" has shape {}, but k has {}", path,
                       shape(c.v), shape(c.k));
  }
  if (c.q.heads % c.k.heads != 0) {
    return BadArgument(
        "{}: tensor \"q\" has {} heads, not a multiple of k's {}", path,
        c.q.heads, c.k.heads);
  }
  return {};
}

}  // namespace

float CaseTensor::Get(int64_t element) const {
  const std::byte* const from =
      bytes.data() + element * static_cast<int64_t>(varlane::SizeOf(dtype));
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, sizeof(bits));
  return dtype == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
}

int32_t AttentionCase::q_len(int64_t i) const {
  const auto at = static_cast<size_t>(i);
  return cu_seqlens_q[at + 1] - cu_seqlens_q[at];
}

int32_t AttentionCase::kv_len(int64_t i) const {
  const auto at = static_cast<size_t>(i);
  return cu_seqlens_k[at + 1] - cu_seqlens_k[at];
}

Result<AttentionCase> LoadAttentionCase(const std::string& path) {
  VARLANE_TOOLS_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(path));
  VARLANE_TOOLS_TRY(RefuseUnknown(file));
  AttentionCase c;
  c.source = path;
  VARLANE_TOOLS_ASSIGN(c.q, ReadTensor(&file, "q", "[total_q, Hq, D]"));
  VARLANE_TOOLS_ASSIGN(c.k, ReadTensor(&file, "k", "[total_kv, Hkv, D]"));
  VARLANE_TOOLS_ASSIGN(c.v, ReadTensor(&file, "v", "[total_kv, Hkv, Dv]"));
  VARLANE_TOOLS_TRY(CheckShapes(path, c));
  VARLANE_TOOLS_ASSIGN(c.cu_seqlens_q,
                       ReadCuSeqlens(&file, "cu_seqlens_q", c.q.tokens, "q"));
  VARLANE_TOOLS_ASSIGN(c.cu_seqlens_k,
                       ReadCuSeqlens(&file, "cu_seqlens_k", c.k.tokens, "k"));
  if (c.cu_seqlens_q.size() != c.cu_seqlens_k.size()) {
    return BadArgument(
        "{}: cu_seqlens_q is for {} sequences, cu_seqlens_k for {}", path,
        c.cu_seqlens_q.size() - 1, c.cu_seqlens_k.size() - 1);
  }
  VARLANE_TOOLS_TRY(ReadMetadata(file, &c));
  VARLANE_TOOLS_TRY(ReadModifiers(&file, &c));
  return c;
}

// --- made cases --------------------------------------------------------------

namespace {

void Allocate(int64_t tokens, int heads, int head_size, CaseTensor* tensor) {
  *tensor = {DType::kBF16, tokens, heads, head_size, {}};
  tensor->bytes.resize(static_cast<size_t>(tensor->Offset(tokens, 0)) *
                       sizeof(BF16));
}

// Token i of `tensor` is position i of one stream: no two tokens are alike.
Status FillTensor(uint64_t stream, SynthKind kind, Runtime* runtime,
                  CaseTensor* tensor) {
  constexpr int64_t kTokens = 64;  // of a threadgroup
  const Grid grid{(tensor->tokens + kTokens - 1) / kTokens};
  if (grid.num_threadgroups == 0) return {};
  auto* const data = reinterpret_cast<BF16*>(tensor->bytes.data());
  const auto body = [&](const Threadgroup& group) {
    const int64_t begin = group.index() * kTokens;
    const int64_t end = std::min(begin + kTokens, tensor->tokens);
    for (int64_t token = begin; token < end; ++token) {
      for (int head = 0; head < tensor->heads; ++head) {
        FillSynthRow({stream, token}, 0, kind, head,
                     std::span<BF16>(data + tensor->Offset(token, head),
                                     static_cast<size_t>(tensor->head_size)));
      }
    }
  };
  return runtime->Launch(grid, body, {.name = "make inputs"});
}

std::vector<int32_t> PrefixSum(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> sums = {0};
  for (const int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

}  // namespace

Result<AttentionCase> MakeRandomCase(const BatchSpec& spec,
                                     const RandomCaseShape& shape,
                                     Runtime* runtime) {
  AttentionCase c;
  c.source = "random";
  c.cu_seqlens_q = PrefixSum(spec.q_lens);
  c.cu_seqlens_k = PrefixSum(spec.kv_lens);
  c.scale = 1.0 / std::sqrt(static_cast<double>(shape.head_size));
  // Queries in bf16, with an output in fp32 each; keys and values.
  VARLANE_TOOLS_TRY(CheckRoom(
      shape.head_size * (6.0 * c.cu_seqlens_q.back() * shape.num_q_heads +
                         4.0 * c.cu_seqlens_k.back() * shape.num_kv_heads),
      "the case's tensors"));
  try {
    Allocate(c.cu_seqlens_q.back(), shape.num_q_heads, shape.head_size, &c.q);
    Allocate(c.cu_seqlens_k.back(), shape.num_kv_heads, shape.head_size, &c.k);
    Allocate(c.cu_seqlens_k.back(), shape.num_kv_heads, shape.head_size, &c.v);
  } catch (const std::bad_alloc&) {
    return Fail(StatusCode::kResourceExhausted,
                "no memory for {} query and {} context tokens",
                c.cu_seqlens_q.back(), c.cu_seqlens_k.back());
  }
  VARLANE_TOOLS_TRY(CheckShapes("random case", c));
  const uint64_t stream = RequestStream(static_cast<int64_t>(shape.seed));
  VARLANE_TOOLS_TRY(FillTensor(stream, SynthKind::kQuery, runtime, &c.q));
  VARLANE_TOOLS_TRY(FillTensor(stream, SynthKind::kKey, runtime, &c.k));
  VARLANE_TOOLS_TRY(FillTensor(stream, SynthKind::kValue, runtime, &c.v));
  return c;
}

}  // namespace varlane::tools
