#include "server/rpc/training_service.h"

#include "server/rpc/convert.h"
#include "server/rpc/unary_reply.h"

namespace shardmlp {

TrainingService::TrainingService(const EngineSlot& engine, Metrics& metrics)
    : engine_(engine),
      metrics_(metrics),
      open_session_(Method("OpenSession")),
      renew_session_(Method("RenewSession")),
      close_session_(Method("CloseSession")),
      seal_step_(Method("SealStep")),
      commit_step_(Method("CommitStep")),
      discard_step_(Method("DiscardStep")) {}

RpcMetrics& TrainingService::Method(const char* name) {
  return metrics_.ForMethod(v1::Training::service_full_name(), name, RpcKind::kUnary);
}

grpc::ServerUnaryReactor* TrainingService::OpenSession(grpc::CallbackServerContext* context,
                                                       const v1::OpenSessionRequest* request,
                                                       v1::OpenSessionResponse* response) {
  return AnswerNow({metrics_, open_session_, *context}, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    SHARDMLP_ASSIGN_OR_RETURN(const SessionSpec spec, FromProto(*request));
    SHARDMLP_ASSIGN_OR_RETURN(const SessionGrant grant, engine->OpenSession(spec));
    Fill(grant, *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainingService::RenewSession(grpc::CallbackServerContext* context,
                                                        const v1::RenewSessionRequest* request,
                                                        v1::RenewSessionResponse* response) {
  return AnswerNow({metrics_, renew_session_, *context, request->session_id()}, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    SHARDMLP_ASSIGN_OR_RETURN(const StepPosition position, engine->RenewSession(request->session_id()));
    Fill(position, *response->mutable_position());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainingService::CloseSession(grpc::CallbackServerContext* context,
                                                        const v1::CloseSessionRequest* request,
                                                        v1::CloseSessionResponse* /*response*/) {
  return AnswerNow({metrics_, close_session_, *context, request->session_id()}, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    return engine->CloseSession(request->session_id());
  });
}

grpc::ServerUnaryReactor* TrainingService::SealStep(grpc::CallbackServerContext* context,
                                                    const v1::SealStepRequest* request,
                                                    v1::SealStepResponse* response) {
  const UnaryReply reply(metrics_, seal_step_, *context, request->session_id());
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    SHARDMLP_ASSIGN_OR_RETURN(const SealSpec spec, FromProto(*request));
    engine->SealStep(spec, reply.FinishWith<SealResult>([=](const auto& result) { Fill(result, *response); }));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainingService::CommitStep(grpc::CallbackServerContext* context,
                                                      const v1::CommitStepRequest* request,
                                                      v1::CommitStepResponse* response) {
  const UnaryReply reply(metrics_, commit_step_, *context, request->session_id());
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    SHARDMLP_ASSIGN_OR_RETURN(const CommitSpec spec, FromProto(*request));
    engine->CommitStep(spec, reply.FinishWith<StepPosition>(
                                 [=](const auto& position) { Fill(position, *response->mutable_position()); }));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainingService::DiscardStep(grpc::CallbackServerContext* context,
                                                       const v1::DiscardStepRequest* request,
                                                       v1::DiscardStepResponse* response) {
  const UnaryReply reply(metrics_, discard_step_, *context, request->session_id());
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_.Get(*context));
    SHARDMLP_ASSIGN_OR_RETURN(const DiscardSpec spec, FromProto(*request));
    engine->DiscardStep(spec, reply.FinishWith<StepPosition>(
                                  [=](const auto& position) { Fill(position, *response->mutable_position()); }));
    return absl::OkStatus();
  });
}

}  // namespace shardmlp
