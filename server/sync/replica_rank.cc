#include "server/sync/replica_rank.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {

absl::StatusOr<int> RankFromPodName(absl::string_view name) {
  const size_t dash = name.rfind('-');
  const absl::string_view ordinal = dash == absl::string_view::npos ? "" : name.substr(dash + 1);
  int rank = 0;
  // Kubernetes writes ordinals without leading zeros.
  if (dash == 0 || ordinal.empty() || !std::all_of(ordinal.begin(), ordinal.end(), absl::ascii_isdigit) ||
      (ordinal.size() > 1 && ordinal.front() == '0') || !absl::SimpleAtoi(ordinal, &rank)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("pod name is \"", name, "\", expected one that ends in a rank, such as shardmlp-3"));
  }
  return rank;
}

}  // namespace shardmlp
