// Connections: how many there are, what runs over them side by side, and what happens when the other end stands still.
#include "client/cpp/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/pinned_slices.h"
#include "client/cpp/read_tensor.h"
#include "client/cpp/shard_call.h"
#include "proto/wire.h"
#include "shardmlp/v1/compute.pb.h"
#include "tests/client/connected.h"
#include "tests/client/fake_server.h"
#include "tests/client/matrix_data.h"
#include "tests/client/mute_server.h"

namespace shardmlp {
namespace {

using fake::Connected;
using fake::ExpectBackward;
using fake::ExpectForward;
using fake::FakeModel;
using fake::FakeServer;
using fake::MatrixData;
using fake::Moment;

std::set<std::string> Peers(const FakeServer& server) {
  std::set<std::string> peers;
  for (const fake::SeenCall& call : server.calls()) peers.insert(call.peer);
  return peers;
}

TEST(ConnectionTest, CallsTakeDistinctConnectionsInTurn) {
  FakeServer server;
  const Connected trainer(server.target(), {.connections = 3});
  MatrixData x(2, 6, DType::kF32);
  MatrixData y(2, 4, DType::kF32);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(trainer.session->Forward(0, x.view(), y.view()).ok());
  EXPECT_EQ(Peers(server).size(), 3);

  // Another client of this process has its own.
  const Connected other(server.target(), {.connections = 2});
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(other.session->Forward(0, x.view(), y.view()).ok());
  EXPECT_EQ(Peers(server).size(), 5);
}

TEST(ConnectionTest, UnixSocketsWorkLikeAnyOther) {
  fake::FakeServerOptions options{.model = FakeModel()};
  const std::string path = absl::StrCat(testing::TempDir(), "fake.sock");
  options.address = absl::StrCat("unix:", path);
  FakeServer server(options);
  for (const std::string& target : {absl::StrCat("unix:", path), absl::StrCat("unix://", path)}) {
    const Connected trainer(target, {.connections = 2});
    MatrixData x(2000, 1024, DType::kF32);
    MatrixData y(2000, 1024, DType::kF32);
    x.Fill(5);
    for (int i = 0; i < 3; ++i) {
      const auto forwarded = trainer.session->Forward(2, x.view(), y.view());
      ASSERT_TRUE(forwarded.ok()) << forwarded.status();
    }
    ExpectForward(x, y);
  }
}

TEST(ConnectionTest, AnswersAreReadWhileRowsAreSent) {
  // More than all windows and socket buffers hold, and the server answers each shard before it reads the next.
  FakeServer server({.model = FakeModel(), .result_rows = 256});
  const Connected trainer(server.target());
  MatrixData x(16384, 1024, DType::kF32);
  MatrixData y(16384, 1024, DType::kF32);
  ASSERT_TRUE(trainer.session->Forward(2, x.Fill(7).view(), y.view()).ok());
  ExpectForward(x, y);
}

TEST(ConnectionTest, ThreadsShareAClientAndASession) {
  FakeServer server({.model = FakeModel(), .result_rows = 100});
  const Connected trainer(server.target(), {.connections = 2});
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      const int64_t rows = 200 + thread;
      MatrixData x(rows, 6, DType::kBF16, thread % 2);
      MatrixData y(rows, 4, DType::kBF16);
      MatrixData dx(rows, 6, DType::kBF16);
      x.Fill(thread);
      for (int i = 0; i < 20; ++i) {
        const auto forwarded = trainer.session->Forward(0, x.view(), y.view());
        ASSERT_TRUE(forwarded.ok()) << forwarded.status();
        ExpectForward(x, y);
        ASSERT_TRUE(trainer.session->Backward(0, forwarded->weights_version, x.view(), y.view(), dx.view()).ok());
        ExpectBackward(x, y, dx);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Each of 120 invocations had an id of its own.
  constexpr int64_t kRows = 20 * (200 + 201 + 202 + 203 + 204 + 205);
  EXPECT_EQ(trainer.session->pending_row_count(), kRows);
  EXPECT_EQ(server.counted_rows(), kRows);
}

TEST(ConnectionTest, PinnedMemoryIsWaitedForUntilTheLastSliceIsGone) {
  const std::string memory(1000, 'm');
  PinnedSlices pins;
  EXPECT_TRUE(pins.AwaitReleased(absl::ZeroDuration()));
  {
    const grpc::Slice slice = pins.Pin(memory.data(), 1000);
    EXPECT_EQ(slice.begin(), reinterpret_cast<const uint8_t*>(memory.data()));
    EXPECT_FALSE(pins.AwaitReleased(absl::ZeroDuration()));
    const grpc::Slice part = slice.sub(100, 900);
    const std::vector<grpc::Slice> copies(3, slice);
    EXPECT_FALSE(pins.AwaitReleased(absl::ZeroDuration()));
  }
  EXPECT_TRUE(pins.AwaitReleased(absl::ZeroDuration()));

  std::vector<grpc::Slice> held = {pins.Pin(memory.data(), 1000)};
  std::thread transport([&] { held.clear(); });
  EXPECT_TRUE(pins.AwaitReleased());
  transport.join();
}

TEST(ConnectionTest, ACallThatStandsStillFailsAndGivesItsMemoryBack) {
  FakeServer server;
  ClientOptions options;
  options.stall_timeout = absl::Milliseconds(200);
  const Connected trainer(server.target(), options);
  // Shared, since the server's thread may still be in it when the test ends.
  const auto done = std::make_shared<absl::Notification>();
  server.SetHook([done](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method == "Forward" && moment.message == 1) done->WaitForNotification();
    return std::nullopt;
  });
  auto x = std::make_unique<MatrixData>(16384, 1024, DType::kF32);
  MatrixData y(16384, 1024, DType::kF32);
  const absl::Status status = trainer.session->Forward(2, x->view(), y.view()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(status), Reason::kStalled);
  x.reset();  // what still referred to it would be a use after free
  done->Notify();
  EXPECT_EQ(server.Count("Forward"), 1);  // a stall is not retried
}

TEST(ConnectionTest, AReadThatStandsStillInMidStreamFails) {
  FakeServer server;
  ClientOptions options;
  options.stall_timeout = absl::Milliseconds(200);
  const Connected trainer(server.target(), options);
  const std::string name = "model.layers.2.mlp.down_proj.weight";
  const auto done = std::make_shared<absl::Notification>();
  server.SetHook([done](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method == "ReadTensor" && moment.message == 2) done->WaitForNotification();
    return std::nullopt;
  });
  auto bytes = std::make_unique<std::vector<char>>(trainer.client->model().FindTensor(name)->byte_count());
  const absl::Status status = trainer.client->ReadTensor(name, absl::MakeSpan(*bytes)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(status), Reason::kStalled);
  EXPECT_EQ(status.message(), absl::StrCat("ReadTensor of ", name, ": no message went or came for 200ms"));
  EXPECT_EQ((*bytes)[199], static_cast<char>(199));  // two chunks of 100 bytes had come
  bytes.reset();                                     // what still wrote to it would be a use after free
  done->Notify();
  EXPECT_EQ(server.Count("ReadTensor"), 1);  // a stall is not retried
}

// A call that would wait for good, ended from outside.
class InterruptTest : public testing::Test {
 protected:
  InterruptTest() {
    server_.SetHook([stands = stands_, done = done_](const Moment& moment) -> std::optional<grpc::Status> {
      for (const char* method : {"GetModel", "OpenSession", "CloseSession"}) {
        if (moment.method == method) return std::nullopt;
      }
      stands->store(true);
      done->WaitForNotification();
      return std::nullopt;
    });
  }
  ~InterruptTest() override { done_->Notify(); }

  ClientOptions Options() {
    ClientOptions options;
    options.interrupted = [stands = stands_] { return stands->load(); };
    return options;
  }
  static void ExpectInterrupted(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
    EXPECT_EQ(ReasonOf(status), Reason::kCancelled);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("interrupted"));
  }

  // Shared, since the server's threads may still be in them when the test ends.
  const std::shared_ptr<std::atomic<bool>> stands_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<absl::Notification> done_ = std::make_shared<absl::Notification>();
  FakeServer server_;
};

TEST_F(InterruptTest, Forward) {
  const Connected trainer(server_.target(), Options());
  auto x = std::make_unique<MatrixData>(16384, 1024, DType::kF32);
  MatrixData y(16384, 1024, DType::kF32);
  ExpectInterrupted(trainer.session->Forward(2, x->view(), y.view()).status());
  x.reset();  // what still referred to it would be a use after free
  EXPECT_EQ(server_.Count("Forward"), 1);
}

TEST_F(InterruptTest, CallsOfOneMessage) {
  const Connected trainer(server_.target(), Options());
  ExpectInterrupted(trainer.session->SealStep().status());
  ExpectInterrupted(trainer.client->SaveCheckpoint("name").status());
  EXPECT_EQ(server_.Count("SealStep"), 1);
}

TEST_F(InterruptTest, ReadTensor) {
  const Connected trainer(server_.target(), Options());
  const std::string name = "model.layers.2.mlp.down_proj.weight";
  std::vector<char> bytes(trainer.client->model().FindTensor(name)->byte_count());
  ExpectInterrupted(trainer.client->ReadTensor(name, absl::MakeSpan(bytes)).status());
}

TEST_F(InterruptTest, TheBackOffBetweenTries) {
  ClientOptions options = Options();
  options.retry = {.budget = absl::Hours(9), .initial_backoff = absl::Hours(1), .max_backoff = absl::Hours(1)};
  const Connected trainer(server_.target(), options);
  server_.SetHook([stands = stands_](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "SealStep") return std::nullopt;
    stands->store(true);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  ExpectInterrupted(trainer.session->SealStep().status());
  EXPECT_EQ(server_.Count("SealStep"), 1);
}

// The kernel takes 10 seconds to give up on TCP; a Unix socket is cut by the client.
class MuteServerTest : public testing::TestWithParam<bool> {};

TEST_P(MuteServerTest, NothingOfTheCallersMemoryIsSentAfterACallReturned) {
  const std::string path = GetParam() ? absl::StrCat(testing::TempDir(), "mute.sock") : std::string();
  fake::MuteServer server(path);
  Connections connections(server.target(), {});
  const auto connection = connections.Next();
  ASSERT_TRUE(connection.ok()) << connection.status();

  constexpr int64_t kRows = 32768;
  constexpr char kBefore = 0x11;
  constexpr char kAfter = static_cast<char>(0xee);
  std::vector<float> x(kRows * 1024);
  std::vector<float> y(kRows * 1024);
  const auto fill = [&](char byte) { std::fill_n(reinterpret_cast<char*>(x.data()), x.size() * sizeof(float), byte); };
  fill(kBefore);
  v1::ForwardRequest header;
  header.mutable_header()->set_row_count(kRows);
  v1::ForwardRequest end;
  end.mutable_end()->set_row_count(kRows);
  const ShardCall call{.method = "/shardmlp.v1.Compute/Forward",
                       .header = MakeWireMessage(header),
                       .end = MakeWireMessage(end),
                       .inputs = {ConstMatrixView(x.data(), kRows, 1024, DType::kF32)},
                       .output = MatrixView(y.data(), kRows, 1024, DType::kF32),
                       .rows_per_shard = 256};
  const auto answer = RunShardCall(**connection, call, {.stall_timeout = absl::Seconds(1)});
  EXPECT_FALSE(answer.ok());
  fill(kAfter);
  const std::string sent = server.Drain();
  EXPECT_GT(std::count(sent.begin(), sent.end(), kBefore), 100000);
  // Frame headers may hold the byte by chance.
  EXPECT_LT(std::count(sent.begin(), sent.end(), kAfter), 1000);
}

TEST_P(MuteServerTest, AReadFails) {
  fake::MuteServer server(GetParam() ? absl::StrCat(testing::TempDir(), "mute.sock") : std::string());
  Connections connections(server.target(), {.stall_timeout = absl::Milliseconds(200)});
  std::vector<char> bytes(1000);
  const absl::Status status = ReadTensorOnce(connections, "down_proj.weight", absl::MakeSpan(bytes)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(ReasonOf(status), Reason::kStalled);
}

INSTANTIATE_TEST_SUITE_P(Sockets, MuteServerTest, testing::Bool(),
                         [](const auto& info) { return info.param ? std::string("Unix") : std::string("Tcp"); });

}  // namespace
}  // namespace shardmlp
