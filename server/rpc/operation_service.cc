#include "server/rpc/operation_service.h"

#include "server/rpc/convert.h"
#include "server/rpc/unary_reply.h"

namespace shardmlp {

OperationService::OperationService(const EngineSlot& engine, Metrics& metrics)
    : engine_(engine), metrics_(metrics), get_metrics_(Method("GetMetrics")) {}

RpcMetrics& OperationService::Method(const char* name) {
  return metrics_.ForMethod(v1::Operation::service_full_name(), name, RpcKind::kUnary);
}

grpc::ServerUnaryReactor* OperationService::GetMetrics(grpc::CallbackServerContext* context,
                                                       const v1::GetMetricsRequest* /*request*/,
                                                       v1::GetMetricsResponse* response) {
  return AnswerNow({metrics_, get_metrics_}, [&]() -> absl::Status {
    SHARDMLP_RETURN_IF_ERROR(engine_.Get(*context).status());
    for (const MetricFamily& family : metrics_.Families()) Fill(family, *response->add_families());
    return absl::OkStatus();
  });
}

}  // namespace shardmlp
