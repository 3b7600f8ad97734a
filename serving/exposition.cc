// SPDX-License-Identifier: Apache-2.0

#include "serving/exposition.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>

#include "base/check.h"

namespace varlane {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

bool IsLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// Bytes of the UTF-8 sequence that `text` begins with (RFC 3629); 0 = none.
size_t SequenceBytes(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const auto continues = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    if (!continues(1) || !continues(2)) return 0;
    const bool overlong = first == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = first == 0xed && byte(1) >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    const bool overlong = first == 0xf0 && byte(1) < 0x90;
    const bool beyond = first == 0xf4 && byte(1) >= 0x90;
    return overlong || beyond ? 0 : 4;
  }
  return 0;
}

void AppendEscaped(std::string_view text, bool quotes, std::string* out) {
  while (!text.empty()) {
    const size_t size = SequenceBytes(text);
    if (size == 0) {
      out->append(kReplacement);
      text.remove_prefix(1);
      continue;
    }
    switch (text[0]) {
      case '\\':
        out->append("\\\\");
        break;
      case '\n':
        out->append("\\n");
        break;
      case '"':
        out->append(quotes ? "\\\"" : "\"");
        break;
      default:
        out->append(text.substr(0, size));
    }
    text.remove_prefix(size);
  }
}

template <typename Number>
void AppendNumber(Number value, std::string* out) {
  std::array<char, 32> digits;
  const auto [end, error] =
      std::to_chars(digits.data(), digits.data() + digits.size(), value);
  (void)error;  // 32 characters hold any of them
  out->append(digits.data(), end);
}

}  // namespace

bool Exposition::IsLabelName(std::string_view name) {
  return !name.empty() && IsLetter(name[0]) && !name.starts_with("__") &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return IsLetter(c) || (c >= '0' && c <= '9');
         });
}

void Exposition::Gauge(std::string_view name, std::string_view help) {
  Family(name, help, "gauge");
}

void Exposition::Counter(std::string_view name, std::string_view help) {
  VARLANE_DCHECK(name.ends_with("_total"));
  Family(name, help, "counter");
}

void Exposition::Family(std::string_view name, std::string_view help,
                        std::string_view type) {
  name_ = name;
  text_.append("# HELP ").append(name).append(" ");
  AppendEscaped(help, /*quotes=*/false, &text_);
  text_.append("\n# TYPE ").append(name).append(" ").append(type).append("\n");
}

void Exposition::AddLabel(std::string_view name, std::string_view value,
                          bool first) {
  text_.append(first ? "{" : ",").append(name).append("=\"");
  AppendEscaped(value, /*quotes=*/true, &text_);
  text_.append("\"");
}

void Exposition::BeginSample(std::initializer_list<Label> labels) {
  text_.append(name_);
  bool first = true;
  for (const MetricsLabel& label : common_) {
    AddLabel(label.name, label.value, first);
    first = false;
  }
  for (const Label& label : labels) {
    AddLabel(label.name, label.value, first);
    first = false;
  }
  text_.append(first ? " " : "} ");
}

void Exposition::Sample(std::initializer_list<Label> labels, int64_t value) {
  BeginSample(labels);
  AppendNumber(value, &text_);
  text_.append("\n");
}

void Exposition::Sample(std::initializer_list<Label> labels, double value) {
  BeginSample(labels);
  if (std::isfinite(value)) {
    AppendNumber(value, &text_);
  } else {
    text_.append(std::isnan(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf");
  }
  text_.append("\n");
}

}  // namespace varlane
