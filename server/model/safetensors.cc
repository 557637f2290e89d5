#include "server/model/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/model/json.h"

namespace shardmlp {
namespace {

using nlohmann::json;

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation
constexpr int64_t kPrefixBytes = 8;
static_assert(std::endian::native == std::endian::little, "tensors are read and written without swapping bytes");

struct ElementType {
  absl::string_view name;
  int64_t bits;
  std::optional<DType> dtype;
};

constexpr std::array<ElementType, 22> kElementTypes = {{
    {"F64", 64, DType::kF64},     {"F32", 32, DType::kF32},         {"F16", 16, DType::kF16},
    {"BF16", 16, DType::kBF16},   {"BOOL", 8, std::nullopt},        {"U8", 8, std::nullopt},
    {"I8", 8, std::nullopt},      {"U16", 16, std::nullopt},        {"I16", 16, std::nullopt},
    {"U32", 32, std::nullopt},    {"I32", 32, std::nullopt},        {"U64", 64, std::nullopt},
    {"I64", 64, std::nullopt},    {"C64", 64, std::nullopt},        {"F8_E5M2", 8, std::nullopt},
    {"F8_E4M3", 8, std::nullopt}, {"F8_E5M2FNUZ", 8, std::nullopt}, {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt}, {"F6_E2M3", 6, std::nullopt},     {"F6_E3M2", 6, std::nullopt},
    {"F4", 4, std::nullopt},
}};

// Says what is wrong with `value`, the header's entry for one tensor; empty where nothing is. `entry.begin` counts from
// the first tensor's bytes.
std::string ParseEntry(const json& value, SafetensorsEntry& entry) {
  if (!value.is_object()) return absl::StrCat("is ", Describe(value), "; an object was expected");
  const json* dtype = FindValue(value, "dtype");
  const json* shape = FindValue(value, "shape");
  const json* offsets = FindValue(value, "data_offsets");
  if (dtype == nullptr || !dtype->is_string()) return "has no dtype";
  if (shape == nullptr || !shape->is_array()) return "has no shape";
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2) return "has no pair of data_offsets";

  entry.dtype_name = dtype->get_ref<const std::string&>();
  const auto type = std::find_if(kElementTypes.begin(), kElementTypes.end(),
                                 [&entry](const ElementType& t) { return t.name == entry.dtype_name; });
  if (type == kElementTypes.end()) return absl::StrCat("has the unknown dtype ", Describe(*dtype));
  entry.dtype = type->dtype;

  int64_t bits = type->bits;
  for (const json& size : *shape) {
    const std::optional<int64_t> count = AsCount(size);
    if (!count || __builtin_mul_overflow(bits, *count, &bits)) {
      return absl::StrCat("has the impossible shape ", Describe(*shape));
    }
    entry.shape.push_back(*count);
  }
  const std::optional<int64_t> begin = AsCount((*offsets)[0]);
  const std::optional<int64_t> end = AsCount((*offsets)[1]);
  if (!begin || !end || *end < *begin) return absl::StrCat("has the impossible data_offsets ", Describe(*offsets));
  entry.begin = *begin;
  entry.byte_count = *end - *begin;
  if (bits % 8 != 0 || bits / 8 != entry.byte_count) {
    return absl::StrCat("has ", entry.byte_count, " bytes at data offset ", entry.begin, ", but ", entry.dtype_name,
                        " ", ShapeName(entry.shape), " takes ", bits / 8);
  }
  return "";
}

// Says which tensor does not follow on the one before it, or ends elsewhere than the file; empty where none does.
std::string CheckContiguous(const SafetensorsEntries& entries, int64_t data_size) {
  std::vector<const SafetensorsEntries::value_type*> order;
  order.reserve(entries.size());
  for (const auto& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.byte_count) < std::pair(b->second.begin, b->second.byte_count);
  });
  int64_t end = 0;
  for (const auto* named : order) {
    const auto& [name, entry] = *named;
    if (entry.begin != end) {
      return absl::StrCat("tensor ", Describe(name), " begins at data offset ", entry.begin, "; ", end,
                          " was expected, where the one before it ends");
    }
    if (entry.byte_count > data_size - entry.begin) {
      return absl::StrCat("tensor ", Describe(name), " takes ", entry.byte_count, " bytes from data offset ",
                          entry.begin, " on, but the file ends at data offset ", data_size);
    }
    end += entry.byte_count;
  }
  if (end == data_size) return "";
  return absl::StrCat("the last tensor ends at data offset ", end, ", but the file at ", data_size);
}

}  // namespace

absl::string_view SafetensorsName(DType dtype) {
  return std::find_if(kElementTypes.begin(), kElementTypes.end(),
                      [dtype](const ElementType& type) { return type.dtype == dtype; })
      ->name;
}

std::string ShapeName(absl::Span<const int64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::StatusOr<SafetensorsEntries> ParseSafetensorsHeader(absl::string_view header, int64_t data_begin,
                                                          int64_t file_size, absl::string_view path, Reason corrupt) {
  SHARDMLP_ASSIGN_OR_RETURN(const json document, ParseJsonObject(header, path, corrupt));
  SafetensorsEntries entries;
  for (const auto& [name, value] : document.items()) {
    if (name == "__metadata__") continue;
    if (const std::string wrong = ParseEntry(value, entries[name]); !wrong.empty()) {
      return Error(absl::StatusCode::kDataLoss, corrupt, absl::StrCat(path, ": tensor ", Describe(name), " ", wrong));
    }
  }
  if (const std::string wrong = CheckContiguous(entries, file_size - data_begin); !wrong.empty()) {
    return Error(absl::StatusCode::kDataLoss, corrupt, absl::StrCat(path, ": ", wrong));
  }
  for (auto& [name, entry] : entries) entry.begin += data_begin;
  return entries;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(File file, Reason corrupt) {
  uint64_t header_size = 0;
  SHARDMLP_RETURN_IF_ERROR(file.ReadAt(0, {reinterpret_cast<char*>(&header_size), sizeof(header_size)}));
  const int64_t room = std::min(kMaxHeaderBytes, file.size() - kPrefixBytes);
  if (header_size > static_cast<uint64_t>(room)) {
    return Error(absl::StatusCode::kDataLoss, corrupt,
                 absl::StrCat(file.path(), ": a header of ", header_size, " bytes at byte 0; at most ", room,
                              " were expected in a file of ", file.size()));
  }
  std::string header(header_size, '\0');
  SHARDMLP_RETURN_IF_ERROR(file.ReadAt(kPrefixBytes, absl::MakeSpan(header)));
  const int64_t data_begin = kPrefixBytes + static_cast<int64_t>(header_size);
  SHARDMLP_ASSIGN_OR_RETURN(SafetensorsEntries tensors,
                            ParseSafetensorsHeader(header, data_begin, file.size(), file.path(), corrupt));
  return SafetensorsFile(std::move(file), std::move(tensors));
}

absl::Status SafetensorsFile::Read(const SafetensorsEntry& entry, int64_t offset, absl::Span<char> out) const {
  return file_.ReadAt(entry.begin + offset, out);
}

}  // namespace shardmlp
