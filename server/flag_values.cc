#include "server/flag_values.h"

#include <array>
#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace shardmlp {
namespace {

absl::Status Unexpected(absl::string_view text, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("got \"", text, "\", expected ", expected));
}

}  // namespace

absl::StatusOr<int64_t> ParseCount(absl::string_view text, int64_t min) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < min || value > std::numeric_limits<int>::max()) {
    return Unexpected(text, absl::StrCat("a number of at least ", min));
  }
  return value;
}

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  constexpr std::array<std::pair<absl::string_view, int64_t>, 4> kUnits = {
      {{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"B", 1}}};
  absl::string_view number = text;
  int64_t unit = 1;
  for (const auto& [suffix, bytes] : kUnits) {
    if (absl::ConsumeSuffix(&number, suffix)) {
      unit = bytes;
      break;
    }
  }
  int64_t value = 0;
  if (!absl::SimpleAtoi(number, &value) || value < 0 || value > std::numeric_limits<int64_t>::max() / unit) {
    return Unexpected(text, "bytes, such as 1048576, 512KiB, 256MiB or 4GiB");
  }
  return value * unit;
}

absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text) {
  absl::Duration value;
  if (!absl::ParseDuration(text, &value) || value <= absl::ZeroDuration() || value == absl::InfiniteDuration()) {
    return Unexpected(text, "a time above zero, such as 500ms, 30s or 5m");
  }
  return value;
}

absl::StatusOr<DType> ParseComputeDType(absl::string_view text) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    if (text == Name(dtype)) return dtype;
  }
  return Unexpected(text, "f32, bf16 or f64");
}

absl::StatusOr<std::pair<int, int>> ParseLayers(absl::string_view text) {
  const std::vector<absl::string_view> ends = absl::StrSplit(text, '-');
  int first = 0;
  int last = 0;
  if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last) ||
      first < 0 || last < first) {
    return Unexpected(text, "the first and the last layer, such as 0-15");
  }
  return std::make_pair(first, last);
}

absl::StatusOr<bool> ParseSwitch(absl::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return Unexpected(text, "true or false");
}

}  // namespace shardmlp
