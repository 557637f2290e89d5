// A bare gRPC byte-buffer echo: the most that shard streams could reach. It copies nothing and looks at nothing.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/generic/async_generic_service.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace shardmlp {

// Sends every message of every stream back as it came, reading on while it writes.
class EchoService final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;
};

// Streams `message_count` messages of `message_bytes`, all of the same memory, through an EchoService and back. False
// where they did not all come back.
bool RunEcho(const std::shared_ptr<grpc::Channel>& channel, const std::vector<char>& message, int64_t message_count);

}  // namespace shardmlp
