// Trace readers: which format a file has, and one reader for each.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/trace.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "tools/line_reader.h"
#include "tools/parse.h"
#include "tools/status_util.h"
#include "tools/timestamp.h"

namespace varlane::tools {
namespace {

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) {
    text.remove_prefix(1);
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) {
    text.remove_suffix(1);
  }
  return text;
}

// Fields of a CSV line; a field in double quotes may hold commas.
void SplitCsv(std::string_view line, std::vector<std::string_view>* fields) {
  fields->clear();
  size_t begin = 0;
  bool quoted = false;
  for (size_t i = 0; i <= line.size(); ++i) {
    if (i < line.size() && line[i] == '"') quoted = !quoted;
    if (i < line.size() && (line[i] != ',' || quoted)) continue;
    std::string_view field = Trim(line.substr(begin, i - begin));
    if (field.size() >= 2 && field.front() == '"' && field.back() == '"') {
      field = field.substr(1, field.size() - 2);
    }
    fields->push_back(field);
    begin = i + 1;
  }
}

// What an error message shows of a value that may be endless.
std::string Shown(std::string_view text) {
  constexpr size_t kMax = 60;
  std::string shown(text.substr(0, kMax));
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  }
  return text.size() > kMax ? shown + "..." : shown;
}

// Seconds, perhaps with a fraction, as nanoseconds; up to 30 years.
std::optional<int64_t> ParseSecondsNs(std::string_view text) {
  const auto seconds = ParseNumber<double>(text);
  if (!seconds || !(std::abs(*seconds) < 1e9)) return std::nullopt;
  return static_cast<int64_t>(std::llround(*seconds * 1e9));
}

std::optional<size_t> Find(const std::vector<std::string_view>& fields,
                           std::string_view name) {
  const auto it = std::find(fields.begin(), fields.end(), name);
  if (it == fields.end()) return std::nullopt;
  return static_cast<size_t>(it - fields.begin());
}

// --- CSV ---------------------------------------------------------------------

struct CsvColumn {
  std::string_view name;  // a literal
  size_t index = 0;
};

struct CsvColumns {
  CsvColumn time;
  CsvColumn input;
  CsvColumn output;
  size_t count = 0;
};

class CsvReader final : public TraceReader {
 public:
  CsvReader(TraceFormat format, LineReader lines, CsvColumns columns)
      : TraceReader(format), lines_(std::move(lines)), columns_(columns) {}

  Result<std::optional<TraceRequest>> Next() override {
    for (;;) {
      VARLANE_TOOLS_ASSIGN(const bool more, lines_.Next());
      if (!more) return std::optional<TraceRequest>();
      if (Trim(lines_.line()).empty()) continue;
      TraceRequest request;
      VARLANE_TOOLS_TRY(ParseRow(&request));
      if (request.output_tokens > 0) return std::optional(std::move(request));
      CountSkipped();
    }
  }

 private:
  Status ParseRow(TraceRequest* request) {
    SplitCsv(lines_.line(), &fields_);
    if (fields_.size() != columns_.count) {
      return BadArgument("{}:{}: {} columns, but the header has {}: \"{}\"",
                         lines_.path(), lines_.number(), fields_.size(),
                         columns_.count, Shown(lines_.line()));
    }
    const bool azure = format() == TraceFormat::kAzureCsv;
    const std::string_view time = fields_[columns_.time.index];
    const auto ns = azure ? ParseTimestampNs(time) : ParseSecondsNs(time);
    if (!ns) {
      return Wrong(columns_.time,
                   azure ? "YYYY-MM-DD hh:mm:ss.fffffff" : "seconds");
    }
    if (!first_ns_) first_ns_ = *ns;
    request->arrival_ns = *ns - *first_ns_;
    VARLANE_TOOLS_TRY(ParseTokens(columns_.output, 0, &request->output_tokens));
    // A failed request may have been refused before its prompt was counted.
    const int64_t min_input = request->output_tokens == 0 ? 0 : 1;
    return ParseTokens(columns_.input, min_input, &request->input_tokens);
  }

  Status ParseTokens(const CsvColumn& column, int64_t min, int64_t* tokens) {
    const auto value = ParseNumber<int64_t>(fields_[column.index]);
    if (!value || *value < min || *value > kMaxTraceTokens) {
      return Wrong(column,
                   fmt::format("an integer in [{}, {}]", min, kMaxTraceTokens));
    }
    *tokens = *value;
    return {};
  }

  Status Wrong(const CsvColumn& column, std::string_view expected) const {
    return BadArgument("{}:{}: column \"{}\" = \"{}\", expected {}",
                       lines_.path(), lines_.number(), column.name,
                       Shown(fields_[column.index]), expected);
  }

  LineReader lines_;
  CsvColumns columns_;
  std::vector<std::string_view> fields_;
  std::optional<int64_t> first_ns_;
};

// The columns of `format` in a header, or nothing.
std::optional<CsvColumns> FindColumns(
    TraceFormat format, const std::vector<std::string_view>& all) {
  CsvColumns columns;
  columns.count = all.size();
  if (format == TraceFormat::kAzureCsv) {
    columns.time.name = "TIMESTAMP";
    columns.input.name = "ContextTokens";
    columns.output.name = "GeneratedTokens";
  } else {
    columns.time.name = "Timestamp";
    columns.input.name = "Request tokens";
    columns.output.name = "Response tokens";
  }
  for (CsvColumn* column : {&columns.time, &columns.input, &columns.output}) {
    const auto index = Find(all, column->name);
    if (!index) return std::nullopt;
    column->index = *index;
  }
  return columns;
}

// --- JSONL -------------------------------------------------------------------

class MooncakeReader final : public TraceReader {
 public:
  // `lines` stands on the first row, read already.
  explicit MooncakeReader(LineReader lines)
      : TraceReader(TraceFormat::kMooncakeJsonl), lines_(std::move(lines)) {}

  Result<std::optional<TraceRequest>> Next() override {
    for (;;) {
      if (!first_line_) {
        VARLANE_TOOLS_ASSIGN(const bool more, lines_.Next());
        if (!more) return std::optional<TraceRequest>();
      }
      first_line_ = false;
      if (Trim(lines_.line()).empty()) continue;
      TraceRequest request;
      VARLANE_TOOLS_TRY(ParseRow(&request));
      if (request.output_tokens > 0) return std::optional(std::move(request));
      CountSkipped();
    }
  }

 private:
  using Json = nlohmann::json;

  Status ParseRow(TraceRequest* request) {
    const Json row = Json::parse(lines_.line(), nullptr, false);
    if (row.is_discarded() || !row.is_object()) {
      return BadArgument("{}:{}: not a JSON object: \"{}\"", lines_.path(),
                         lines_.number(), Shown(lines_.line()));
    }
    int64_t ms = 0;
    VARLANE_TOOLS_TRY(ParseInt(row, "timestamp", 0, int64_t{1} << 42, &ms));
    if (!first_ms_) first_ms_ = ms;
    request->arrival_ns = (ms - *first_ms_) * 1000000;
    VARLANE_TOOLS_TRY(ParseInt(row, "input_length", 1, kMaxTraceTokens,
                               &request->input_tokens));
    VARLANE_TOOLS_TRY(ParseInt(row, "output_length", 0, kMaxTraceTokens,
                               &request->output_tokens));
    return ParseHashIds(row, request);
  }

  Status ParseInt(const Json& row, const char* field, int64_t min, int64_t max,
                  int64_t* value) const {
    const auto it = row.find(field);
    if (it == row.end()) return Wrong(field, "", "it is missing");
    // Whole numbers only; 1e3 and 7.0 are numbers that JSON writers produce.
    const double number = it->is_number() ? it->get<double>() : 0.5;
    if (number != std::floor(number) || number < static_cast<double>(min) ||
        number > static_cast<double>(max)) {
      return Wrong(field, it->dump(),
                   fmt::format("expected an integer in [{}, {}]", min, max));
    }
    *value = static_cast<int64_t>(number);
    return {};
  }

  Status ParseHashIds(const Json& row, TraceRequest* request) const {
    const auto it = row.find("hash_ids");
    if (it == row.end()) return Wrong("hash_ids", "", "it is missing");
    if (!it->is_array()) return Wrong("hash_ids", it->dump(), "not an array");
    const int64_t expected =
        (request->input_tokens + kHashBlockTokens - 1) / kHashBlockTokens;
    if (static_cast<int64_t>(it->size()) != expected) {
      return Wrong(
          "hash_ids", fmt::format("{} ids", it->size()),
          fmt::format("expected {}, one for each {} of {} tokens", expected,
                      kHashBlockTokens, request->input_tokens));
    }
    request->hash_ids.reserve(it->size());
    for (const Json& id : *it) {
      if (!id.is_number_integer()) {
        return Wrong("hash_ids", id.dump(), "expected integers");
      }
      request->hash_ids.push_back(id.get<int64_t>());
    }
    return {};
  }

  Status Wrong(const char* field, const std::string& value,
               std::string_view why) const {
    return BadArgument("{}:{}: field \"{}\"{}{}, {}", lines_.path(),
                       lines_.number(), field, value.empty() ? "" : " = ",
                       Shown(value), why);
  }

  LineReader lines_;
  bool first_line_ = true;
  std::optional<int64_t> first_ms_;
};

}  // namespace

const char* TraceFormatName(TraceFormat format) {
  switch (format) {
    case TraceFormat::kAzureCsv:
      return "Azure CSV";
    case TraceFormat::kMooncakeJsonl:
      return "Mooncake JSONL";
    case TraceFormat::kBurstGptCsv:
      return "BurstGPT CSV";
  }
  return "?";
}

Result<std::unique_ptr<TraceReader>> TraceReader::Open(
    const std::string& path) {
  VARLANE_TOOLS_ASSIGN(LineReader lines, LineReader::Open(path));
  do {
    VARLANE_TOOLS_ASSIGN(const bool more, lines.Next());
    if (!more) return BadArgument("{}: the trace is empty", path);
  } while (Trim(lines.line()).empty());

  std::string_view header = lines.line();
  if (header.substr(0, 3) == "\xef\xbb\xbf") header.remove_prefix(3);
  header = Trim(header);
  if (!header.empty() && header.front() == '{') {
    return std::unique_ptr<TraceReader>(new MooncakeReader(std::move(lines)));
  }
  std::vector<std::string_view> names;
  SplitCsv(header, &names);
  for (const TraceFormat format :
       {TraceFormat::kAzureCsv, TraceFormat::kBurstGptCsv}) {
    if (const auto columns = FindColumns(format, names)) {
      return std::unique_ptr<TraceReader>(
          new CsvReader(format, std::move(lines), *columns));
    }
  }
  return BadArgument(
      "{}:{}: \"{}\" starts no known trace: Azure CSV (TIMESTAMP, "
      "ContextTokens, GeneratedTokens), BurstGPT CSV (Timestamp, Request "
      "tokens, Response tokens) or Mooncake JSONL",
      path, lines.number(), Shown(header));
}

void NormalizeArrivals(std::vector<TraceRequest>* requests) {
  std::stable_sort(requests->begin(), requests->end(),
                   [](const TraceRequest& a, const TraceRequest& b) {
                     return a.arrival_ns < b.arrival_ns;
                   });
  if (requests->empty()) return;
  const int64_t first = requests->front().arrival_ns;
  for (TraceRequest& request : *requests) request.arrival_ns -= first;
}

Result<Trace> ReadTrace(const std::string& path, int64_t max_requests) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<TraceReader> reader,
                       TraceReader::Open(path));
  Trace trace;
  trace.source = path;
  trace.format = reader->format();
  while (max_requests == 0 ||
         static_cast<int64_t>(trace.requests.size()) < max_requests) {
    VARLANE_TOOLS_ASSIGN(std::optional<TraceRequest> request, reader->Next());
    if (!request) break;
    trace.requests.push_back(*std::move(request));
  }
  trace.skipped = reader->skipped();
  if (trace.requests.empty()) {
    return BadArgument("{}: the trace has no request that produced a token",
                       path);
  }
  NormalizeArrivals(&trace.requests);
  return trace;
}

}  // namespace varlane::tools
