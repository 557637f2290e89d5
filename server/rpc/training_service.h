// Sessions and steps over gRPC. proto/shardmlp/v1/training.proto is the specification.
#pragma once

#include "server/metrics.h"
#include "server/rpc/engine_slot.h"
#include "shardmlp/v1/training.grpc.pb.h"

namespace shardmlp {

// Thread-safe. `engine` and `metrics` must outlive the gRPC server that the service is registered with.
class TrainingService final : public v1::Training::CallbackService {
 public:
  TrainingService(const EngineSlot& engine, Metrics& metrics);

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context, const v1::OpenSessionRequest* request,
                                        v1::OpenSessionResponse* response) override;
  grpc::ServerUnaryReactor* RenewSession(grpc::CallbackServerContext* context, const v1::RenewSessionRequest* request,
                                         v1::RenewSessionResponse* response) override;
  grpc::ServerUnaryReactor* CloseSession(grpc::CallbackServerContext* context, const v1::CloseSessionRequest* request,
                                         v1::CloseSessionResponse* response) override;
  grpc::ServerUnaryReactor* SealStep(grpc::CallbackServerContext* context, const v1::SealStepRequest* request,
                                     v1::SealStepResponse* response) override;
  grpc::ServerUnaryReactor* CommitStep(grpc::CallbackServerContext* context, const v1::CommitStepRequest* request,
                                       v1::CommitStepResponse* response) override;
  grpc::ServerUnaryReactor* DiscardStep(grpc::CallbackServerContext* context, const v1::DiscardStepRequest* request,
                                        v1::DiscardStepResponse* response) override;

 private:
  RpcMetrics& Method(const char* name);

  const EngineSlot& engine_;
  Metrics& metrics_;
  RpcMetrics& open_session_;
  RpcMetrics& renew_session_;
  RpcMetrics& close_session_;
  RpcMetrics& seal_step_;
  RpcMetrics& commit_step_;
  RpcMetrics& discard_step_;
};

}  // namespace shardmlp
