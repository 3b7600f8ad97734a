// Trace readers on small files always, on the public traces when present.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/trace.h"

#include <filesystem>
#include <sstream>
#include <string>

#include "tests/testing/files.h"
#include "tests/testing/testing.h"
#include "tools/line_reader.h"
#include "tools/synthetic_trace.h"

namespace varlane::tools {
namespace {

// A file that lives as long as the test.
class TraceTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& text) {
    testing::WriteWholeFile(path_, text);
    return path_;
  }

  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("trace");
};

// What is wrong with a trace: reads it to its end.
std::string ErrorOf(const std::string& path) {
  const auto trace = ReadTrace(path, 0);
  return trace.ok() ? "no error" : std::string(trace.status().message());
}

TEST_F(TraceTest, AzureCsvIsReadWithCrlfSevenDigitsAndNoFinalNewline) {
  const auto trace =
      ReadTrace(Write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                      "2023-11-16 18:15:46.6805900,374,44\r\n"
                      "2023-11-16 18:15:50.9951690,396,109"),
                0);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->format, TraceFormat::kAzureCsv);
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_EQ(trace->requests[0].arrival_ns, 0);
  EXPECT_EQ(trace->requests[1].arrival_ns, 4314579000);
  EXPECT_EQ(trace->requests[0].input_tokens, 374);
  EXPECT_EQ(trace->requests[0].output_tokens, 44);
  EXPECT_EQ(trace->requests[1].output_tokens, 109);
}

TEST_F(TraceTest, AzureTimesCrossMidnightMonthAndLeapDay) {
  const auto trace = ReadTrace(Write("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                                     "2024-02-28 23:59:59,1,1\n"
                                     "2024-02-29T00:00:00.5+00:00,1,1\n"
                                     "2024-03-01 00:00:00.25,1,1\n"),
                               0);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->requests[1].arrival_ns, 1500000000);
  EXPECT_EQ(trace->requests[2].arrival_ns, 86401250000000);
}

TEST_F(TraceTest, MooncakeJsonlKeepsItsHashIds) {
  const auto trace = ReadTrace(
      Write("{\"timestamp\": 27482, \"input_length\": 600, \"output_length\": "
            "52, \"hash_ids\": [46, 47]}\n"
            "{\"hash_ids\":[46],\"output_length\":1,\"input_length\":512,"
            "\"timestamp\":30482}\n"),
      0);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->format, TraceFormat::kMooncakeJsonl);
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_EQ(trace->requests[0].hash_ids, (std::vector<int64_t>{46, 47}));
  EXPECT_EQ(trace->requests[1].arrival_ns, 3000000000);
}

TEST_F(TraceTest, BurstGptIsReadByHeaderAndFailuresAreCounted) {
  const auto trace = ReadTrace(
      Write("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log "
            "Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n"
            "45.5,\"GPT-4, turbo\",1087,230,1317,Conversation log\n"
            "118,GPT-4,417,0,417,Conversation log\n"
            "119,GPT-4,0,0,0,API log\n"),
      0);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->format, TraceFormat::kBurstGptCsv);
  EXPECT_EQ(trace->skipped, 2);
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_EQ(trace->requests[1].arrival_ns, 40500000000);
  EXPECT_EQ(trace->requests[1].input_tokens, 1087);
}

TEST_F(TraceTest, BurstGptMayHaveSessionsAndElapsedTimes) {
  const auto trace =
      ReadTrace(Write("Timestamp,Session ID,Elapsed time,Model,Request "
                      "tokens,Response tokens,Total tokens,Log Type\n"
                      "5,77,3.25,ChatGPT,472,18,490,Conversation log\n"),
                0);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->requests[0].input_tokens, 472);
  EXPECT_EQ(trace->requests[0].output_tokens, 18);
}

TEST_F(TraceTest, OnlyTheRequestsAskedForAreRead) {
  const std::string path = Write(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,2,1\nnonsense\n");
  const auto trace = ReadTrace(path, 2);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->requests.size(), 2u);
  EXPECT_FALSE(ReadTrace(path, 3).ok());  // the third row is really wrong
}

TEST_F(TraceTest, RequestsAreOrderedByArrival) {
  const auto trace =
      ReadTrace(Write("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                      "2023-11-16 18:15:48,3,1\n2023-11-16 18:15:46,1,1\n"),
                0);
  VARLANE_ASSERT_OK(trace);
  EXPECT_EQ(trace->requests[0].input_tokens, 1);
  EXPECT_EQ(trace->requests[0].arrival_ns, 0);
  EXPECT_EQ(trace->requests[1].arrival_ns, 2000000000);
}

struct BadTrace {
  const char* name;
  const char* text;
  const char* error;  // after the path
};
void PrintTo(const BadTrace& bad, std::ostream* out) { *out << bad.name; }

class BadTraceTest : public TraceTest,
                     public ::testing::WithParamInterface<BadTrace> {};

TEST_P(BadTraceTest, IsRefusedWithLineFieldAndValue) {
  const std::string error = ErrorOf(Write(GetParam().text));
  EXPECT_EQ(error.substr(0, path_.size()), path_) << error;
  EXPECT_NE(error.find(GetParam().error), std::string::npos) << error;
}

#define AZURE "TIMESTAMP,ContextTokens,GeneratedTokens\n"
#define BURST "Timestamp,Request tokens,Response tokens\n"
constexpr BadTrace kBadTraces[] = {
    {"Empty", "", ": the trace is empty"},
    {"OnlyBlankLines", "\n\r\n", ": the trace is empty"},
    {"UnknownHeader", "a,b,c\n1,2,3\n", ":1: \"a,b,c\" starts no known trace"},
    {"NoRows", AZURE, ": the trace has no request"},
    {"TooFewColumns", AZURE "2023-11-16 18:15:46,5\n",
     ":2: 2 columns, but the header has 3"},
    {"BadTokens", AZURE "2023-11-16 18:15:46,5,1\n2023-11-16 18:15:46,x,1\n",
     ":3: column \"ContextTokens\" = \"x\", expected an integer in [1, "},
    {"NegativeTokens", AZURE "2023-11-16 18:15:46,-5,1\n",
     ":2: column \"ContextTokens\" = \"-5\""},
    {"HugeTokens", AZURE "2023-11-16 18:15:46,5,99999999999\n",
     ":2: column \"GeneratedTokens\" = \"99999999999\""},
    {"NoPrompt", AZURE "2023-11-16 18:15:46,0,3\n",
     ":2: column \"ContextTokens\" = \"0\""},
    {"BadTime", AZURE "2023-11-31 18:15:46,5,1\n",
     ":2: column \"TIMESTAMP\" = \"2023-11-31 18:15:46\", expected YYYY"},
    {"BadFraction", AZURE "2023-11-16 18:15:46.,5,1\n",
     ":2: column \"TIMESTAMP\""},
    {"BadSeconds", BURST "soon,5,1\n",
     ":2: column \"Timestamp\" = \"soon\", expected seconds"},
    {"NotJson", "{\"timestamp\": 0,\n", ":1: not a JSON object"},
    {"CutJson",
     "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,"
     "\"hash_ids\":[1]}\n{\"timestamp\":0,\"inp",
     ":2: not a JSON object: \"{\"timestamp\":0,\"inp\""},
    {"MissingField", "{\"timestamp\":0,\"input_length\":1}\n",
     ":1: field \"output_length\", it is missing"},
    {"TextForNumber",
     "{\"timestamp\":0,\"input_length\":\"7\",\"output_length\":1}\n",
     ":1: field \"input_length\" = \"7\", expected an integer in [1, "},
    {"HalfAToken", "{\"timestamp\":0,\"input_length\":1.5}\n",
     ":1: field \"input_length\" = 1.5"},
    {"TooFewHashIds",
     "{\"timestamp\":0,\"input_length\":513,\"output_length\":1,"
     "\"hash_ids\":[1]}\n",
     ":1: field \"hash_ids\" = 1 ids, expected 2, one for each 512 of 513"},
    {"BadHashId",
     "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,"
     "\"hash_ids\":[\"x\"]}\n",
     ":1: field \"hash_ids\" = \"x\", expected integers"},
};
#undef AZURE
#undef BURST
INSTANTIATE_TEST_SUITE_P(Files, BadTraceTest, ::testing::ValuesIn(kBadTraces),
                         [](const auto& test) {
                           return std::string(test.param.name);
                         });

TEST_F(TraceTest, AFileThatCannotBeOpenedIsNamedWithItsReason) {
  EXPECT_EQ(ErrorOf("/no/such/trace.csv"),
            "/no/such/trace.csv cannot be read: No such file or directory");
  EXPECT_EQ(ErrorOf("/tmp"), "/tmp cannot be read: it is a directory");
}

TEST_F(TraceTest, AnEndlessLineIsRefusedInsteadOfFillingMemory) {
  const std::string path = Write(std::string(kMaxLineBytes + 1, 'x'));
  EXPECT_EQ(ErrorOf(path), path + ":1: the line is longer than 16777216 bytes");
}

// --- the public traces, where they lie beside the source tree ----------------

struct PublicTrace {
  const char* file;
  int64_t rows;
  int64_t input_tokens;
  int64_t output_tokens;
  int64_t hash_ids;
};
void PrintTo(const PublicTrace& trace, std::ostream* out) {
  *out << trace.file;
}

class PublicTraceTest : public ::testing::TestWithParam<PublicTrace> {};

TEST_P(PublicTraceTest, RowsAndSumsAreThoseOfTheFile) {
  const PublicTrace& expected = GetParam();
  const std::string path =
      std::string(VARLANE_SOURCE_DIR "/../shared/traces/") + expected.file;
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not here";
  const auto trace = ReadTrace(path, 0);
  VARLANE_ASSERT_OK(trace);
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  int64_t hash_ids = 0;
  for (const TraceRequest& request : trace->requests) {
    input_tokens += request.input_tokens;
    output_tokens += request.output_tokens;
    hash_ids += static_cast<int64_t>(request.hash_ids.size());
  }
  EXPECT_EQ(static_cast<int64_t>(trace->requests.size()), expected.rows);
  EXPECT_EQ(input_tokens, expected.input_tokens);
  EXPECT_EQ(output_tokens, expected.output_tokens);
  EXPECT_EQ(hash_ids, expected.hash_ids);
  EXPECT_EQ(trace->skipped, 0);
}

// Sums computed with awk resp. Python's json.
INSTANTIATE_TEST_SUITE_P(
    Files, PublicTraceTest,
    ::testing::Values(PublicTrace{"AzureLLMInferenceTrace_conv.csv", 19366,
                                  22361870, 4088665, 0},
                      PublicTrace{"AzureLLMInferenceTrace_code.csv", 8819,
                                  18059974, 245896, 0},
                      PublicTrace{"mooncake_conversation_trace.jsonl", 12031,
                                  144793823, 4122048, 288500},
                      PublicTrace{"mooncake_synthetic_trace.jsonl", 3993,
                                  61194628, 595432, 121877}),
    [](const auto& test) { return std::to_string(test.param.rows) + "_rows"; });

// --- synthetic traces --------------------------------------------------------

using SyntheticTraceTest = TraceTest;

TEST_F(SyntheticTraceTest, TheSameSeedMakesTheSameTrace) {
  const auto text = [](uint64_t seed) {
    const auto trace = MakeSyntheticTrace({.seed = seed});
    std::ostringstream out;
    EXPECT_TRUE(WriteTrace(*trace, TraceFormat::kAzureCsv, out).ok());
    return out.str();
  };
  EXPECT_EQ(text(1), text(1));
  EXPECT_NE(text(1), text(2));
}

TEST_F(SyntheticTraceTest, LengthsAndArrivalsFollowTheirDistributions) {
  SyntheticTraceOptions options;
  options.requests = 20000;
  const auto trace = MakeSyntheticTrace(options);
  VARLANE_ASSERT_OK(trace);
  int64_t below_median = 0;
  for (const TraceRequest& request : trace->requests) {
    EXPECT_GE(request.input_tokens, 1);
    EXPECT_LE(request.input_tokens, options.max_input);
    EXPECT_LE(request.output_tokens, options.max_output);
    below_median +=
        static_cast<double>(request.input_tokens) < options.input_median ? 1
                                                                         : 0;
  }
  EXPECT_NEAR(static_cast<double>(below_median), 10000.0, 400.0);
  const double span =
      static_cast<double>(trace->requests.back().arrival_ns) * 1e-9;
  EXPECT_NEAR(20000 / span, options.rate, 0.2);
}

TEST_F(SyntheticTraceTest, BothFormatsReadBackAsWritten) {
  SyntheticTraceOptions options;
  options.requests = 300;
  options.input_median = 900;  // so that blocks are shared
  const auto trace = MakeSyntheticTrace(options);
  VARLANE_ASSERT_OK(trace);
  for (const TraceFormat format :
       {TraceFormat::kAzureCsv, TraceFormat::kMooncakeJsonl}) {
    std::ostringstream out;
    VARLANE_ASSERT_OK(WriteTrace(*trace, format, out));
    const auto read = ReadTrace(Write(out.str()), 0);
    VARLANE_ASSERT_OK(read);
    EXPECT_EQ(read->format, format);
    ASSERT_EQ(read->requests.size(), trace->requests.size());
    const int64_t tick = format == TraceFormat::kAzureCsv ? 100 : 1000000;
    for (size_t i = 0; i < read->requests.size(); ++i) {
      const TraceRequest& a = trace->requests[i];
      const TraceRequest& b = read->requests[i];
      EXPECT_EQ(b.arrival_ns, a.arrival_ns / tick * tick);
      EXPECT_EQ(b.input_tokens, a.input_tokens);
      EXPECT_EQ(b.output_tokens, a.output_tokens);
      if (format == TraceFormat::kMooncakeJsonl) {
        EXPECT_EQ(b.hash_ids, a.hash_ids);
      }
    }
  }
}

TEST_F(SyntheticTraceTest, BadOptionsAreNamed) {
  const auto trace = MakeSyntheticTrace({.rate = 0});
  ASSERT_FALSE(trace.ok());
  EXPECT_EQ(trace.status().message(),
            "rate = 0, expected a number in (0, 1000000]");
}

}  // namespace
}  // namespace varlane::tools
