// The coordinator's port: the rendezvous and nothing else, whatever gRPC adds to the servers of a process.
#include "server/sync/rendezvous/coordinator_server.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>

#include "tests/rpc/raw_call.h"
#include "tests/sync/free_port.h"
#include "tests/sync/replica_options.h"

namespace shardmlp::testing {
namespace {

class CoordinatorServerTest : public ::testing::Test {
 protected:
  CoordinatorServerTest() {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    ReplicasOptions options = FastOptions(0, 2, FreeAddress());
    options.loss_timeout = absl::Minutes(5);
    server_ = CoordinatorServer::Listen(options).value();
    channel_ = grpc::CreateChannel(options.coordinator, grpc::InsecureChannelCredentials());
  }

  std::unique_ptr<CoordinatorServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(CoordinatorServerTest, HasNothingElse) {
  for (const char* method : {"/grpc.health.v1.Health/Check", "/shardmlp.v1.Model/GetModel",
                             "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    EXPECT_EQ(RawCall(channel_, method, {""}).status.code(), absl::StatusCode::kUnimplemented) << method;
  }
}

TEST_F(CoordinatorServerTest, AConnectionHasNoMoreStreamsThanAReplicaNeeds) {
  constexpr int kMost = 8;
  const auto stub = v1::Rendezvous::NewStub(channel_);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::MeetRequest, v1::MeetResponse>>> silent;
  for (int i = 0; i < kMost; ++i) {
    silent.push_back(stub->Meet(contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get()));
    silent.back()->WaitForInitialMetadata();
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  const auto held_back = stub->Meet(&context);
  held_back->WritesDone();
  EXPECT_EQ(held_back->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED)
      << "one that closes is ended at once";
  for (const auto& begun : contexts) begun->TryCancel();
  for (const auto& stream : silent) stream->Finish();
}

}  // namespace
}  // namespace shardmlp::testing
