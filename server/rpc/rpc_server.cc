#include "server/rpc/rpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "proto/builder_options.h"
#include "server/rpc/compute_service.h"
#include "server/rpc/listen_address.h"
#include "server/rpc/model_service.h"
#include "server/rpc/operation_service.h"
#include "server/rpc/service_names.h"
#include "server/rpc/training_service.h"
#include "server/rpc/transport.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kLoanTimeout = absl::Seconds(5);

}  // namespace

RpcServer::RpcServer(const RpcServerOptions& options, Metrics& metrics)
    : options_(options),
      metrics_(metrics),
      tokens_(options.token_file.empty() ? nullptr : std::make_unique<Tokens>(options.token_file)),
      engine_(tokens_.get()),
      streams_(options.stall_timeout) {
  metrics.ExpectFailures(ReasonNames());
  const ShardStreamContext context = {engine_, options.limits, streams_, metrics};
  services_.push_back(std::make_unique<ComputeService>(context));
  services_.push_back(std::make_unique<TrainingService>(engine_, metrics));
  services_.push_back(std::make_unique<ModelService>(engine_, options.limits, streams_, metrics));
  services_.push_back(std::make_unique<OperationService>(engine_, options.allow_drain, drain_request_, metrics));
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Listen(const RpcServerOptions& options, Metrics& metrics) {
  for (const std::string& address : options.listen) {
    SHARDMLP_RETURN_IF_ERROR(CheckListenAddress(address, options.secure() || options.insecure_listen_anywhere));
    SHARDMLP_RETURN_IF_ERROR(CheckNotTaken(address));
  }
  auto server = std::make_unique<RpcServer>(options, metrics);
  SHARDMLP_RETURN_IF_ERROR(server->Refresh());
  if (!options.health_listen.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(server->health_, HealthEndpoint::Listen(options.health_listen));
  }
  SHARDMLP_RETURN_IF_ERROR(server->Start());
  return server;
}

absl::Status RpcServer::Start() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetTransport(options_.limits, quota_, builder);
  if (tokens_ != nullptr) builder.SetOption(std::make_unique<WithoutReflection>());
  const auto plaintext = grpc::InsecureServerCredentials();
  const auto tls = options_.tls.cert.empty() ? plaintext : TlsServerCredentials(options_.tls);
  std::vector<int> ports(options_.listen.size());
  for (size_t i = 0; i < ports.size(); ++i) {
    builder.AddListeningPort(options_.listen[i], IsUnixSocket(options_.listen[i]) ? plaintext : tls, &ports[i]);
  }
  for (const auto& service : services_) builder.RegisterService(service.get());
  server_ = builder.BuildAndStart();
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i] <= 0) return absl::UnavailableError(absl::StrCat("can't listen on ", options_.listen[i]));
    addresses_.push_back(WithBoundPort(options_.listen[i], ports[i]));
  }
  if (server_ == nullptr) return absl::InternalError("gRPC did not start");
  SetHealth(false);
  return absl::OkStatus();
}

absl::Status RpcServer::Refresh() {
  std::vector<std::string> wrong;
  const auto note = [&](ServerFiles files, const absl::Status& found) {
    metrics_.SetFilesInOrder(files, found.ok());
    if (!found.ok()) wrong.emplace_back(found.message());
  };
  if (tokens_ != nullptr) note(ServerFiles::kTokens, tokens_->Read());
  if (!options_.tls.cert.empty()) note(ServerFiles::kCertificate, RefreshCertificate());
  if (!options_.replica_ca.empty()) {
    note(ServerFiles::kReplicaCa, ReadTlsFiles({.ca = options_.replica_ca}).status());
  }
  if (wrong.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, absl::StrJoin(wrong, "; "));
}

absl::Status RpcServer::RefreshCertificate() {
  SHARDMLP_ASSIGN_OR_RETURN(const Validity validity, ReadTlsFiles(options_.tls));
  metrics_.SetCertificateExpiry(validity.end);
  return CheckValid(validity, options_.tls.cert, absl::Now());
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
  for (const char* service : kServiceNames) health.SetServingStatus(service, serving);
  if (health_ != nullptr) health_->Set(serving);
}

void RpcServer::Shutdown(const absl::Status& status, absl::Time deadline) {
  streams_.EndAll(status);
  drain_request_.End(status);
  server_->Shutdown(absl::ToChronoTime(deadline));
  server_.reset();
  streams_.AwaitLoans(absl::Now() + kLoanTimeout);
}

}  // namespace shardmlp
