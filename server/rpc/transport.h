// How the gRPC server uses its connections: flow control, frames, pings, and what they may hold.
#pragma once

#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include "server/rpc/message_limits.h"

namespace shardmlp {

// `quota`: of all connections together. Its size is the caller's to set, its threads are set here.
void SetTransport(const MessageLimits& limits, grpc::ResourceQuota& quota, grpc::ServerBuilder& builder);

}  // namespace shardmlp
