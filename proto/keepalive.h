// How clients ping and what servers allow: one pair of numbers, so that neither end takes the other for a flood or for
// dead. A client pings only while calls are open.
#pragma once

#include "absl/time/time.h"

namespace shardmlp {

inline constexpr absl::Duration kKeepaliveInterval = absl::Seconds(20);  // from one ping of a client to the next
inline constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(10);   // without an answer the connection is closed
inline constexpr absl::Duration kMinPingInterval = absl::Seconds(10);    // a server takes pings as often as this

}  // namespace shardmlp
