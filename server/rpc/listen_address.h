// Where a server may listen.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

// "unix:/path" and "unix-abstract:name".
bool IsUnixSocket(absl::string_view address);
// "host:port" of this machine alone.
bool IsLoopback(absl::string_view address);

// Takes "host:port", "[ipv6]:port", "unix:/path" and "unix-abstract:name". INVALID_ARGUMENT for anything else, and,
// unless `anywhere`, for a host that other machines can reach.
absl::Status CheckListenAddress(absl::string_view address, bool anywhere);

// UNAVAILABLE where `address` is a Unix socket on which somebody listens. gRPC would replace its file, as it does that
// of a dead server, and take over from the other without a word.
absl::Status CheckNotTaken(absl::string_view address);

// `address` with the port that was bound in place of 0.
std::string WithBoundPort(absl::string_view address, int port);

}  // namespace shardmlp
