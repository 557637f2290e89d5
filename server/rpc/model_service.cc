#include "server/rpc/model_service.h"

#include "server/rpc/convert.h"
#include "server/rpc/tensor_stream.h"
#include "server/rpc/unary_reply.h"

namespace shardmlp {

ModelService::ModelService(const EngineSlot& engine, const MessageLimits& limits, OpenStreams& streams,
                           Metrics& metrics)
    : engine_(engine),
      limits_(limits),
      streams_(streams),
      metrics_(metrics),
      get_model_(Method("GetModel")),
      read_tensor_(Method("ReadTensor", RpcKind::kServerStream)),
      save_checkpoint_(Method("SaveCheckpoint")),
      restore_checkpoint_(Method("RestoreCheckpoint")),
      list_checkpoints_(Method("ListCheckpoints")),
      delete_checkpoint_(Method("DeleteCheckpoint")) {}

RpcMetrics& ModelService::Method(const char* name, RpcKind kind) {
  return metrics_.ForMethod(v1::Model::service_full_name(), name, kind);
}

grpc::ServerUnaryReactor* ModelService::GetModel(grpc::CallbackServerContext* context,
                                                 const v1::GetModelRequest* request, v1::GetModelResponse* response) {
  const UnaryReply reply(metrics_, get_model_, *context);
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    Fill(*engine, *response);
    response->mutable_limits()->set_max_message_bytes(limits_.max_message_bytes);
    response->mutable_limits()->set_preferred_shard_bytes(limits_.preferred_shard_bytes);
    if (request->checksums()) {
      engine->Checksums(reply.FinishWith<std::vector<uint64_t>>([=](const auto& checksums) {
        for (size_t i = 0; i < checksums.size(); ++i) {
          response->mutable_model()
              ->mutable_tensors(static_cast<int>(i))
              ->set_checksum(static_cast<int64_t>(checksums[i]));
        }
      }));
    } else {
      reply.Finish(absl::OkStatus());
    }
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::ReadTensorResponse>* ModelService::ReadTensor(grpc::CallbackServerContext* context,
                                                                           const v1::ReadTensorRequest* request) {
  return TensorStream::Start({engine_, streams_, tensor_streams_}, request->name(),
                             RpcRecord(metrics_, read_tensor_, *context), context);
}

grpc::ServerUnaryReactor* ModelService::SaveCheckpoint(grpc::CallbackServerContext* context,
                                                       const v1::SaveCheckpointRequest* request,
                                                       v1::SaveCheckpointResponse* response) {
  const UnaryReply reply(metrics_, save_checkpoint_, *context);
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    engine->SaveCheckpoint(request->name(), reply.FinishWith<CheckpointInfo>([=](const auto& checkpoint) {
      Fill(checkpoint, *response->mutable_checkpoint());
    }));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ModelService::RestoreCheckpoint(grpc::CallbackServerContext* context,
                                                          const v1::RestoreCheckpointRequest* request,
                                                          v1::RestoreCheckpointResponse* response) {
  const UnaryReply reply(metrics_, restore_checkpoint_, *context);
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    engine->RestoreCheckpoint(request->name(), reply.FinishWith<StepPosition>([=](const auto& position) {
      Fill(position, *response->mutable_position());
    }));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ModelService::ListCheckpoints(grpc::CallbackServerContext* context,
                                                        const v1::ListCheckpointsRequest* /*request*/,
                                                        v1::ListCheckpointsResponse* response) {
  const UnaryReply reply(metrics_, list_checkpoints_, *context);
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    engine->ListCheckpoints(reply.FinishWith<std::vector<CheckpointInfo>>([=](const auto& checkpoints) {
      for (const CheckpointInfo& checkpoint : checkpoints) Fill(checkpoint, *response->add_checkpoints());
    }));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ModelService::DeleteCheckpoint(grpc::CallbackServerContext* context,
                                                         const v1::DeleteCheckpointRequest* request,
                                                         v1::DeleteCheckpointResponse* response) {
  const UnaryReply reply(metrics_, delete_checkpoint_, *context);
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    engine->DeleteCheckpoint(request->name(), reply.FinishWith<CheckpointInfo>([=](const auto& checkpoint) {
      Fill(checkpoint, *response->mutable_checkpoint());
    }));
    return absl::OkStatus();
  });
}

}  // namespace shardmlp
