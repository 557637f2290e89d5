// A whole rpc on raw bytes, for services whose messages have no generated types here, and for bytes that are none.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace shardmlp {

struct RawAnswer {
  absl::Status status;
  std::vector<std::string> messages;
};

// Sends `messages`, closes, and reads all.
RawAnswer RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::vector<std::string>& messages);

}  // namespace shardmlp
