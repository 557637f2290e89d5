// absl::Status with its Reason as gRPC carries it, and back.
//
// On the wire a failure is a gRPC status whose details are a google.rpc.Status with one google.rpc.ErrorInfo {reason,
// domain "shardmlp", metadata}. A status from elsewhere (a proxy, gRPC itself) has no such details and comes back with
// its code and message, and Reason::kUnspecified.
//
// gRPC refuses trailing metadata above 8 KiB, so a long message is cut, and metadata that does not fit is left out.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace shardmlp {

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace shardmlp
