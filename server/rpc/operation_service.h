// What those who run a server ask of it, over gRPC. proto/shardmlp/v1/operation.proto is the specification.
#pragma once

#include "absl/status/status.h"
#include "server/metrics.h"
#include "server/rpc/drain_request.h"
#include "server/rpc/engine_slot.h"
#include "shardmlp/v1/operation.grpc.pb.h"

namespace shardmlp {

// Thread-safe. `engine`, `drain` and `metrics` must outlive the gRPC server that the service is registered with.
class OperationService final : public v1::Operation::CallbackService {
 public:
  // `anyone_drains`: who may call may have the server drain; else those alone who have shown a token or a certificate.
  OperationService(const EngineSlot& engine, bool anyone_drains, DrainRequest& drain, Metrics& metrics);

  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext* context, const v1::GetMetricsRequest* request,
                                       v1::GetMetricsResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

 private:
  RpcMetrics& Method(const char* name);
  // Of a caller that has been let in.
  absl::Status MayDrain(const grpc::CallbackServerContext& context) const;

  const EngineSlot& engine_;
  const bool anyone_drains_;
  DrainRequest& drain_request_;
  Metrics& metrics_;
  RpcMetrics& get_metrics_;
  RpcMetrics& drain_;
};

}  // namespace shardmlp
