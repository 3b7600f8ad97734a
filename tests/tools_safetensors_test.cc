// Safetensors: what is written reads back; every kind of damage has a message.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/safetensors.h"

#include <cstring>
#include <fstream>
#include <string>

#include "tests/testing/files.h"
#include "tests/testing/testing.h"

namespace varlane::tools {
namespace {

class SafetensorsTest : public ::testing::Test {
 protected:
  // A file of this header and so many data bytes.
  void WriteRaw(const std::string& header, size_t data_bytes) {
    std::ofstream file(path_, std::ios::binary);
    for (uint64_t i = 0, length = header.size(); i < 8; ++i) {
      file.put(static_cast<char>(length >> (8 * i) & 0xff));
    }
    file << header << std::string(data_bytes, '\1');
  }
  std::string Error() const {
    const auto file = SafetensorsFile::Open(path_);
    if (file.ok()) return "no error";
    EXPECT_EQ(file.status().code(), StatusCode::kInvalidArgument);
    const std::string text(file.status().message());
    EXPECT_EQ(text.substr(0, path_.size() + 2), path_ + ": ");
    return text.substr(path_.size() + 2);
  }

  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("tensors.safetensors");
};

TEST_F(SafetensorsTest, EveryTypeReadsBackAsWritten) {
  const std::vector<float> f32 = {1.5F, -2.0F, 3.25F, 0, 1, 2};
  const std::vector<uint16_t> halves = {1, 2, 3};
  const std::vector<int32_t> i32 = {0, -7};
  const std::vector<int64_t> i64 = {int64_t{1} << 40};
  const std::map<std::string, std::string> metadata = {{"scale", "0.5"},
                                                       {"a\"b", "\n"}};
  VARLANE_ASSERT_OK(
      WriteSafetensors(path_,
                       {{"a", TensorType::kF32, {2, 3}, f32.data()},
                        {"b", TensorType::kBF16, {3}, halves.data()},
                        {"c", TensorType::kF16, {1, 3, 1}, halves.data()},
                        {"d", TensorType::kI32, {2}, i32.data()},
                        {"e", TensorType::kI64, {}, i64.data()},
                        {"empty", TensorType::kF32, {0, 4}, nullptr}},
                       metadata));
  auto file = SafetensorsFile::Open(path_);
  VARLANE_ASSERT_OK(file);
  EXPECT_EQ(file->metadata(), metadata);
  EXPECT_EQ(file->tensors().size(), 6u);
  EXPECT_EQ(file->Find("x"), nullptr);
  const auto expect = [&](const char* name, TensorType type,
                          const TensorShape& shape, const void* data) {
    const TensorInfo* const info = file->Find(name);
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->type, type) << name;
    EXPECT_EQ(info->shape, shape) << name;
    const auto bytes = file->Read(name);
    VARLANE_ASSERT_OK(bytes);
    ASSERT_EQ(static_cast<int64_t>(bytes->size()), info->end - info->begin);
    if (!bytes->empty()) {
      EXPECT_EQ(std::memcmp(bytes->data(), data, bytes->size()), 0) << name;
    }
  };
  expect("a", TensorType::kF32, {2, 3}, f32.data());
  expect("b", TensorType::kBF16, {3}, halves.data());
  expect("c", TensorType::kF16, {1, 3, 1}, halves.data());
  expect("d", TensorType::kI32, {2}, i32.data());
  expect("e", TensorType::kI64, {}, i64.data());
  expect("empty", TensorType::kF32, {0, 4}, nullptr);
}

// The bytes that Python's safetensors.numpy.save makes of
// {"x": np.array([1.0, 2.0], np.float32)} with metadata {"k": "v"}.
TEST_F(SafetensorsTest, ReadsWhatThePythonPackageWrites) {
  const std::string header =
      "{\"__metadata__\":{\"k\":\"v\"},\"x\":{\"dtype\":\"F32\",\"shape\":[2],"
      "\"data_offsets\":[0,8]}}  ";
  WriteRaw(header, 0);
  {
    std::ofstream file(path_, std::ios::binary | std::ios::app);
    const float values[] = {1.0F, 2.0F};
    file.write(reinterpret_cast<const char*>(values), sizeof(values));
  }
  auto file = SafetensorsFile::Open(path_);
  VARLANE_ASSERT_OK(file);
  EXPECT_EQ(file->metadata().at("k"), "v");
  const auto bytes = file->Read("x");
  VARLANE_ASSERT_OK(bytes);
  float second = 0;
  std::memcpy(&second, bytes->data() + 4, 4);
  EXPECT_EQ(second, 2.0F);
}

TEST_F(SafetensorsTest, EveryTruncationIsRefused) {
  const std::vector<float> data = {1, 2, 3, 4};
  VARLANE_ASSERT_OK(WriteSafetensors(
      path_, {{"a", TensorType::kF32, {4}, data.data()}}, {{"k", "v"}}));
  const std::string whole = testing::ReadWholeFile(path_);
  for (size_t size = 0; size < whole.size(); ++size) {
    testing::WriteWholeFile(path_, whole.substr(0, size));
    EXPECT_EQ(Error().substr(0, 10), "truncated:") << size << ": " << Error();
  }
}

struct Damage {
  const char* name;
  const char* header;
  size_t data_bytes;
  const char* error;
};
void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class DamagedTest : public SafetensorsTest,
                    public ::testing::WithParamInterface<Damage> {};

TEST_P(DamagedTest, IsRefusedWithItsMessage) {
  WriteRaw(GetParam().header, GetParam().data_bytes);
  const std::string error = Error();
  EXPECT_NE(error.find(GetParam().error), std::string::npos) << error;
}

#define TENSOR(name, dtype, shape, offsets)                \
  "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape \
  ",\"data_offsets\":" offsets "}"
constexpr Damage kDamages[] = {
    {"NotJson", "{\"a\":", 0, "the header is not a JSON object"},
    {"Array", "[]", 0, "the header is not a JSON object"},
    {"Empty", "", 0, "the header is not a JSON object"},
    {"EntryIsText", "{\"a\":\"b\"}", 0,
     "tensor \"a\": its header entry is not an object"},
    {"UnknownType", "{" TENSOR("a", "F64", "[1]", "[0,8]") "}", 8,
     "tensor \"a\": dtype \"F64\" is not F32, F16, BF16, I32 or I64"},
    {"NoType", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "tensor \"a\": dtype null is not"},
    {"NoShape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4,
     "tensor \"a\": shape is not an array of integers from 0"},
    {"NegativeExtent", "{" TENSOR("a", "F32", "[-1]", "[0,4]") "}", 4,
     "tensor \"a\": shape is not an array of integers from 0"},
    {"HalfExtent", "{" TENSOR("a", "F32", "[1.5]", "[0,4]") "}", 4,
     "tensor \"a\": shape is not an array of integers from 0"},
    {"OneOffset", "{" TENSOR("a", "F32", "[1]", "[4]") "}", 4,
     "tensor \"a\": data_offsets is not [begin, end]"},
    {"Reversed", "{" TENSOR("a", "F32", "[1]", "[4,0]") "}", 4,
     "tensor \"a\": data_offsets [4, 0) are not inside the file's 4 data "
     "bytes"},
    {"PastTheEnd", "{" TENSOR("a", "F32", "[2]", "[0,8]") "}", 7,
     "truncated: the header promises 8 data bytes, but the file has 7"},
    {"WrongProduct", "{" TENSOR("a", "F32", "[3]", "[0,8]") "}", 8,
     "tensor \"a\": shape [3] of F32 does not make 8 bytes"},
    {"Overflow", "{" TENSOR("a", "F32", "[4611686018427387904,4]", "[0,0]") "}",
     0, "does not make 0 bytes"},
    {"Overlap",
     "{" TENSOR("a", "F32", "[2]", "[0,8]") "," TENSOR("b", "F32", "[2]",
                                                       "[4,12]") "}",
     12, "tensors \"a\" and \"b\" overlap at byte 4"},
    {"Gap",
     "{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "F32", "[1]",
                                                       "[8,12]") "}",
     12, "data bytes [4, 8) belong to no tensor"},
    {"Trailing", "{" TENSOR("a", "F32", "[1]", "[0,4]") "}", 9,
     "data bytes [4, 9) belong to no tensor"},
    {"Twice",
     "{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("a", "F32", "[1]",
                                                       "[0,4]") "}",
     4, "the header names \"a\" twice"},
    {"UnknownField",
     "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],"
     "\"strides\":[1]}}",
     4, "tensor \"a\": unknown header field \"strides\""},
    {"MetadataNumber", "{\"__metadata__\":{\"scale\":1}}", 0,
     "metadata \"scale\" = 1 is not a string"},
    {"MetadataText", "{\"__metadata__\":\"x\"}", 0,
     "__metadata__ is not an object"},
};
#undef TENSOR
INSTANTIATE_TEST_SUITE_P(Files, DamagedTest, ::testing::ValuesIn(kDamages),
                         [](const auto& test) {
                           return std::string(test.param.name);
                         });

TEST_F(SafetensorsTest, AnAbsurdHeaderLengthIsRefused) {
  testing::WriteWholeFile(path_, std::string(64, '\xff'));
  EXPECT_EQ(Error(),
            "header length 18446744073709551615 is above the limit of "
            "100000000");
}

TEST_F(SafetensorsTest, FilesThatCannotBeOpenedAreNamedWithTheirReason) {
  const auto missing = SafetensorsFile::Open("/no/such.safetensors");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().message(),
            "/no/such.safetensors cannot be read: No such file or directory");
  const Status status = WriteSafetensors("/no/such/dir.safetensors", {}, {});
  EXPECT_EQ(status.message(),
            "/no/such/dir.safetensors cannot be written: No such file or "
            "directory");
}

TEST_F(SafetensorsTest, ANameCannotBeWrittenTwice) {
  const float x = 1;
  EXPECT_FALSE(WriteSafetensors(path_,
                                {{"a", TensorType::kF32, {1}, &x},
                                 {"a", TensorType::kF32, {1}, &x}},
                                {})
                   .ok());
}

}  // namespace
}  // namespace varlane::tools
