// The token that a client's calls carry.
#pragma once

#include <grpcpp/client_context.h>

#include <string>

#include "absl/status/status.h"

namespace shardmlp {

// Adds the first line of `file`, as it is now, but for those that are blank or begin with '#', to a call that has not
// started; nothing where `file` is empty.
// UNAUTHENTICATED (UNAUTHENTICATED), naming the file, where it can't be read or has no token.
absl::Status AddToken(const std::string& file, grpc::ClientContext& context);

}  // namespace shardmlp
