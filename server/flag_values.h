// The values that flags take, as text.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/matrix.h"

namespace shardmlp {

// Each gives INVALID_ARGUMENT, saying what was got and what was expected.

absl::StatusOr<int64_t> ParseCount(absl::string_view text, int64_t min);
// "1048576", "512KiB", "256MiB", "4GiB".
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);
// "500ms", "30s", "5m", above zero.
absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text);
// "f32", "bf16", "f64".
absl::StatusOr<DType> ParseComputeDType(absl::string_view text);
// "0-15", or "3" alone: first and last, inclusive.
absl::StatusOr<std::pair<int, int>> ParseLayers(absl::string_view text);
// "true" or "false".
absl::StatusOr<bool> ParseSwitch(absl::string_view text);

}  // namespace shardmlp
