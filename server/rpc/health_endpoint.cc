#include "server/rpc/health_endpoint.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "proto/builder_options.h"
#include "server/rpc/listen_address.h"
#include "server/rpc/service_names.h"

namespace shardmlp {
namespace {

// One waits, and others answer; more at once are told to come again.
constexpr int kThreads = 4;
constexpr int kMaxStreams = 4;          // of a connection
constexpr int kMaxMessageBytes = 256;   // the name of a service
constexpr size_t kMaxBytes = 64 << 20;  // of what all connections send: some hundreds that mean harm leave room for one

}  // namespace

absl::StatusOr<std::unique_ptr<HealthEndpoint>> HealthEndpoint::Listen(const std::string& address) {
  auto endpoint = std::make_unique<HealthEndpoint>();
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("health");
  builder.SetResourceQuota(quota.Resize(kMaxBytes).SetMaxThreads(kThreads));
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetOption(std::make_unique<WithoutReflection>());
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));  // this is it
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(endpoint.get());
  endpoint->server_ = builder.BuildAndStart();
  if (endpoint->server_ == nullptr || port <= 0) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", address, " for health"));
  }
  endpoint->address_ = WithBoundPort(address, port);
  return endpoint;
}

HealthEndpoint::~HealthEndpoint() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

grpc::Status HealthEndpoint::Check(grpc::ServerContext* /*context*/,
                                   const grpc::health::v1::HealthCheckRequest* request,
                                   grpc::health::v1::HealthCheckResponse* response) {
  if (!request->service().empty() && !absl::c_linear_search(kServiceNames, request->service())) {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, absl::StrCat("no service ", request->service()));
  }
  using grpc::health::v1::HealthCheckResponse;
  response->set_status(serving_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
  return grpc::Status::OK;
}

}  // namespace shardmlp
