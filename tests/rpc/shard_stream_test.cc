// Shard streams over a real connection: what goes in comes back, whatever the sizes, and however slow or rude a client.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "proto/status_bridge.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

class ShardStreamTest : public RpcTest {};

TEST_F(ShardStreamTest, ForwardAnswersEveryRowInOrderWhateverTheShards) {
  Start({.tile_row_count = 4, .slot_count = 2});
  for (const int64_t rows : {0, 1, 2, 5, 125, 257}) {
    for (const int shards : {1, 2, 3, 9}) {
      SCOPED_TRACE(absl::StrCat(rows, " rows in ", shards, " shards"));
      const Answer answer = Forward(ForwardCall(rows, shards));
      ASSERT_TRUE(answer.status.ok()) << answer.status;
      EXPECT_EQ(answer.rows, Rows(0, rows));
      ASSERT_TRUE(answer.forward_end.has_value());
      EXPECT_EQ(answer.forward_end->row_count(), rows);
      EXPECT_EQ(answer.forward_end->weights_version(), CopyEngine::kWeightsVersion);
    }
  }
  engine_->AwaitOpenCalls(0);
}

TEST_F(ShardStreamTest, BackwardAnswersWithTheInputGradient) {
  Start();
  const Answer answer = Backward(BackwardCall(23, 3));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.rows, Rows(0, 23));
  ASSERT_TRUE(answer.backward_end.has_value());
  EXPECT_EQ(answer.backward_end->row_count(), 23);
}

TEST_F(ShardStreamTest, BackwardWithoutInputGradientAnswersWithTheEndAlone) {
  Start();
  const Answer answer = Backward(BackwardCall(23, 3, /*input_gradient=*/false));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.rows, "");
  ASSERT_TRUE(answer.backward_end.has_value());
  EXPECT_EQ(answer.backward_end->row_count(), 23);
}

TEST_F(ShardStreamTest, ResultsAreCutIntoMessagesOfThePreferredSize) {
  RpcServerOptions options;
  options.limits.preferred_shard_bytes = 3 * kRowBytes + 1;
  Start({.tile_row_count = 8}, options);
  const Answer answer = Forward(ForwardCall(16, 1));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.rows, Rows(0, 16));
  EXPECT_THAT(answer.message_bytes, testing::ElementsAre(3 * kRowBytes, 3 * kRowBytes, 2 * kRowBytes, 3 * kRowBytes,
                                                         3 * kRowBytes, 2 * kRowBytes));
}

TEST_F(ShardStreamTest, ARowAboveThePreferredSizeTravelsWhole) {
  RpcServerOptions options;
  options.limits.preferred_shard_bytes = 1;
  Start({}, options);
  const Answer answer = Forward(ForwardCall(5, 1));
  EXPECT_EQ(answer.rows, Rows(0, 5));
  EXPECT_THAT(answer.message_bytes, testing::Each(kRowBytes));
}

TEST_F(ShardStreamTest, AFailureInTheEngineEndsTheCallWithItsReason) {
  Start();
  engine_->FailAfter(8, Error(absl::StatusCode::kUnavailable, Reason::kWeightsChanged, "a commit came in between"));
  const Answer answer = Forward(ForwardCall(100, 4));
  ExpectStatus(answer.status, absl::StatusCode::kUnavailable, Reason::kWeightsChanged, "a commit came in between");
  EXPECT_FALSE(answer.forward_end.has_value());
}

TEST_F(ShardStreamTest, ACancelledCallIsDroppedByTheEngine) {
  Start();
  engine_->HoldDevice();
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  ASSERT_TRUE(stream->Write(ForwardHeader(100)));
  ASSERT_TRUE(stream->Write(ForwardShard(0, 3)));
  engine_->AwaitOpenCalls(1);
  context.TryCancel();
  engine_->AwaitOpenCalls(0);
  EXPECT_FALSE(stream->Finish().ok());
  engine_->ReleaseDevice();
  ExpectUnharmed();
}

TEST_F(ShardStreamTest, AConnectionCutInMidCallDropsTheCall) {
  Start();
  engine_->HoldDevice();
  {
    // A connection of its own, which closes with its last user.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel =
        grpc::CreateCustomChannel(server_->addresses().front(), grpc::InsecureChannelCredentials(), arguments);
    const auto stub = v1::Compute::NewStub(channel);
    grpc::ClientContext context;
    const auto stream = stub->Backward(&context);
    ASSERT_TRUE(stream->Write(BackwardHeader(100)));
    ASSERT_TRUE(stream->Write(BackwardShard(0, 100)));
    engine_->AwaitBlockedCall();
    context.TryCancel();
    EXPECT_FALSE(stream->Finish().ok());
  }
  engine_->AwaitOpenCalls(0);
  engine_->ReleaseDevice();
  ExpectUnharmed();
}

TEST_F(ShardStreamTest, AClientThatNeverReadsIsHeldAtABoundedNumberOfBytesAndEnded) {
  constexpr int64_t kTileRows = 1024;
  constexpr int64_t kShardBytes = kTileRows * kRowBytes;
  constexpr int64_t kShards = 8192;  // 256 MiB in all
  RpcServerOptions options;
  options.stall_timeout = absl::Milliseconds(200);
  Start({.tile_row_count = kTileRows, .slot_count = 2}, options);
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  ASSERT_TRUE(stream->Write(ForwardHeader(kShards * kTileRows)));
  int64_t sent_bytes = 0;
  v1::ForwardRequest shard = ForwardShard(0, kTileRows);
  for (int64_t i = 0; i < kShards; ++i) {
    shard.mutable_shard()->set_row_offset(i * kTileRows);
    if (!stream->Write(shard)) break;
    sent_bytes += kShardBytes;
  }
  EXPECT_LT(sent_bytes, 64 << 20) << "the server took more than flow control and two tiles can hold";
  EXPECT_EQ(engine_->peak_slots(), 2);
  engine_->AwaitOpenCalls(0);
  for (v1::ForwardResponse response; stream->Read(&response);) continue;
  EXPECT_FALSE(stream->Finish().ok());
  ASSERT_TRUE(server_->AwaitIdle(absl::InfiniteFuture()));
  EXPECT_EQ(Metric("shardmlp_failures_total{reason=\"STALLED\"}"), 1);
  ExpectUnharmed();
}

TEST_F(ShardStreamTest, AClientThatStopsSendingIsEnded) {
  RpcServerOptions options;
  options.stall_timeout = absl::Milliseconds(50);
  Start({}, options);
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  ASSERT_TRUE(stream->Write(ForwardHeader(8)));
  ASSERT_TRUE(stream->Write(ForwardShard(0, 4)));
  for (v1::ForwardResponse response; stream->Read(&response);) continue;
  ExpectStatus(FromGrpcStatus(stream->Finish()), absl::StatusCode::kUnavailable, Reason::kStalled, "neither sent");
  engine_->AwaitOpenCalls(0);
}

TEST_F(ShardStreamTest, ACallThatWaitsForABusyDeviceIsNotStalled) {
  RpcServerOptions options;
  options.stall_timeout = absl::Milliseconds(20);
  Start({}, options);
  engine_->HoldDevice();
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  for (const auto& message : ForwardCall(4, 1)) ASSERT_TRUE(stream->Write(message));
  // Another client stalls for the whole time-out meanwhile, which shows that the time-out has passed.
  grpc::ClientContext other_context;
  const auto other = stub->Forward(&other_context);
  ASSERT_TRUE(other->Write(ForwardHeader(4)));
  for (v1::ForwardResponse response; other->Read(&response);) continue;
  ExpectStatus(FromGrpcStatus(other->Finish()), absl::StatusCode::kUnavailable, Reason::kStalled);
  engine_->ReleaseDevice();
  v1::ForwardResponse response;
  EXPECT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.result().y(), Rows(0, 4));
  while (stream->Read(&response)) continue;
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ShardStreamTest, CallsOfSeveralClientsRunSideBySide) {
  Start({.tile_row_count = 16, .slot_count = 3});
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([this, i] {
      for (int64_t rows = 1; rows < 200; rows += 23 + i) {
        EXPECT_EQ(Forward(ForwardCall(rows, 3)).rows, Rows(0, rows));
        EXPECT_EQ(Backward(BackwardCall(rows, 2)).rows, Rows(0, rows));
      }
    });
  }
  for (std::thread& client : clients) client.join();
  engine_->AwaitOpenCalls(0);
}

}  // namespace
}  // namespace shardmlp
