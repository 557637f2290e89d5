// JSON from files that may be torn or hostile: bounded, without exceptions, and with errors that name the file.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/status.h"

namespace shardmlp {

// Parses `text`, which must be an object. DATA_LOSS (`corrupt`), naming `path`, for anything else, for a key that
// stands twice in one object, and for more than 32 levels of nesting or 4 million values.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, absl::string_view path, Reason corrupt);

// The value of `key`; null where the object has none, and where the value is JSON's null.
const nlohmann::json* FindValue(const nlohmann::json& object, absl::string_view key);

// The integer of a JSON number without fraction or exponent from 0 to 2^63 - 1.
std::optional<int64_t> AsCount(const nlohmann::json& value);

// One line for an error message, cut where it is long: `"gelu"`, `[1,2]`.
std::string Describe(const nlohmann::json& value);

}  // namespace shardmlp
