// A server over a MockEngine in this process, and stubs for its unary services.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <memory>

#include "kernels/status.h"
#include "proto/status_bridge.h"
#include "server/metrics.h"
#include "server/rpc/rpc_server.h"
#include "tests/rpc/mock_engine.h"

namespace shardmlp {

template <typename Service>
class ServiceTest : public testing::Test {
 protected:
  explicit ServiceTest(RpcServerOptions options = {}) {
    options.listen = {"127.0.0.1:0"};
    options.limits = {.max_message_bytes = 4 << 20, .preferred_shard_bytes = 123456};
    server_ = RpcServer::Listen(options, metrics_).value();
    server_->Serve(engine_);
    stub_ = Service::NewStub(grpc::CreateChannel(server_->addresses().front(), grpc::InsecureChannelCredentials()));
  }

  // Calls a unary method: Call(&Stub::OpenSession, request, response).
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (Service::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response& response) {
    grpc::ClientContext context;
    return FromGrpcStatus((*stub_.*method)(&context, request, &response));
  }

  Metrics metrics_;
  testing::StrictMock<MockEngine> engine_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<typename Service::Stub> stub_;
};

// An engine method that answers `done` at once, from the calling thread.
template <typename T>
auto Answer(absl::StatusOr<T> answer) {
  return [answer](const auto&, Done<T> done) { done(answer); };
}

}  // namespace shardmlp
