// What a server tells those who run it, over gRPC. proto/shardmlp/v1/operation.proto is the specification.
#pragma once

#include "server/metrics.h"
#include "server/rpc/engine_slot.h"
#include "shardmlp/v1/operation.grpc.pb.h"

namespace shardmlp {

// Thread-safe. `engine` and `metrics` must outlive the gRPC server that the service is registered with.
class OperationService final : public v1::Operation::CallbackService {
 public:
  OperationService(const EngineSlot& engine, Metrics& metrics);

  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext* context, const v1::GetMetricsRequest* request,
                                       v1::GetMetricsResponse* response) override;

 private:
  RpcMetrics& Method(const char* name);

  const EngineSlot& engine_;
  Metrics& metrics_;
  RpcMetrics& get_metrics_;
};

}  // namespace shardmlp
