// How long clients wait unless they are told otherwise: what a server's own time-outs have to fit into.
#pragma once

#include "absl/time/time.h"

namespace shardmlp {

inline constexpr absl::Duration kClientRetryBudget = absl::Seconds(60);    // of what is sent again
inline constexpr absl::Duration kClientStallTimeout = absl::Seconds(120);  // of a call in which nothing moves
inline constexpr absl::Duration kClientSealTimeout = absl::Minutes(10);    // of a seal, a commit or a discard

}  // namespace shardmlp
