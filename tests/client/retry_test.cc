// Calls that fail: which are sent again, how often, and what is said in the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "tests/client/connected.h"
#include "tests/client/fake_server.h"
#include "tests/client/matrix_data.h"

namespace shardmlp {
namespace {

using fake::Connected;
using fake::ExpectBackward;
using fake::ExpectForward;
using fake::FakeModel;
using fake::FakeServer;
using fake::MatrixData;
using fake::Moment;
using fake::Refuse;
using testing::HasSubstr;

constexpr int64_t kRows = 8;
constexpr int64_t kHidden = 6;  // of layer 0
constexpr int64_t kOutput = 4;

// A trainer with two shards a call, whose retries don't dawdle.
struct Trainer : Connected {
  explicit Trainer(const std::string& target, absl::Duration budget = absl::Seconds(60))
      : Connected(target, {.retry = {.budget = budget,
                                     .initial_backoff = absl::Milliseconds(1),
                                     .max_backoff = absl::Milliseconds(4)}}) {
    x.Fill(1);
    dy.Fill(2);
  }
  absl::Status Forward() { return session->Forward(0, x.view(), y.view()).status(); }
  absl::Status Backward() { return session->Backward(0, 11, x.view(), dy.view(), dx.view()); }

  MatrixData x{kRows, kHidden, DType::kF32};
  MatrixData y{kRows, kOutput, DType::kF32};
  MatrixData dy{kRows, kOutput, DType::kF32};
  MatrixData dx{kRows, kHidden, DType::kF32};
};

fake::FakeServerOptions TwoShards() {
  fake::FakeServerOptions options{.model = FakeModel(), .result_rows = 2};
  options.model.mutable_limits()->set_tile_row_count(0);
  options.model.mutable_limits()->set_preferred_shard_bytes(4 * (kHidden + kOutput) * 4);
  return options;
}

enum class Cut { kClosed, kUnavailable, kReset };

// Ends the call at `method`'s `message`-th message, the first time it gets there.
fake::Hook CutAt(std::string method, int message, Cut cut) {
  return [=](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != method || moment.message != message || moment.try_number > 0) return std::nullopt;
    if (cut == Cut::kReset) moment.context->TryCancel();
    if (cut == Cut::kUnavailable) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    return grpc::Status::OK;
  };
}

class CutTest : public testing::TestWithParam<std::tuple<std::string, int, Cut>> {};

TEST_P(CutTest, BackwardIsSentAgainUnderTheSameIdAndCountedOnce) {
  const auto [method, message, cut] = GetParam();
  FakeServer server(TwoShards());
  Trainer trainer(server.target());
  server.SetHook(CutAt("Backward" + method, message, cut));
  ASSERT_TRUE(trainer.Backward().ok());
  ExpectBackward(trainer.x, trainer.dy, trainer.dx);

  const std::vector<fake::SeenCall> calls = server.calls();
  EXPECT_EQ(server.Count("Backward"), 2);
  for (const fake::SeenCall& call : calls) EXPECT_EQ(call.backward.call_id(), calls.front().backward.call_id());
  EXPECT_EQ(server.counted_rows(), kRows);
  EXPECT_EQ(trainer.session->pending_row_count(), kRows);
  // The next invocation has another id.
  ASSERT_TRUE(trainer.Backward().ok());
  EXPECT_NE(server.calls().back().backward.call_id(), calls.front().backward.call_id());
}

TEST_P(CutTest, ForwardIsSentAgain) {
  const auto [method, message, cut] = GetParam();
  FakeServer server(TwoShards());
  Trainer trainer(server.target());
  server.SetHook(CutAt("Forward" + method, message, cut));
  ASSERT_TRUE(trainer.Forward().ok());
  ExpectForward(trainer.x, trainer.y);
  EXPECT_EQ(server.Count("Forward"), 2);
}

// Read: the header, two shards, the end. Written: four results, and the end.
INSTANTIATE_TEST_SUITE_P(Read, CutTest,
                         testing::Combine(testing::Values(""), testing::Values(0, 1, 2),
                                          testing::Values(Cut::kClosed, Cut::kUnavailable, Cut::kReset)));
INSTANTIATE_TEST_SUITE_P(Written, CutTest,
                         testing::Combine(testing::Values("Answer"), testing::Values(0, 1, 2, 3, 4),
                                          testing::Values(Cut::kClosed, Cut::kUnavailable, Cut::kReset)));

class StepCutTest : public testing::TestWithParam<std::string> {};

TEST_P(StepCutTest, StepsAreSentAgain) {
  FakeServer server(TwoShards());
  Trainer trainer(server.target());
  server.SetHook(CutAt(GetParam(), 0, Cut::kUnavailable));
  ASSERT_TRUE(trainer.Backward().ok());
  ASSERT_TRUE(trainer.session->SealStep().ok());
  const auto committed = trainer.session->CommitStep({});
  ASSERT_TRUE(committed.ok());
  EXPECT_EQ(*committed, (ClientPosition{.step = 4, .attempt = 5, .weights_version = 12}));
  const auto discarded = trainer.session->DiscardStep("test");
  ASSERT_TRUE(discarded.ok());
  EXPECT_EQ(*discarded, (ClientPosition{.step = 4, .attempt = 6, .weights_version = 12}));
  EXPECT_EQ(server.Count(GetParam()), 2);
}
INSTANTIATE_TEST_SUITE_P(Methods, StepCutTest, testing::Values("SealStep", "CommitStep", "DiscardStep"));

struct Refusal {
  absl::StatusCode code;
  Reason reason;
  bool sent_again;
};

class RefusalTest : public testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, IsTakenAsItsCodeAndReasonSay) {
  const Refusal& refusal = GetParam();
  FakeServer server(TwoShards());
  Trainer trainer(server.target());
  server.SetHook([&](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Backward" || moment.try_number > 0) return std::nullopt;
    return Refuse(refusal.code, refusal.reason, "this is why");
  });
  const absl::Status status = trainer.Backward();
  if (refusal.sent_again) {
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(server.Count("Backward"), 2);
    return;
  }
  EXPECT_EQ(status.code(), refusal.code);
  EXPECT_EQ(ReasonOf(status), refusal.reason);
  EXPECT_EQ(status.message(), "Backward of layer 0: this is why");
  EXPECT_EQ(server.Count("Backward"), 1);
  EXPECT_EQ(trainer.session->pending_row_count(), 0);
}

INSTANTIATE_TEST_SUITE_P(Codes, RefusalTest,
                         testing::Values(Refusal{absl::StatusCode::kInvalidArgument, Reason::kInvalidRows, false},
                                         Refusal{absl::StatusCode::kNotFound, Reason::kUnknownSession, false},
                                         Refusal{absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights, false},
                                         Refusal{absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
                                                 false},
                                         Refusal{absl::StatusCode::kAborted, Reason::kStepAborted, false},
                                         Refusal{absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt, false},
                                         Refusal{absl::StatusCode::kInternal, Reason::kDeviceFailed, false},
                                         Refusal{absl::StatusCode::kUnimplemented, Reason::kUnspecified, false},
                                         Refusal{absl::StatusCode::kCancelled, Reason::kCancelled, false},
                                         Refusal{absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory, false},
                                         Refusal{absl::StatusCode::kResourceExhausted, Reason::kStorageFull, false},
                                         Refusal{absl::StatusCode::kUnavailable, Reason::kTrainerMissing, false},
                                         Refusal{absl::StatusCode::kResourceExhausted, Reason::kOverloaded, true},
                                         Refusal{absl::StatusCode::kUnavailable, Reason::kWeightsChanged, true},
                                         Refusal{absl::StatusCode::kUnavailable, Reason::kDraining, true},
                                         Refusal{absl::StatusCode::kUnavailable, Reason::kUnspecified, true}));

TEST(RetryTest, TheBudgetIsBoundedAndTheErrorSaysWhatWasTried) {
  FakeServer server(TwoShards());
  Trainer trainer(server.target(), absl::Milliseconds(50));
  server.SetHook([](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Forward") return std::nullopt;
    return Refuse(absl::StatusCode::kResourceExhausted, Reason::kOverloaded, "8 calls are open");
  });
  const absl::Status status = trainer.Forward();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), Reason::kUnreachable);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("Forward of layer 0"));
  EXPECT_THAT(message, HasSubstr(server.target()));
  EXPECT_THAT(message, HasSubstr("8 calls are open"));
  EXPECT_THAT(message, HasSubstr(absl::StrCat("after ", server.Count("Forward"), " tries")));
  // Back-offs are at most 4 ms and at least half of that, so 50 ms allow 12 to 25 of them, and the first two.
  EXPECT_GE(server.Count("Forward"), 2);
  EXPECT_LE(server.Count("Forward"), 30);
}

TEST(RetryTest, WithoutABudgetThereIsOneTry) {
  FakeServer server(TwoShards());
  Trainer trainer(server.target(), absl::ZeroDuration());
  server.SetHook(CutAt("Forward", 0, Cut::kUnavailable));
  EXPECT_THAT(std::string(trainer.Forward().message()), HasSubstr("after 1 try"));
  EXPECT_EQ(server.Count("Forward"), 1);
}

TEST(RetryTest, AServerThatIsAbandonedIsNotWaitedFor) {
  auto server = std::make_unique<FakeServer>(TwoShards());
  int asked = 0;
  Connected trainer(server->target(), {.abandoned = [&asked] { return ++asked == 3; }});
  server.reset();
  const absl::Status status = trainer.session->SealStep().status();
  EXPECT_EQ(ReasonOf(status), Reason::kUnreachable) << status;
  EXPECT_THAT(status.message(), HasSubstr("after 3 tries"));
  EXPECT_EQ(asked, 3);
}

TEST(RetryTest, AServerThatComesBackIsFoundAgain) {
  for (const std::string& address :
       {std::string("127.0.0.1:0"), absl::StrCat("unix:", testing::TempDir(), "back.sock")}) {
    fake::FakeServerOptions options = TwoShards();
    options.address = address;
    FakeServer server(options);
    Trainer trainer(server.target());
    // Every connection is lost in the middle of a call.
    absl::Notification reached;
    server.SetHook([&](const Moment& moment) -> std::optional<grpc::Status> {
      if (moment.method == "Backward" && moment.try_number == 0 && moment.message == 1) reached.Notify();
      return std::nullopt;
    });
    std::thread operations([&] {
      reached.WaitForNotification();
      server.Stop();
      server.Start();
    });
    ASSERT_TRUE(trainer.Backward().ok());
    ExpectBackward(trainer.x, trainer.dy, trainer.dx);
    operations.join();
    ASSERT_TRUE(trainer.Forward().ok());
  }
}

TEST(RetryTest, AServerThatIsNotThereIsNamed) {
  const std::string nowhere = absl::StrCat("unix:", testing::TempDir(), "nowhere.sock");
  for (const std::string& target : {nowhere, std::string("127.0.0.1:1")}) {
    ClientOptions options;
    options.connect_timeout = absl::Milliseconds(100);
    const auto client = Client::Connect(target, options);
    ASSERT_FALSE(client.ok());
    EXPECT_EQ(ReasonOf(client.status()), Reason::kUnreachable);
    EXPECT_THAT(std::string(client.status().message()), HasSubstr(target));
  }
  EXPECT_EQ(Client::Connect("").status().code(), absl::StatusCode::kInvalidArgument);
  const std::string long_path = "unix:/" + std::string(200, 'a');
  EXPECT_EQ(Client::Connect(long_path).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RetryTest, AReadThatIsCutStartsOver) {
  FakeServer server;
  Trainer trainer(server.target());
  const std::string name = "model.layers.2.mlp.down_proj.weight";
  const ClientTensor* tensor = trainer.client->model().FindTensor(name);
  ASSERT_NE(tensor, nullptr);
  server.SetHook(CutAt("ReadTensor", 3, Cut::kClosed));
  std::vector<char> bytes(tensor->byte_count());
  ASSERT_TRUE(trainer.client->ReadTensor(name, absl::MakeSpan(bytes)).ok());
  for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], static_cast<char>(i % 251));
  EXPECT_EQ(server.Count("ReadTensor"), 2);
}

}  // namespace
}  // namespace shardmlp
