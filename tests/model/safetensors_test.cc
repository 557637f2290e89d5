// The safetensors format: what is read, what is refused and by which name, and what is written.
#include "server/model/safetensors.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/model/checksum.h"
#include "server/model/safetensors_writer.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

absl::StatusOr<SafetensorsFile> OpenAt(const std::string& path) {
  SHARDMLP_ASSIGN_OR_RETURN(File file, File::OpenForReading(path, Reason::kModelCorrupt));
  return SafetensorsFile::Open(std::move(file), Reason::kModelCorrupt);
}

// Opens a file of these bytes, "torn.safetensors".
absl::StatusOr<SafetensorsFile> OpenBytes(absl::string_view bytes) {
  const TempFolder folder;
  WriteFile(folder / "torn.safetensors", bytes);
  return OpenAt(folder / "torn.safetensors");
}

testing::AssertionResult IsTorn(absl::string_view bytes, std::initializer_list<absl::string_view> named) {
  std::vector<absl::string_view> all(named);
  const auto result = OpenBytes(bytes);
  const auto names_file = Fails(result, absl::StatusCode::kDataLoss, Reason::kModelCorrupt, {"torn.safetensors"});
  return names_file ? Fails(result, absl::StatusCode::kDataLoss, Reason::kModelCorrupt, named) : names_file;
}

constexpr char kTwoTensors[] = R"({"__metadata__": {"format": "pt"},
  "second": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
  "first": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}})";

TEST(SafetensorsTest, ReadsTensorsByNameAndPart) {
  const auto file = OpenBytes(SafetensorsBytes(kTwoTensors, 30));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors().size(), 2);
  const SafetensorsEntry& first = file->tensors().at("first");
  EXPECT_EQ(first.dtype, DType::kF32);
  EXPECT_EQ(first.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(first.byte_count, 24);
  const SafetensorsEntry& second = file->tensors().at("second");
  EXPECT_EQ(second.dtype, DType::kBF16);
  EXPECT_EQ(second.begin, 8 + static_cast<int64_t>(strlen(kTwoTensors)) + 24);
  std::string bytes(4, '\0');
  ASSERT_TRUE(file->Read(second, 2, absl::MakeSpan(bytes)).ok());
  EXPECT_EQ(bytes, "\x1a\x1b\x1c\x1d");  // data counts up
}

TEST(SafetensorsTest, ReadsWhatHoldsNothing) {
  EXPECT_TRUE(OpenBytes(SafetensorsBytes("{}", 0)).ok());
  EXPECT_TRUE(OpenBytes(SafetensorsBytes("{}      ", 0)).ok());
  const auto empty = OpenBytes(SafetensorsBytes(R"({"a": {"dtype": "F32", "shape": [0, 4], "data_offsets": [4, 4]},
      "b": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}})",
                                                4));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ(empty->tensors().at("b").byte_count, 4);  // a scalar
}

TEST(SafetensorsTest, ListsElementTypesThatAreNoWeights) {
  for (const char* dtype : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"}) {
    const auto file = OpenBytes(SafetensorsBytes(
        absl::StrCat(R"({"q": {"dtype": ")", dtype, R"(", "shape": [4], "data_offsets": [0, 4]}})"), 4));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->tensors().at("q").dtype_name, dtype);
    EXPECT_FALSE(file->tensors().at("q").dtype.has_value());
  }
  EXPECT_TRUE(OpenBytes(SafetensorsBytes(R"({"q": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}})", 4)).ok());
}

TEST(SafetensorsTest, RefusesAFileCutAnywhere) {
  const std::string whole = SafetensorsBytes(kTwoTensors, 30);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_TRUE(IsTorn(whole.substr(0, size), {})) << "cut to " << size;
  }
  EXPECT_TRUE(IsTorn(whole.substr(0, whole.size() - 1), {"\"second\"", "6 bytes from data offset 24"}));
  EXPECT_TRUE(IsTorn(whole + "x", {"data offset 30", "31"}));
}

TEST(SafetensorsTest, RefusesAHeaderThatIsTooLarge) {
  std::string bytes = SafetensorsBytes("{}", 0);
  for (const uint64_t size : {uint64_t{3}, uint64_t{100'000'001}, uint64_t{1} << 63, ~uint64_t{0}}) {
    memcpy(bytes.data(), &size, sizeof(size));
    EXPECT_TRUE(IsTorn(bytes, {absl::StrCat("a header of ", size, " bytes at byte 0")}));
  }
}

TEST(SafetensorsTest, RefusesAHeaderThatIsNoObject) {
  for (const char* header : {"", "[]", "1", "null", "{", "{\"a\": }", "{} {}", "{\"a\": \"\xff\"}", "{\"a\": 1e999}"}) {
    EXPECT_TRUE(IsTorn(SafetensorsBytes(header, 0), {})) << header;
  }
  EXPECT_TRUE(IsTorn(SafetensorsBytes(std::string(1 << 20, '['), 0), {"nested more than 32 levels"}));
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  EXPECT_TRUE(IsTorn(SafetensorsBytes(deep, 0), {"nested more than 32 levels"}));
}

TEST(SafetensorsTest, RefusesAnEntryThatIsNone) {
  const std::pair<const char*, const char*> entries[] = {
      {R"(7)", "an object was expected"},
      {R"({"shape": [1], "data_offsets": [0, 4]})", "no dtype"},
      {R"({"dtype": 4, "shape": [1], "data_offsets": [0, 4]})", "no dtype"},
      {R"({"dtype": "F33", "shape": [1], "data_offsets": [0, 4]})", "unknown dtype \"F33\""},
      {R"({"dtype": "F32", "data_offsets": [0, 4]})", "no shape"},
      {R"({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]})", "impossible shape [-1]"},
      {R"({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]})", "impossible shape"},
      {R"({"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]})", "impossible shape"},
      {R"({"dtype": "F32", "shape": [18446744073709551615], "data_offsets": [0, 4]})", "impossible shape"},
      {R"({"dtype": "F32", "shape": [1]})", "no pair of data_offsets"},
      {R"({"dtype": "F32", "shape": [1], "data_offsets": [0]})", "no pair of data_offsets"},
      {R"({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]})", "impossible data_offsets [4,0]"},
      {R"({"dtype": "F32", "shape": [1], "data_offsets": [0, 3]})",
       "has 3 bytes at data offset 0, but F32 [1] takes 4"},
      {R"({"dtype": "F4", "shape": [7], "data_offsets": [0, 3]})", "F4 [7]"},
  };
  for (const auto& [entry, named] : entries) {
    const std::string header = absl::StrCat(R"({"model.odd": )", entry, "}");
    EXPECT_TRUE(IsTorn(SafetensorsBytes(header, 4), {"tensor \"model.odd\"", named})) << header;
  }
}

TEST(SafetensorsTest, RefusesOverlapsGapsAndDuplicates) {
  const auto header = [](absl::string_view a, absl::string_view b) {
    return absl::StrCat(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": )", a,
                        R"(}, "b": {"dtype": "F32", "shape": [2], "data_offsets": )", b, "}}");
  };
  ASSERT_TRUE(OpenBytes(SafetensorsBytes(header("[0, 8]", "[8, 16]"), 16)).ok());
  EXPECT_TRUE(IsTorn(SafetensorsBytes(header("[0, 8]", "[4, 12]"), 12), {"\"b\" begins at data offset 4", "8 was"}));
  EXPECT_TRUE(IsTorn(SafetensorsBytes(header("[0, 8]", "[0, 8]"), 8), {"begins at data offset 0", "8 was"}));
  EXPECT_TRUE(IsTorn(SafetensorsBytes(header("[0, 8]", "[12, 20]"), 20), {"\"b\" begins at data offset 12", "8 was"}));
  EXPECT_TRUE(IsTorn(SafetensorsBytes(header("[4, 12]", "[12, 20]"), 20), {"\"a\" begins at data offset 4", "0 was"}));
  EXPECT_TRUE(IsTorn(SafetensorsBytes(header("[0, 8]", "[9223372036854775799, 9223372036854775807]"), 16), {"\"b\""}));
  EXPECT_TRUE(IsTorn(SafetensorsBytes(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                                          "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})",
                                      4),
                     {"key \"a\" twice"}));
}

CheckpointTensor Tensor(std::string name, DType dtype, std::vector<int64_t> shape, char fill) {
  return {std::move(name), dtype, std::move(shape), [fill](absl::Span<char> out) {
            std::fill(out.begin(), out.end(), fill);
            return absl::OkStatus();
          }};
}

TEST(SafetensorsWriterTest, WritesWhatIsReadAndSaysItsSum) {
  const TempFolder folder;
  const std::vector<CheckpointTensor> tensors = {Tensor("half", DType::kBF16, {3}, 'h'),
                                                 Tensor("double", DType::kF64, {2, 1}, 'd'),
                                                 Tensor("none", DType::kF32, {0}, 'n')};
  const auto sum = WriteSafetensors(folder / "a", tensors);
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_EQ(sum->size, std::filesystem::file_size(folder / "a"));
  const auto file = OpenAt(folder / "a");
  ASSERT_TRUE(file.ok()) << file.status();
  for (const CheckpointTensor& tensor : tensors) {
    const SafetensorsEntry& entry = file->tensors().at(tensor.name);
    EXPECT_EQ(entry.dtype, tensor.dtype);
    EXPECT_EQ(entry.shape, tensor.shape);
    EXPECT_EQ(entry.begin % SizeOf(tensor.dtype), 0) << tensor.name;
    std::string bytes(entry.byte_count, '\0');
    ASSERT_TRUE(file->Read(entry, 0, absl::MakeSpan(bytes)).ok());
    EXPECT_EQ(bytes, std::string(entry.byte_count, tensor.name[0]));
  }
  ASSERT_TRUE(WriteSafetensors(folder / "b", tensors).ok());
  EXPECT_EQ(ReadFile(folder / "a"), ReadFile(folder / "b"));
  const auto read_again = File::OpenForReading(folder / "a", Reason::kModelCorrupt);
  EXPECT_EQ(*SumOf(*read_again), *sum);
}

TEST(SafetensorsWriterTest, RefusesATensorTwiceAndFailsAsTheReadDoes) {
  const TempFolder folder;
  const CheckpointTensor tensor = Tensor("a", DType::kF32, {1}, 'a');
  EXPECT_TRUE(Fails(WriteSafetensors(folder / "a", {tensor, tensor}), absl::StatusCode::kInvalidArgument,
                    Reason::kInvalidArgument, {"\"a\" stands twice"}));
  const CheckpointTensor broken{"b", DType::kF32, {1}, [](absl::Span<char>) { return absl::AbortedError("device"); }};
  EXPECT_EQ(WriteSafetensors(folder / "b", {broken}).status(), absl::AbortedError("device"));
}

// The checksum of the XXH3 specification's own test vectors: no input, and one byte of zero.
TEST(ChecksumTest, IsXxh3) {
  EXPECT_EQ(ToHex(Checksum().sum().xxh3_64), "2d06800538d394c2");
  Checksum one;
  one.Add(absl::string_view("\0", 1));
  EXPECT_EQ(ToHex(one.sum().xxh3_64), "c44bdff4074eecdb");
}

}  // namespace
}  // namespace shardmlp
