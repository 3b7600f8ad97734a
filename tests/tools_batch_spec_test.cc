// The one-word batch description of `varlane attend --random`, and numbers.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/batch_spec.h"

#include <string>

#include "tests/testing/testing.h"
#include "tools/model_presets.h"
#include "tools/parse.h"

namespace varlane::tools {
namespace {

TEST(BatchSpecTest, GroupsExpandInOrder) {
  const auto spec = ParseBatchSpec("2x1@512,1x512@600,1x3");
  VARLANE_ASSERT_OK(spec);
  EXPECT_EQ(spec->q_lens, (std::vector<int32_t>{1, 1, 512, 3}));
  EXPECT_EQ(spec->kv_lens, (std::vector<int32_t>{512, 512, 600, 3}));
}

TEST(BatchSpecTest, EmptyAndOverlongQueriesAreLegal) {
  const auto spec = ParseBatchSpec("1x0@5,1x5@0,1x9@2");
  VARLANE_ASSERT_OK(spec);
  EXPECT_EQ(spec->q_lens, (std::vector<int32_t>{0, 5, 9}));
  EXPECT_EQ(spec->kv_lens, (std::vector<int32_t>{5, 0, 2}));
}

TEST(BatchSpecTest, MalformedGroupsAreQuoted) {
  for (const std::string text :
       {"", "32", "32x", "x1@5", "0x1@5", "-1x1@5", "1x-1@5", "1x1@", "1x1@-5",
        "1x1@5@6", "1x1@5x", "1 x1@5", "1x1@99999999999", "3000000x1@1"}) {
    const auto spec = ParseBatchSpec(text);
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_EQ(spec.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(spec.status().message().find("\"" + text + "\""),
              std::string_view::npos)
        << spec.status().message();
  }
  const auto spec = ParseBatchSpec("1x1@5,,1x1@5");
  ASSERT_FALSE(spec.ok());
}

TEST(BatchSpecTest, TotalsPastTheIndexTypeAreRefused) {
  const auto spec = ParseBatchSpec("3x1@1000000000");
  ASSERT_FALSE(spec.ok());
  EXPECT_NE(spec.status().message().find("3000000000 context tokens"),
            std::string_view::npos)
      << spec.status().message();
}

TEST(ParseTest, BytesKnowBothKindsOfUnits) {
  const std::pair<const char*, int64_t> cases[] = {{"0", 0},
                                                   {"512", 512},
                                                   {"512B", 512},
                                                   {"1.2GB", 1'200'000'000},
                                                   {"1.2GiB", 1288490189},
                                                   {"2k", 2000},
                                                   {"2KiB", 2048},
                                                   {"3 MiB", 3 << 20},
                                                   {"1T", 1'000'000'000'000}};
  for (const auto& [text, bytes] : cases) {
    const auto parsed = ParseBytes(text);
    VARLANE_ASSERT_OK(parsed);
    EXPECT_EQ(*parsed, bytes) << text;
  }
  for (const char* text : {"", "GB", "-1GB", "1.2.3GB", "1XB", "1GiBs",
                           "99999999999P", "1e3", "0.8", "1.5B"}) {
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
  }
}

TEST(ParseTest, FactorsMayBeFractions) {
  EXPECT_EQ(*ParseFactor("0.25"), 0.25);
  EXPECT_EQ(*ParseFactor("1/16"), 0.0625);
  for (const char* text : {"", "0", "-1", "1/0", "1/", "a", "nan", "inf"}) {
    EXPECT_FALSE(ParseFactor(text).ok()) << text;
  }
}

TEST(ModelPresetsTest, NamesAreFoundInAnyCaseAndListedWhenWrong) {
  const auto model = FindModel("qwen3-0.6b");
  VARLANE_ASSERT_OK(model);
  EXPECT_EQ(DescribeModel(*model),
            "Qwen3-0.6B: 28 layers, 16 query heads, 8 KV heads, head size 128");
  const auto wrong = FindModel("GPT-5");
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.status().message().find("Llama-3.1-8B"),
            std::string_view::npos);
}

}  // namespace
}  // namespace varlane::tools
