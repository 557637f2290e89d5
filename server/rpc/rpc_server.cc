#include "server/rpc/rpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/rpc/compute_service.h"
#include "server/rpc/listen_address.h"
#include "server/rpc/model_service.h"
#include "server/rpc/training_service.h"
#include "server/rpc/transport.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kLoanTimeout = absl::Seconds(5);

}  // namespace

RpcServer::RpcServer(const RpcServerOptions& options, Metrics& metrics) : streams_(options.stall_timeout) {
  metrics.ExpectFailures(ReasonNames());
  const ShardStreamContext context = {engine_, options.limits, streams_, metrics};
  services_.push_back(std::make_unique<ComputeService>(context));
  services_.push_back(std::make_unique<TrainingService>(engine_, metrics));
  services_.push_back(std::make_unique<ModelService>(engine_, options.limits, streams_, metrics));
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Listen(const RpcServerOptions& options, Metrics& metrics) {
  for (const std::string& address : options.listen) {
    SHARDMLP_RETURN_IF_ERROR(CheckListenAddress(address, options.insecure_listen_anywhere));
    SHARDMLP_RETURN_IF_ERROR(CheckNotTaken(address));
  }
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  auto server = std::make_unique<RpcServer>(options, metrics);
  grpc::ServerBuilder builder;
  SetTransport(options.limits, server->quota_, builder);
  std::vector<int> ports(options.listen.size());
  for (size_t i = 0; i < ports.size(); ++i) {
    builder.AddListeningPort(options.listen[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  for (const auto& service : server->services_) builder.RegisterService(service.get());
  server->server_ = builder.BuildAndStart();
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i] <= 0) return absl::UnavailableError(absl::StrCat("can't listen on ", options.listen[i]));
    server->addresses_.push_back(WithBoundPort(options.listen[i], ports[i]));
  }
  if (server->server_ == nullptr) return absl::InternalError("gRPC did not start");
  server->SetHealth(false);
  return server;
}

RpcServer::~RpcServer() {
  if (server_ != nullptr)
    Shutdown(Error(absl::StatusCode::kUnavailable, Reason::kDraining, "the server goes away"), absl::Now());
}

void RpcServer::Serve(Engine& engine) {
  engine_.Set(engine);
  SetHealth(true);
}

void RpcServer::SetHealth(bool serving) {
  grpc::HealthCheckServiceInterface& health = *server_->GetHealthCheckService();
  health.SetServingStatus(serving);
  for (const char* service :
       {v1::Compute::service_full_name(), v1::Training::service_full_name(), v1::Model::service_full_name()}) {
    health.SetServingStatus(service, serving);
  }
}

void RpcServer::Shutdown(const absl::Status& status, absl::Time deadline) {
  streams_.EndAll(status);
  server_->Shutdown(absl::ToChronoTime(deadline));
  server_.reset();
  streams_.AwaitLoans(absl::Now() + kLoanTimeout);
}

}  // namespace shardmlp
