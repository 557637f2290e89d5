// Health on a port of its own: what probes that know no TLS are told, and that nothing else is there.
#include "server/rpc/health_endpoint.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "tests/rpc/raw_call.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";

class HealthEndpointTest : public RpcTest {
 protected:
  void Start(bool load) {
    RpcServerOptions options;
    options.health_listen = "127.0.0.1:0";
    RpcTest::Start({}, options, load);
    probe_ = grpc::CreateChannel(server_->health_address(), grpc::InsecureChannelCredentials());
  }
  RawAnswer Probe(const std::string& request = "") const {
    return RawCall(probe_, "/grpc.health.v1.Health/Check", {request});
  }

  std::shared_ptr<grpc::Channel> probe_;
};

TEST_F(HealthEndpointTest, SaysWhatTheServerSays) {
  Start(/*load=*/false);
  EXPECT_THAT(Probe().messages, testing::ElementsAre(kNotServing));
  server_->Serve(*engine_);
  EXPECT_THAT(Probe().messages, testing::ElementsAre(kServing));
  EXPECT_THAT(Probe(std::string("\x0a\x13") + "shardmlp.v1.Compute").messages, testing::ElementsAre(kServing));
  EXPECT_EQ(Probe(std::string("\x0a\x03") + "foo").status.code(), absl::StatusCode::kNotFound);
  server_->SetHealth(false);
  EXPECT_THAT(Probe().messages, testing::ElementsAre(kNotServing));
}

TEST_F(HealthEndpointTest, HasNothingElse) {
  Start(/*load=*/true);
  for (const char* method : {"/shardmlp.v1.Model/GetModel", "/shardmlp.v1.Compute/Forward",
                             "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    EXPECT_EQ(RawCall(probe_, method, {""}).status.code(), absl::StatusCode::kUnimplemented) << method;
  }
}

TEST_F(HealthEndpointTest, TakesNoMoreThanAProbeSends) {
  Start(/*load=*/true);
  const auto name = [](int size) {
    return absl::StrCat("\x0a", std::string(1, '\x80' | (size - 128)), "\x01", std::string(size, 'x'));
  };
  EXPECT_EQ(Probe(name(200)).status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Probe(name(254)).status.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(HealthEndpointTest, AConnectionHasNoMoreStreamsThanProbesNeed) {
  constexpr int kMost = 4;
  Start(/*load=*/true);
  grpc::GenericStub stub(probe_);
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> begun;
  for (int i = 0; i < kMost; ++i) {
    begun.push_back(stub.PrepareCall(contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get(),
                                     "/grpc.health.v1.Health/Check", &queue));
    begun.back()->StartCall(nullptr);
    ASSERT_TRUE(Await(queue));
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  grpc::health::v1::HealthCheckResponse response;
  const auto health = grpc::health::v1::Health::NewStub(probe_);
  EXPECT_EQ(health->Check(&context, {}, &response).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  for (const auto& begun_context : contexts) begun_context->TryCancel();
  for (const auto& stream : begun) {
    grpc::Status status;
    stream->Finish(&status, nullptr);
    Await(queue);
  }
  EXPECT_THAT(Probe().messages, testing::ElementsAre(kServing));
}

TEST_F(HealthEndpointTest, AnswersWhileEveryCallWaits) {
  Start(/*load=*/true);
  engine_->HoldDevice();
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  for (const auto& message : ForwardCall(8, 2)) ASSERT_TRUE(stream->Write(message));
  engine_->AwaitOpenCalls(1);
  for (int i = 0; i < 50; ++i) EXPECT_THAT(Probe().messages, testing::ElementsAre(kServing));
  engine_->ReleaseDevice();
  for (v1::ForwardResponse response; stream->Read(&response);) continue;
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(HealthEndpointTest, ATakenPortIsSaidSo) {
  Start(/*load=*/true);
  Metrics metrics;
  RpcServerOptions options;
  options.listen = {"127.0.0.1:0"};
  options.health_listen = server_->health_address();
  const auto second = RpcServer::Listen(options, metrics);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), testing::HasSubstr(server_->health_address() + " for health"));
}

}  // namespace
}  // namespace shardmlp
