// Which address of this machine others can be told.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

// INVALID_ARGUMENT unless `address` is "host:port" or "[ipv6]:port" with a port above 0.
absl::Status CheckHostAndPort(absl::string_view address);

// The number of the address from which this machine reaches `host_and_port`, as the system routes. UNAVAILABLE, naming
// it, where its name is not known or nothing leads there. Sends nothing, but may ask the name's servers.
absl::StatusOr<std::string> LocalAddressTowards(absl::string_view host_and_port);

}  // namespace shardmlp
