// `varlane attend`: cases from files against softmax written down once more,
// and what is refused.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/cli.h"
#include "tests/testing/files.h"
#include "tests/testing/testing.h"
#include "tools/kv_synth.h"
#include "tools/safetensors.h"

namespace varlane::tools {
namespace {

using testing::Outcome;
using testing::ReadWholeFile;
using Json = nlohmann::json;

// A case in memory, written as a file: f32, values exact in bf16.
struct Case {
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t d = 32;
  int64_t dv = 40;
  std::vector<int32_t> cu_q = {0, 1, 8, 8, 12, 15};
  std::vector<int32_t> cu_k = {0, 33, 73, 80, 80, 81};  // kv 33, 40, 7, 0, 1
  std::map<std::string, std::string> metadata;
  std::vector<TensorToWrite> extra;
  int64_t window = 0;  // each of these is written where it is set
  double softcap = 0;
  std::vector<float> slopes;
  std::vector<float> sinks;
  std::vector<float> q = Fill(SynthKind::kQuery, 15, heads* d);
  std::vector<float> k = Fill(SynthKind::kKey, 81, kv_heads* d);
  std::vector<float> v = Fill(SynthKind::kValue, 81, kv_heads* dv);

  static std::vector<float> Fill(SynthKind kind, int64_t tokens, int64_t n) {
    std::vector<float> values(static_cast<size_t>(tokens * n));
    for (int64_t t = 0; t < tokens; ++t) {
      FillSynthRow({42, t}, 0, kind, 0,
                   std::span(values).subspan(static_cast<size_t>(t * n),
                                             static_cast<size_t>(n)));
    }
    return values;
  }
  Status Write(const std::string& path) const {
    const auto size = [](const auto& x) {
      return static_cast<int64_t>(x.size());
    };
    std::vector<TensorToWrite> tensors = {
        {"q", TensorType::kF32, {cu_q.back(), heads, d}, q.data()},
        {"k", TensorType::kF32, {cu_k.back(), kv_heads, d}, k.data()},
        {"v", TensorType::kF32, {cu_k.back(), kv_heads, dv}, v.data()},
        {"cu_seqlens_q", TensorType::kI32, {size(cu_q)}, cu_q.data()},
        {"cu_seqlens_k", TensorType::kI32, {size(cu_k)}, cu_k.data()}};
    tensors.insert(tensors.end(), extra.begin(), extra.end());
    for (const auto& [name, values] :
         {std::pair<const char*, const std::vector<float>&>{"alibi_slopes",
                                                            slopes},
          {"sinks", sinks}}) {
      if (values.empty()) continue;
      tensors.push_back({name, TensorType::kF32, {heads}, values.data()});
    }
    auto strings = metadata;
    if (window != 0) strings["window"] = std::to_string(window);
    if (softcap != 0) strings["softcap"] = std::to_string(softcap);
    return WriteSafetensors(path, tensors, strings);
  }
  int64_t NumKeys(size_t seq, int64_t i, bool causal) const {
    const int64_t q_len = cu_q[seq + 1] - cu_q[seq];
    const int64_t kv_len = cu_k[seq + 1] - cu_k[seq];
    return causal ? std::max<int64_t>(kv_len - q_len + i + 1, 0) : kv_len;
  }
};

struct Answer {
  std::vector<float> out;
  std::vector<float> lse;
};

Answer ReadAnswer(const std::string& path) {
  Answer answer;
  auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(testing::IsOk(file));
  if (!file.ok()) return answer;
  EXPECT_EQ(file->tensors().size(), 2u);
  for (auto& [name, values] :
       {std::pair<const char*, std::vector<float>&>{"out", answer.out},
        {"lse", answer.lse}}) {
    const auto bytes = file->Read(name);
    EXPECT_TRUE(testing::IsOk(bytes));
    values.resize(bytes->size() / sizeof(float));
    std::memcpy(values.data(), bytes->data(), bytes->size());
  }
  return answer;
}

// Softmax attention of one row, written down once more: a plain sum of
// exponentials in long double (scores here are small), no code shared.
void ExpectRow(const Case& c, size_t seq, int64_t i, int64_t head,
               int64_t num_keys, long double scale, const Answer& answer,
               double tolerance) {
  const int64_t token = c.cu_q[seq] + i;
  const int64_t kv_head = head / (c.heads / c.kv_heads);
  const int64_t position =
      c.cu_k[seq + 1] - c.cu_k[seq] - (c.cu_q[seq + 1] - c.cu_q[seq]) + i;
  const auto h = static_cast<size_t>(head);
  std::vector<long double> sums(static_cast<size_t>(c.dv), 0);
  long double total = c.sinks.empty() ? 0.0L : std::exp(1.0L * c.sinks[h]);
  for (int64_t t = 0; t < num_keys; ++t) {
    if (c.window > 0 && position - t >= c.window) continue;
    const int64_t row = (c.cu_k[seq] + t) * c.kv_heads + kv_head;
    long double score = 0;
    for (int64_t d = 0; d < c.d; ++d) {
      score +=
          static_cast<long double>(
              c.q[static_cast<size_t>((token * c.heads + head) * c.d + d)]) *
          c.k[static_cast<size_t>(row * c.d + d)];
    }
    score *= scale;
    if (c.softcap != 0) score = c.softcap * std::tanh(score / c.softcap);
    if (!c.slopes.empty()) {
      score += 1.0L * c.slopes[h] * static_cast<long double>(t - position);
    }
    const long double p = std::exp(score);
    total += p;
    for (int64_t d = 0; d < c.dv; ++d) {
      sums[static_cast<size_t>(d)] +=
          p * c.v[static_cast<size_t>(row * c.dv + d)];
    }
  }
  const auto at = static_cast<size_t>(token * c.heads + head);
  if (total == 0) {
    EXPECT_EQ(answer.lse[at], -std::numeric_limits<float>::infinity());
  } else {
    EXPECT_NEAR(answer.lse[at], static_cast<double>(std::log(total)), 1e-4);
  }
  for (int64_t d = 0; d < c.dv; ++d) {
    const double expected =
        num_keys == 0
            ? 0
            : static_cast<double>(sums[static_cast<size_t>(d)] / total);
    ASSERT_NEAR(
        answer.out[at * static_cast<size_t>(c.dv) + static_cast<size_t>(d)],
        expected, num_keys == 0 ? 0 : tolerance)
        << "sequence " << seq << " query " << i << " head " << head;
  }
}

void ExpectAnswer(const Case& c, const Answer& answer, bool causal,
                  double scale, double tolerance) {
  ASSERT_EQ(answer.lse.size(), static_cast<size_t>(c.cu_q.back() * c.heads));
  ASSERT_EQ(answer.out.size(), answer.lse.size() * static_cast<size_t>(c.dv));
  for (size_t seq = 0; seq + 1 < c.cu_q.size(); ++seq) {
    for (int64_t i = 0; i < c.cu_q[seq + 1] - c.cu_q[seq]; ++i) {
      for (int64_t head = 0; head < c.heads; ++head) {
        ExpectRow(c, seq, i, head, c.NumKeys(seq, i, causal), scale, answer,
                  tolerance);
      }
    }
  }
}

class AttendTest : public testing::CliTest {
 protected:
  Answer Attend(const Case& c, const std::string& options) const {
    EXPECT_TRUE(testing::IsOk(c.Write(Path("case.safetensors"))));
    const Outcome outcome =
        Varlane("attend " + Path("case.safetensors") + " --out " +
                Path("out.safetensors") + " " + options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return ReadAnswer(Path("out.safetensors"));
  }
  void ExpectCaseRefused(const Case& c, const std::string& message) const {
    ASSERT_TRUE(testing::IsOk(c.Write(Path("case.safetensors"))));
    ExpectRefusal("attend " + Path("case.safetensors") + " --out " +
                      Path("out.safetensors"),
                  1, Path("case.safetensors") + ": " + message);
    EXPECT_FALSE(std::filesystem::exists(Path("out.safetensors")));
  }
};

// q_len 0, kv_len 0, q_len > kv_len and Dv != D are all in the case.
TEST_F(AttendTest, MatchesSoftmaxWrittenDownOnceMore) {
  const Case c;
  const double scale = 1 / std::sqrt(32.0);
  ExpectAnswer(c, Attend(c, "--kv-dtype f32"), true, scale, 2e-5);
  ExpectAnswer(c, Attend(c, "--kv-dtype f16"), true, scale, 2e-5);
  // |v| < 3: weights rounded to bf16 move an average by less than 3 x 2^-8.
  ExpectAnswer(c, Attend(c, "--kv-dtype bf16"), true, scale, 0.012);
  // The default is the type that k has.
  const Answer by_default = Attend(c, "");
  ExpectAnswer(c, by_default, true, scale, 2e-5);
}

TEST_F(AttendTest, MetadataSetsScaleAndMask) {
  Case c;
  c.metadata = {{"scale", "-0.25"}, {"causal", "False"}, {"format", "pt"}};
  ExpectAnswer(c, Attend(c, ""), false, -0.25, 2e-5);
}

TEST_F(AttendTest, NoOptionOfTheLaunchChangesABit) {
  const Case c;
  const Answer base = Attend(c, "--kv-dtype bf16 --threads 1");
  for (const char* options :
       {"--owner map", "--owner planned", "--owner padded",
        "--partitions spread", "--partitions walk", "--block-size 64",
        "--seed 7", "--threads 3", "--repeat 3",
        "--owner map --partitions spread --block-size 256 --seed 9"}) {
    const Answer other = Attend(c, std::string("--kv-dtype bf16 ") + options);
    ASSERT_EQ(base.out.size(), other.out.size());
    EXPECT_EQ(std::memcmp(base.out.data(), other.out.data(),
                          base.out.size() * sizeof(float)),
              0)
        << options;
    EXPECT_EQ(base.lse, other.lse) << options;
  }
}

constexpr float kNoSink = -std::numeric_limits<float>::infinity();

struct Feature {
  const char* name;
  void (*set)(Case*);
};
const Feature kFeatures[] = {{"window", [](Case* c) { c->window = 9; }},
                             {"softcap", [](Case* c) { c->softcap = 0.75; }},
                             // Neither powers of two nor all of one sign.
                             {"alibi_slopes",
                              [](Case* c) {
                                c->slopes = {0.3F, 0, -0.07F, 0.011F};
                              }},
                             {"sinks", [](Case* c) {
                                c->sinks = {1.5F, kNoSink, 0, -2.25F};
                              }}};

// A row without a key has its sink for an LSE: that row is in the case too.
TEST_F(AttendTest, EachSubsetOfWindowSoftcapAlibiAndSinksMatchesSoftmax) {
  const double scale = 1 / std::sqrt(32.0);
  const Answer plain = Attend(Case(), "--verify 1");
  for (unsigned subset = 1; subset < 16; ++subset) {
    Case c;
    std::string names;
    for (unsigned i = 0; i < 4; ++i) {
      if ((subset >> i & 1) == 0) continue;
      kFeatures[i].set(&c);
      names += std::string(" ") + kFeatures[i].name;
    }
    SCOPED_TRACE(names);
    // The command's own check must agree as well: it fails the command.
    const Answer answer = Attend(c, "--verify 1 --partitions spread");
    ExpectAnswer(c, answer, true, scale, 2e-5);
    EXPECT_NE(answer.lse, plain.lse);
    ExpectAnswer(c, Attend(c, "--verify 1 --kv-dtype bf16"), true, scale,
                 0.012);
  }
}

TEST_F(AttendTest, AWindowOfOneSeesTheQueryItselfOnly) {
  Case c;
  c.window = 1;
  const Answer answer = Attend(c, "--verify 1");
  ExpectAnswer(c, answer, true, 1 / std::sqrt(32.0), 2e-5);
  // Query 0 stands at position 32 of sequence 0: its out is that token's v.
  for (int64_t d = 0; d < c.dv; ++d) {
    EXPECT_EQ(answer.out[static_cast<size_t>(d)],
              c.v[static_cast<size_t>(32 * c.kv_heads * c.dv + d)]);
  }
}

TEST_F(AttendTest, SoftcapAlibiAndSinksWorkWithoutACausalMask) {
  Case c;
  c.metadata = {{"causal", "false"}};
  for (const size_t i : {1, 2, 3}) kFeatures[i].set(&c);
  ExpectAnswer(c, Attend(c, "--verify 1"), false, 1 / std::sqrt(32.0), 2e-5);
}

TEST_F(AttendTest, HeadSizesFromEightTo576AreServed) {
  for (const auto& [d, dv] :
       {std::pair<int64_t, int64_t>{8, 8}, {576, 512}, {264, 576}}) {
    Case c;
    c.heads = 2;
    c.kv_heads = 1;
    c.d = d;
    c.dv = dv;
    c.q = Case::Fill(SynthKind::kQuery, 15, c.heads * d);
    c.k = Case::Fill(SynthKind::kKey, 81, d);
    c.v = Case::Fill(SynthKind::kValue, 81, dv);
    c.window = 20;
    c.sinks = {0.5F, -1};
    SCOPED_TRACE(d);
    ExpectAnswer(c, Attend(c, "--verify 1"), true,
                 1 / std::sqrt(static_cast<double>(d)), 2e-5);
  }
  ExpectRefusal("attend --random 1x1@9 --head-size 584", 1, "head_size = 584");
  ExpectRefusal("attend --random 1x1@9 --head-size 12", 1, "head_size = 12");
}

TEST_F(AttendTest, TheReportNamesWhatShapesTheScores) {
  Case c;
  for (const Feature& feature : kFeatures) feature.set(&c);
  ASSERT_TRUE(testing::IsOk(c.Write(Path("case.safetensors"))));
  const Outcome outcome =
      Varlane("attend " + Path("case.safetensors") + " --out " +
              Path("out.safetensors") + " --json " + Path("a.json"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(
      outcome.out.find(", causal, window 9, softcap 0.75, ALiBi, sinks\n"),
      std::string::npos)
      << outcome.out;
  const Json json = Json::parse(ReadWholeFile(Path("a.json")));
  EXPECT_EQ(json["case"]["window"], 9);
  EXPECT_EQ(json["case"]["softcap"], 0.75);
  EXPECT_EQ(json["case"]["alibi"], true);
  EXPECT_EQ(json["case"]["sinks"], true);
}

TEST_F(AttendTest, FeatureValuesThatMakeNoSenseAreRefusedByName) {
  const auto refuse = [&](std::map<std::string, std::string> metadata,
                          const std::string& message) {
    Case c;
    c.metadata = std::move(metadata);
    ExpectCaseRefused(c, message);
  };
  refuse({{"window", "-1"}}, "metadata \"window\" = \"-1\", expected 0 for");
  refuse({{"window", "8.5"}}, "metadata \"window\" = \"8.5\", expected 0 for");
  refuse({{"window", "4294967297"}}, "metadata \"window\" = \"4294967297\", ");
  refuse({{"window", "8"}, {"causal", "False"}},
         "metadata \"window\" = \"8\" with \"causal\" = \"False\": a window is "
         "defined for causal attention only");
  refuse({{"softcap", "-30"}}, "metadata \"softcap\" = \"-30\", expected 0 ");
  refuse({{"softcap", "1e-60"}}, "metadata \"softcap\" = \"1e-60\", expected");
  Case c;
  c.sinks = {0, std::nanf(""), 0, 0};
  ExpectCaseRefused(c, "sinks[1] = nan, expected a finite number, or -inf");
  c.sinks = {};
  c.slopes = {0, 0, kNoSink, 0};
  ExpectCaseRefused(c, "alibi_slopes[2] = -inf, expected a finite number");
  c.slopes = {};
  const std::vector<float> three = {1, 1, 1};
  for (const std::string name : {"alibi_slopes", "sinks"}) {
    c.extra = {{name, TensorType::kF32, {3}, three.data()}};
    ExpectCaseRefused(c,
                      "tensor \"" + name + "\" is F32 [3], expected F32 [4]");
  }
}

TEST_F(AttendTest, FeaturesThatChangeNothingAreAccepted) {
  const std::vector<float> slopes(4, 0.0F);
  const std::vector<float> sinks(4, -std::numeric_limits<float>::infinity());
  Case c;
  c.metadata = {{"window", "0"}, {"softcap", "0.0"}, {"causal", "true"}};
  c.extra = {{"alibi_slopes", TensorType::kF32, {4}, slopes.data()},
             {"sinks", TensorType::kF32, {4}, sinks.data()}};
  ExpectAnswer(c, Attend(c, ""), true, 1 / std::sqrt(32.0), 2e-5);
}

TEST_F(AttendTest, WhatIsNotKnownIsRefusedByName) {
  const float x = 0;
  Case c;
  c.metadata = {{"windw", "128"}};
  ExpectCaseRefused(c, "metadata \"windw\" = \"128\" is not known here");
  c.metadata = {{"causal", "maybe"}};
  ExpectCaseRefused(c, "metadata \"causal\" = \"maybe\", expected true or");
  c.metadata = {{"scale", "big"}};
  ExpectCaseRefused(c, "metadata \"scale\" = \"big\", expected a number");
  c.metadata = {{"scale", "0"}};
  ExpectCaseRefused(c, "metadata \"scale\" = \"0\": a scale of zero");
  c.metadata = {};
  c.extra = {{"bias", TensorType::kF32, {1}, &x}};
  ExpectCaseRefused(c, "tensor \"bias\" is not known here");
}

TEST_F(AttendTest, WrongShapesAreRefusedWithTensorAndShape) {
  const auto refuse = [&](auto change, const std::string& message) {
    Case c;
    change(&c);
    ExpectCaseRefused(c, message);
  };
  refuse(
      [](Case* c) {
        c->cu_q = {0, 15};
      },
      "cu_seqlens_q is for 1 sequences, cu_seqlens_k for 5");
  refuse([](Case* c) { c->cu_q[2] = 0; },
         "cu_seqlens_q[2] = 0 is less than cu_seqlens_q[1] = 1");
  refuse([](Case* c) { c->cu_q[0] = 1; }, "cu_seqlens_q[0] = 1, expected 0");
  refuse([](Case* c) { c->heads = 3; },
         "tensor \"q\" has 3 heads, not a multiple of k's 2");
}

TEST_F(AttendTest, TensorsThatDisagreeAreRefused) {
  const std::vector<float> data(1000, 1.0F);
  const std::vector<int32_t> cu = {0, 2};
  const auto refuse = [&](const TensorShape& q, const TensorShape& k,
                          const TensorShape& v, TensorType cu_type,
                          const std::string& message) {
    const std::string path = Path("case.safetensors");
    ASSERT_TRUE(testing::IsOk(
        WriteSafetensors(path,
                         {{"q", TensorType::kF32, q, data.data()},
                          {"k", TensorType::kF32, k, data.data()},
                          {"v", TensorType::kF32, v, data.data()},
                          {"cu_seqlens_q", cu_type, {2}, cu.data()},
                          {"cu_seqlens_k", TensorType::kI32, {2}, cu.data()}},
                         {})));
    ExpectRefusal("attend " + path + " --out " + Path("out"), 1,
                  path + ": " + message);
  };
  constexpr auto kI32 = TensorType::kI32;
  refuse({2, 64}, {2, 1, 64}, {2, 1, 64}, kI32,
         "tensor \"q\" has shape [2, 64], expected [total_q, Hq, D]");
  refuse({2, 1, 64}, {2, 1, 32}, {2, 1, 64}, kI32,
         "tensor \"k\" has shape [2, 1, 32], but q's head size is 64");
  refuse({2, 1, 64}, {2, 1, 64}, {1, 1, 64}, kI32,
         "tensor \"v\" has shape [1, 1, 64], but k has [2, 1, 64]");
  refuse({3, 1, 64}, {2, 1, 64}, {2, 1, 64}, kI32,
         "cu_seqlens_q[1] = 2, but q has 3 tokens");
  refuse({2, 1, 64}, {2, 1, 64}, {2, 1, 64}, TensorType::kF32,
         "tensor \"cu_seqlens_q\" is F32, expected I32");
}

TEST_F(AttendTest, ATruncatedFileIsRefused) {
  const Case c;
  ASSERT_TRUE(testing::IsOk(c.Write(Path("case.safetensors"))));
  const std::string whole = ReadWholeFile(Path("case.safetensors"));
  const std::string cut =
      Write("cut.safetensors", whole.substr(0, whole.size() - 1));
  ExpectRefusal("attend " + cut + " --out " + Path("out"), 1,
                cut + ": truncated: the header promises ");
  const std::string header = Write("head.safetensors", whole.substr(0, 20));
  ExpectRefusal("attend " + header + " --out " + Path("out"), 1,
                header + ": truncated: the header is ");
}

TEST_F(AttendTest, ARandomBatchIsVerifiedAndReported) {
  const Outcome outcome =
      Varlane("attend --random 3x1@70,1x20@90,1x5@2 --verify 1 --json -");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["case"]["total_q"], 28);
  EXPECT_EQ(json["case"]["total_kv"], 302);
  EXPECT_EQ(json["verification"]["rows"], 28 * 16);
  EXPECT_EQ(json["verification"]["failed_rows"], 0);
  EXPECT_GT(json["verification"]["worst_error_over_bound"], 0.0);
  EXPECT_EQ(json["launch"]["kv_bytes"].get<int64_t>() % (4 * 256), 0);
}

TEST_F(AttendTest, HeadsGoTogetherOnRequestAndAreVerified) {
  const std::string batch =
      "attend --random 3x1@70,1x20@90,1x5@2000 --q-heads 8 --kv-heads 4 "
      "--verify 1 --json - --kv-heads-per-threadgroup ";
  int64_t threadgroups = 0;
  for (const int heads : {1, 2, 4}) {
    const Outcome outcome = Varlane(batch + std::to_string(heads));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["verification"]["failed_rows"], 0);
    const Json& launch = json["launch"];
    EXPECT_EQ(launch["kv_heads_per_threadgroup"], heads);
    if (heads == 1) threadgroups = launch["threadgroups"];
    EXPECT_EQ(launch["threadgroups"].get<int64_t>() * heads, threadgroups);
  }
}

TEST_F(AttendTest, HeadsAreShardedOnRequestAndVerified) {
  FindTwoNodes();
  const std::string batch =
      "attend --random 3x1@70,1x20@90,1x5@2000 --q-heads 8 --kv-heads 4 "
      "--verify 1 --json -";
  for (const int shards : {1, 2}) {
    const Outcome outcome =
        Varlane(batch + (shards == 1 ? "" : " --shard-heads"));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json launch = Json::parse(outcome.out)["launch"];
    EXPECT_EQ(launch["head_shards"], shards);
    EXPECT_EQ(launch["home_threadgroups"].get<int64_t>() +
                  launch["stolen_threadgroups"].get<int64_t>(),
              launch["threadgroups"].get<int64_t>() -
                  launch["surplus_threadgroups"].get<int64_t>());
    EXPECT_GE(launch["local_bytes"].get<int64_t>() +
                  launch["remote_bytes"].get<int64_t>(),
              launch["kv_bytes"].get<int64_t>());
  }
  EXPECT_NE(Varlane("attend --random 1x1@9 --shard-heads")
                .out.find("heads sharded over 2 nodes"),
            std::string::npos);
  ExpectRefusal("attend --random 1x1@9 --q-heads 3 --kv-heads 3 --shard-heads",
                1, "a multiple of the runtime's 2 NUMA nodes");
}

}  // namespace
}  // namespace varlane::tools
