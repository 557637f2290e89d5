// How the gRPC server uses its connections: flow control, frames, pings.
#pragma once

#include <grpcpp/server_builder.h>

#include "server/rpc/message_limits.h"

namespace shardmlp {

void SetTransport(const MessageLimits& limits, grpc::ServerBuilder& builder);

}  // namespace shardmlp
