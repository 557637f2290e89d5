// The model, its tensors and checkpoints over gRPC. proto/shardmlp/v1/model.proto is the specification.
#pragma once

#include <atomic>
#include <cstdint>

#include "server/metrics.h"
#include "server/rpc/engine_slot.h"
#include "server/rpc/message_limits.h"
#include "server/rpc/open_streams.h"
#include "shardmlp/v1/model.grpc.pb.h"

namespace shardmlp {

// Thread-safe. `engine`, `streams` and `metrics` must outlive the gRPC server that the service is registered with.
class ModelService final : public v1::Model::CallbackService {
 public:
  ModelService(const EngineSlot& engine, const MessageLimits& limits, OpenStreams& streams, Metrics& metrics);

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerWriteReactor<v1::ReadTensorResponse>* ReadTensor(grpc::CallbackServerContext* context,
                                                               const v1::ReadTensorRequest* request) override;
  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context,
                                           const v1::SaveCheckpointRequest* request,
                                           v1::SaveCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* RestoreCheckpoint(grpc::CallbackServerContext* context,
                                              const v1::RestoreCheckpointRequest* request,
                                              v1::RestoreCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context,
                                            const v1::ListCheckpointsRequest* request,
                                            v1::ListCheckpointsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteCheckpoint(grpc::CallbackServerContext* context,
                                             const v1::DeleteCheckpointRequest* request,
                                             v1::DeleteCheckpointResponse* response) override;

 private:
  RpcMetrics& Method(const char* name, RpcKind kind = RpcKind::kUnary);

  const EngineSlot& engine_;
  const MessageLimits limits_;
  OpenStreams& streams_;
  Metrics& metrics_;
  std::atomic<int> tensor_streams_ = 0;
  RpcMetrics& get_model_;
  RpcMetrics& read_tensor_;
  RpcMetrics& save_checkpoint_;
  RpcMetrics& restore_checkpoint_;
  RpcMetrics& list_checkpoints_;
  RpcMetrics& delete_checkpoint_;
};

}  // namespace shardmlp
