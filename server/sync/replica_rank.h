// A replica's rank from the name that a StatefulSet gives its pod.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

// 3 for "shardmlp-3". INVALID_ARGUMENT, naming it, for a name without an ordinal at its end.
absl::StatusOr<int> RankFromPodName(absl::string_view name);

}  // namespace shardmlp
