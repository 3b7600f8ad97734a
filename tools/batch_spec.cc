// BatchSpec: a ragged batch in one word.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/batch_spec.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "tools/parse.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

constexpr int64_t kMaxSequences = int64_t{1} << 20;
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

struct Group {
  int64_t count = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
};

std::optional<Group> ParseGroup(std::string_view text) {
  const size_t x = text.find('x');
  if (x == std::string_view::npos) return std::nullopt;
  const size_t at = text.find('@', x);
  const auto count = ParseNumber<int64_t>(text.substr(0, x));
  const auto q_len = ParseNumber<int64_t>(
      text.substr(x + 1, at == std::string_view::npos ? at : at - x - 1));
  const auto kv_len = at == std::string_view::npos
                          ? q_len
                          : ParseNumber<int64_t>(text.substr(at + 1));
  if (!count || !q_len || !kv_len) return std::nullopt;
  if (*count < 1 || *count > kMaxSequences) return std::nullopt;
  if (*q_len < 0 || *q_len > kMaxTokens) return std::nullopt;
  if (*kv_len < 0 || *kv_len > kMaxTokens) return std::nullopt;
  return Group{*count, *q_len, *kv_len};
}

}  // namespace

Result<BatchSpec> ParseBatchSpec(std::string_view text) {
  BatchSpec spec;
  int64_t total_q = 0;
  int64_t total_kv = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    const std::optional<Group> group = ParseGroup(word);
    if (!group) {
      return BadArgument(
          "batch \"{}\": \"{}\" is not COUNTxQ@CONTEXT, e.g. 32x1@512", text,
          word);
    }
    total_q += group->count * group->q_len;
    total_kv += group->count * group->kv_len;
    const int64_t sequences =
        static_cast<int64_t>(spec.q_lens.size()) + group->count;
    if (sequences > kMaxSequences || total_q > kMaxTokens ||
        total_kv > kMaxTokens) {
      return BadArgument(
          "batch \"{}\" has {} sequences, {} query and {} context tokens up to "
          "\"{}\"; the limits are {}, {} and {}",
          text, sequences, total_q, total_kv, word, kMaxSequences, kMaxTokens,
          kMaxTokens);
    }
    spec.q_lens.insert(spec.q_lens.end(), static_cast<size_t>(group->count),
                       static_cast<int32_t>(group->q_len));
    spec.kv_lens.insert(spec.kv_lens.end(), static_cast<size_t>(group->count),
                        static_cast<int32_t>(group->kv_len));
    begin = end + 1;
  }
  return spec;
}

}  // namespace varlane::tools
