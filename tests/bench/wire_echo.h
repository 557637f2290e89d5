// A bare gRPC byte-buffer echo: the most that shard streams could reach. It copies nothing and looks at nothing.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/generic/async_generic_service.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"

namespace shardmlp {

// Sends every message of every stream back as it came, reading on while it writes.
class EchoService final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;
};

// Streams `data`, in messages of `message_bytes` that reference it, through an EchoService and back. DATA_LOSS where
// another number of bytes came back.
absl::Status RunEcho(const std::shared_ptr<grpc::Channel>& channel, const std::vector<char>& data,
                     int64_t message_bytes);

}  // namespace shardmlp
