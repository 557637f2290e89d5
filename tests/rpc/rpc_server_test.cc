// A server's life: listening while the model loads, serving, draining with streams open, and going.
#include "server/rpc/rpc_server.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "kernels/status.h"
#include "proto/status_bridge.h"
#include "tests/rpc/raw_call.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

class RpcServerTest : public RpcTest {
 protected:
  // grpc.health.v1.HealthCheckResponse, field 1: 1 is SERVING, 2 is NOT_SERVING.
  std::string Health(const std::string& request = "") const {
    const RawAnswer answer = RawCall(channel_, "/grpc.health.v1.Health/Check", {request});
    return answer.messages.empty() ? answer.status.ToString() : answer.messages.front();
  }
  absl::Status Draining() const { return Error(absl::StatusCode::kUnavailable, Reason::kDraining, "going down"); }
};

constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";
// grpc.health.v1.HealthCheckRequest for one service.
const std::string kComputeHealth = std::string("\x0a\x13") + "shardmlp.v1.Compute";

TEST_F(RpcServerTest, AnswersHealthWhileTheModelLoads) {
  Start({}, {}, /*load=*/false);
  EXPECT_EQ(Health(), kNotServing);
  EXPECT_EQ(Health(kComputeHealth), kNotServing);
  ExpectStatus(Forward(ForwardCall(4, 1)).status, absl::StatusCode::kUnavailable, Reason::kLoading, "still loading");
  server_->Serve(*engine_);
  EXPECT_EQ(Health(), kServing);
  EXPECT_EQ(Health(kComputeHealth), kServing);
  ExpectUnharmed();
}

TEST_F(RpcServerTest, ReflectionListsTheServices) {
  Start();
  // ServerReflectionRequest.list_services = "".
  const RawAnswer answer =
      RawCall(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {std::string("\x3a\x00", 2)});
  ASSERT_EQ(answer.messages.size(), 1u) << answer.status;
  for (const char* service : {"shardmlp.v1.Compute", "shardmlp.v1.Training", "shardmlp.v1.Model", "grpc.health.v1"}) {
    EXPECT_THAT(answer.messages.front(), testing::HasSubstr(service));
  }
}

TEST_F(RpcServerTest, ReflectionTakesNoMoreThreadsThanItMay) {
  Start();
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  const grpc::Slice list_services(std::string("\x3a\x00", 2));
  std::vector<grpc::ClientContext> contexts(40);
  std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> streams;
  int answered = 0;
  for (grpc::ClientContext& context : contexts) {
    auto& stream = streams.emplace_back(
        stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue));
    stream->StartCall(nullptr);
    Await(queue);
    stream->Write(grpc::ByteBuffer(&list_services, 1), nullptr);
    Await(queue);
    grpc::ByteBuffer answer;
    stream->Read(&answer, nullptr);
    answered += Await(queue);  // and holds a thread until it is closed
  }
  EXPECT_GT(answered, 0);
  EXPECT_LE(answered, 16);
  for (size_t i = 0; i < streams.size(); ++i) {
    contexts[i].TryCancel();
    grpc::Status status;
    streams[i]->Finish(&status, nullptr);
    Await(queue);
  }
  ExpectUnharmed();
}

TEST_F(RpcServerTest, DrainingLetsOpenCallsEnd) {
  Start();
  engine_->HoldDevice();
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  for (const auto& message : ForwardCall(8, 2)) ASSERT_TRUE(stream->Write(message));
  engine_->AwaitOpenCalls(1);

  server_->SetHealth(false);
  engine_->StartDraining();
  EXPECT_EQ(Health(), kNotServing);
  ExpectStatus(Forward(ForwardCall(4, 1)).status, absl::StatusCode::kUnavailable, Reason::kDraining);
  EXPECT_FALSE(server_->AwaitIdle(absl::Now()));

  engine_->ReleaseDevice();
  std::string rows;
  for (v1::ForwardResponse response; stream->Read(&response);) rows += response.result().y();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(rows, Rows(0, 8));
  EXPECT_TRUE(server_->AwaitIdle(absl::InfiniteFuture()));
}

TEST_F(RpcServerTest, ShutdownCancelsWhatIsStillOpenWithItsReason) {
  Start();
  engine_->HoldDevice();
  const auto stub = Stub();
  grpc::ClientContext whole_context, begun_context;
  const auto whole = stub->Forward(&whole_context);
  for (const auto& message : ForwardCall(8, 1)) ASSERT_TRUE(whole->Write(message));
  const auto begun = stub->Backward(&begun_context);
  ASSERT_TRUE(begun->Write(BackwardHeader(8)));
  engine_->AwaitOpenCalls(2);

  engine_->Shutdown();
  server_->Shutdown(Draining(), absl::Now() + absl::Seconds(10));
  ExpectStatus(FromGrpcStatus(whole->Finish()), absl::StatusCode::kUnavailable, Reason::kDraining);
  ExpectStatus(FromGrpcStatus(begun->Finish()), absl::StatusCode::kUnavailable, Reason::kDraining);
}

TEST_F(RpcServerTest, StreamsAreEndedWhileTheRestGoesOn) {
  Start();
  const auto stub = Stub();
  grpc::ClientContext begun_context, silent_context, late_context;
  const auto begun = stub->Forward(&begun_context);
  ASSERT_TRUE(begun->Write(ForwardHeader(8)));
  const auto silent = stub->Backward(&silent_context);
  engine_->AwaitOpenCalls(1);
  EXPECT_EQ(Health(), kServing);  // on the same connection, so the server knows the silent one too
  EXPECT_EQ(server_->open_stream_count(), 2);

  server_->EndStreams(Draining());
  ExpectStatus(FromGrpcStatus(begun->Finish()), absl::StatusCode::kUnavailable, Reason::kDraining, "going down");
  ExpectStatus(FromGrpcStatus(silent->Finish()), absl::StatusCode::kUnavailable, Reason::kDraining, "going down");
  engine_->AwaitOpenCalls(0);
  EXPECT_TRUE(server_->AwaitIdle(absl::InfiniteFuture()));
  EXPECT_EQ(Health(), kServing);
  const auto late = stub->Forward(&late_context);
  ExpectStatus(FromGrpcStatus(late->Finish()), absl::StatusCode::kUnavailable, Reason::kDraining, "going down");
}

TEST_F(RpcServerTest, ShutdownEndsAStreamThatHasSentNothing) {
  Start();
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  ExpectUnharmed();  // on the same connection, so the server knows the stream too
  server_->Shutdown(Draining(), absl::Now() + absl::Seconds(10));
  ExpectStatus(FromGrpcStatus(stream->Finish()), absl::StatusCode::kUnavailable, Reason::kDraining, "going down");
}

TEST_F(RpcServerTest, ShutdownDoesNotWaitForAClientThatNeverReads) {
  constexpr int64_t kTileRows = 1024;
  Start({.tile_row_count = kTileRows, .slot_count = 2});
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  ASSERT_TRUE(stream->Write(ForwardHeader(1 << 24)));
  std::thread writer([&] {
    v1::ForwardRequest shard = ForwardShard(0, kTileRows);
    while (stream->Write(shard)) shard.mutable_shard()->set_row_offset(shard.shard().row_offset() + kTileRows);
  });
  engine_->AwaitBlockedCall();
  engine_->Shutdown();
  server_->Shutdown(Draining(), absl::Now());
  writer.join();
  // gRPC gives the status only behind what it had received by then.
  for (v1::ForwardResponse response; stream->Read(&response);) continue;
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(RpcServerTest, AConnectionHasNoMoreStreamsThanMayBeOpen) {
  constexpr int kMost = 100;
  Start({.max_call_count = 2 * kMost});
  const auto stub = Stub();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>>> streams;
  for (int i = 0; i < kMost; ++i) {
    streams.push_back(stub->Forward(contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get()));
    ASSERT_TRUE(streams.back()->Write(ForwardHeader(4)));
  }
  engine_->AwaitOpenCalls(kMost);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(300)));
  EXPECT_EQ(stub->Forward(&context)->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED)
      << "it was not held back, and refused for closing without a header";
  streams.back()->WritesDone();
  EXPECT_EQ(streams.back()->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  engine_->AwaitOpenCalls(kMost - 1);
  EXPECT_EQ(Forward(ForwardCall(4, 1)).rows, Rows(0, 4)) << "there is room for one again";
  for (const auto& open : contexts) open->TryCancel();
  for (size_t i = 0; i + 1 < streams.size(); ++i) EXPECT_FALSE(streams[i]->Finish().ok());
}

TEST_F(RpcServerTest, MessagesThatNobodyTakesAreHeldWithinTheBound) {
  constexpr int64_t kShardRows = (4 << 20) / kRowBytes;
  constexpr int kStreams = 40;  // of 4 MiB that the engine has no room for, and as much behind it in the window
  Start({.max_call_count = kStreams});
  server_->BoundMessages(64 << 20);
  engine_->HoldDevice();
  const auto stub = Stub();
  std::vector<grpc::ClientContext> contexts(kStreams);
  std::vector<std::thread> clients;
  absl::Notification cut;
  std::atomic<bool> first = true;
  for (grpc::ClientContext& context : contexts) {
    clients.emplace_back([&] {
      const auto stream = stub->Forward(&context);
      v1::ForwardRequest shard = ForwardShard(0, kShardRows);
      bool sending = stream->Write(ForwardHeader(1 << 30));
      while (sending) {
        sending = stream->Write(shard);
        shard.mutable_shard()->set_row_offset(shard.shard().row_offset() + kShardRows);
      }
      if (first.exchange(false)) cut.Notify();
      stream->Finish();
    });
  }
  cut.WaitForNotification();
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (std::thread& client : clients) client.join();
  engine_->ReleaseDevice();
  engine_->AwaitOpenCalls(0);
  server_->BoundMessages(int64_t{1} << 30);
  channel_ = grpc::CreateChannel(server_->addresses().front(), grpc::InsecureChannelCredentials());
  ExpectUnharmed();
}

TEST_F(RpcServerTest, ATakenPortIsSaidSo) {
  Start();
  Metrics metrics;
  RpcServerOptions options;
  options.listen = server_->addresses();
  const auto second = RpcServer::Listen(options, metrics);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), testing::HasSubstr(server_->addresses().front()));
}

TEST_F(RpcServerTest, AUnixSocketWithALiveServerIsLeftToIt) {
  const std::string path = testing::TempDir() + "/shardmlp-rpc-live.sock";
  engine_ = std::make_unique<CopyEngine>();
  RpcServerOptions options;
  options.listen = {"unix:" + path};
  server_ = RpcServer::Listen(options, metrics_).value();
  server_->Serve(*engine_);
  Metrics metrics;
  for (const std::string& address : {"unix:" + path, "unix://" + path}) {
    options.listen = {address};
    const auto second = RpcServer::Listen(options, metrics);
    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << address;
    EXPECT_THAT(std::string(second.status().message()), testing::HasSubstr(path + ": another server listens there"));
  }
  channel_ = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
  ExpectUnharmed();
}

TEST_F(RpcServerTest, TheSocketOfADeadServerIsReplaced) {
  const std::string path = testing::TempDir() + "/shardmlp-rpc-dead.sock";
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  path.copy(name.sun_path, sizeof(name.sun_path) - 1);
  unlink(path.c_str());
  const int dead = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(dead, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  ASSERT_EQ(listen(dead, 1), 0);
  close(dead);  // which leaves the file
  engine_ = std::make_unique<CopyEngine>();
  RpcServerOptions options;
  options.listen = {"unix:" + path};
  auto server = RpcServer::Listen(options, metrics_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  server_->Serve(*engine_);
  channel_ = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
  ExpectUnharmed();
}

TEST_F(RpcServerTest, ListensOnSeveralAddressesAtOnce) {
  const std::string path = testing::TempDir() + "/shardmlp-rpc-test.sock";
  Metrics metrics;
  CopyEngine engine;
  RpcServerOptions options;
  options.listen = {"127.0.0.1:0", "unix:" + path};
  const auto server = RpcServer::Listen(options, metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  (*server)->Serve(engine);
  EXPECT_THAT((*server)->addresses(),
              testing::ElementsAre(testing::MatchesRegex("127.0.0.1:[1-9][0-9]*"), "unix:" + path));
  for (const std::string& address : (*server)->addresses()) {
    channel_ = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    EXPECT_EQ(Forward(ForwardCall(4, 1)).rows, Rows(0, 4)) << address;
  }
}

}  // namespace
}  // namespace shardmlp
