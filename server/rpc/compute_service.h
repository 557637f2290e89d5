// Forward and backward over gRPC: raw byte buffers under the methods' own names, so that payloads are not parsed.
// proto/shardmlp/v1/compute.proto is the specification.
#pragma once

#include "server/metrics.h"
#include "server/rpc/shard_stream.h"
#include "shardmlp/v1/compute.grpc.pb.h"

namespace shardmlp {

// Thread-safe. What `context` refers to must outlive the gRPC server that the service is registered with.
class ComputeService final : public v1::Compute::WithRawCallbackMethod_Forward<
                                 v1::Compute::WithRawCallbackMethod_Backward<v1::Compute::Service>> {
 public:
  explicit ComputeService(const ShardStreamContext& context)
      : context_(context), forward_(Method("Forward")), backward_(Method("Backward")) {}

  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
  Reactor* Forward(grpc::CallbackServerContext* call) override {
    return ShardStream::Start(context_, Pass::kForward, forward_, call);
  }
  Reactor* Backward(grpc::CallbackServerContext* call) override {
    return ShardStream::Start(context_, Pass::kBackward, backward_, call);
  }

 private:
  RpcMetrics& Method(const char* name) {
    return context_.metrics.ForMethod(v1::Compute::service_full_name(), name, RpcKind::kBidiStream);
  }

  const ShardStreamContext context_;
  RpcMetrics& forward_;
  RpcMetrics& backward_;
};

}  // namespace shardmlp
