// What both ends set on their HTTP/2 connections: one set of numbers, so that neither end takes the other for a flood
// or for dead, and both hold a bounded part of what is under way. A client pings only while calls are open.
#pragma once

#include "absl/time/time.h"

namespace shardmlp {

inline constexpr absl::Duration kKeepaliveInterval = absl::Seconds(20);  // from one ping of a client to the next
inline constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(10);   // without an answer the connection is closed
inline constexpr absl::Duration kMinPingInterval = absl::Seconds(10);    // a server takes pings as often as this

static_assert(kMinPingInterval < kKeepaliveInterval);  // else a client would be taken for a flood

// Bytes of a stream that a receiver takes before they are read. Fixed: a window that gRPC fits to the link grows to
// tens of MiB a connection on a busy machine. It lets a stream have 4 MiB under way, so 400 MB/s where a round trip
// takes 10 ms.
inline constexpr int kStreamWindowBytes = 4 << 20;

}  // namespace shardmlp
