#include "server/rpc/operation_service.h"

#include "kernels/status.h"
#include "server/rpc/convert.h"
#include "server/rpc/unary_reply.h"

namespace shardmlp {

OperationService::OperationService(const EngineSlot& engine, bool anyone_drains, DrainRequest& drain, Metrics& metrics)
    : engine_(engine),
      anyone_drains_(anyone_drains),
      drain_request_(drain),
      metrics_(metrics),
      get_metrics_(Method("GetMetrics")),
      drain_(Method("Drain")) {}

RpcMetrics& OperationService::Method(const char* name) {
  return metrics_.ForMethod(v1::Operation::service_full_name(), name, RpcKind::kUnary);
}

grpc::ServerUnaryReactor* OperationService::GetMetrics(grpc::CallbackServerContext* context,
                                                       const v1::GetMetricsRequest* /*request*/,
                                                       v1::GetMetricsResponse* response) {
  return AnswerNow({metrics_, get_metrics_, *context}, [&]() -> absl::Status {
    SHARDMLP_RETURN_IF_ERROR(engine_.Get(*context).status());
    for (const MetricFamily& family : metrics_.Families()) Fill(family, *response->add_families());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* OperationService::Drain(grpc::CallbackServerContext* context,
                                                  const v1::DrainRequest* /*request*/, v1::DrainResponse* response) {
  const UnaryReply reply(metrics_, drain_, *context);
  return AnswerLater(reply, [&]() -> absl::Status {
    SHARDMLP_RETURN_IF_ERROR(engine_.Get(*context).status());
    SHARDMLP_RETURN_IF_ERROR(MayDrain(*context));
    drain_request_.Ask(reply.FinishWith<DrainSummary>([=](const auto& summary) { Fill(summary, *response); }));
    return absl::OkStatus();
  });
}

absl::Status OperationService::MayDrain(const grpc::CallbackServerContext& context) const {
  if (anyone_drains_ || engine_.has_tokens() || context.auth_context()->IsPeerAuthenticated()) return absl::OkStatus();
  return Error(
      absl::StatusCode::kPermissionDenied, Reason::kPermissionDenied,
      "the server drains at the word of a client that it knows, by a token or a certificate, and of others where "
      "it was started with --allow-drain; this call has neither");
}

}  // namespace shardmlp
