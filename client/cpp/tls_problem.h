// Why a connection fails, where TLS is why. gRPC says little: "certificate verify failed" of any certificate that it
// does not take, and "Socket closed" where the server does not take ours.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "client/cpp/options.h"

namespace shardmlp {

// Connects to `target`, shakes hands as `credentials` say, hears whether the server is content, sends nothing, and
// hangs up: a sentence about what is wrong, with a file's or certificate's name, or "" where nothing is that has to do
// with TLS. Takes each of three waits for no longer than `timeout`.
std::string TlsProblem(const std::string& target, const ClientCredentials& credentials, absl::Duration timeout);

}  // namespace shardmlp
