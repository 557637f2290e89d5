// A whole rpc on raw bytes, for services whose messages have no generated types here, and for bytes that are none.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/completion_queue.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace shardmlp {

// Waits for the next event of a queue that serves one call at a time; whether it went well.
bool Await(grpc::CompletionQueue& queue);

struct RawAnswer {
  absl::Status status;
  std::vector<std::string> messages;
};

// Sends `messages`, closes, and reads all. `token`: empty for none.
RawAnswer RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::vector<std::string>& messages, const std::string& token = "");

}  // namespace shardmlp
