// gRPC health on a port of its own, in plaintext, for probes that know no TLS, such as those of Kubernetes.
#pragma once

#include <grpcpp/server.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace shardmlp {

// Answers Check, on a thread that serves nothing else, and no other rpc. Thread-safe.
class HealthEndpoint final : private grpc::health::v1::Health::Service {
 public:
  // Listens at `address`, "host:port". UNAVAILABLE where it can't.
  static absl::StatusOr<std::unique_ptr<HealthEndpoint>> Listen(const std::string& address);
  ~HealthEndpoint() override;

  // As listened on, with the port that was bound.
  const std::string& address() const { return address_; }
  void Set(bool serving) { serving_ = serving; }

 private:
  grpc::Status Check(grpc::ServerContext* context, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override;

  std::atomic<bool> serving_ = false;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace shardmlp
