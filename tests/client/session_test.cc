// Sessions: leases, steps and the position that calls quote.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "tests/client/connected.h"
#include "tests/client/fake_server.h"
#include "tests/client/matrix_data.h"

namespace shardmlp {
namespace {

using fake::FakeModel;
using fake::FakeServer;
using fake::MatrixData;
using fake::Moment;
using testing::HasSubstr;

class SessionTest : public testing::Test {
 protected:
  void Open(absl::Duration lease = absl::Hours(1)) {
    server_ = std::make_unique<FakeServer>(fake::FakeServerOptions{.model = FakeModel(), .lease = lease});
    fake::Connected connected(server_->target(), {}, {.run_id = "run"});
    client_ = std::move(connected.client);
    session_ = std::move(connected.session);
  }
  absl::Status Backward(int layer, int64_t rows, bool weight_gradient = true) {
    const ClientLayer& info = *client_->model().FindLayer(layer);
    MatrixData x(rows, info.hidden_size, DType::kF32);
    MatrixData dy(rows, info.output_size, DType::kF32);
    MatrixData dx(rows, info.hidden_size, DType::kF32);
    return session_->Backward(layer, 11, x.view(), dy.view(), dx.view(), {.weight_gradient = weight_gradient});
  }

  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Session> session_;
};

TEST_F(SessionTest, TheLeaseIsRenewedUntilTheSessionEnds) {
  Open(absl::Milliseconds(60));
  server_->AwaitCount("RenewSession", 5);
  session_.reset();
  EXPECT_EQ(server_->Count("CloseSession"), 1);
}

TEST_F(SessionTest, ClosingDoesNotWaitForTheNextRenewal) {
  Open(absl::Hours(1000));  // a renewal every two weeks
  EXPECT_TRUE(session_->Close().ok());
  EXPECT_TRUE(session_->Close().ok());
  session_.reset();
  EXPECT_EQ(server_->Count("CloseSession"), 1);
}

TEST_F(SessionTest, ClosingWorksWhileARenewalIsOnItsWay) {
  Open(absl::Seconds(3));
  // Shared, since the server's thread may still be in them when the test ends.
  const auto renewing = std::make_shared<absl::Notification>();
  const auto closed = std::make_shared<absl::Notification>();
  server_->SetHook([=](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "RenewSession" || moment.try_number > 0) return std::nullopt;
    renewing->Notify();
    closed->WaitForNotification();
    return std::nullopt;
  });
  renewing->WaitForNotification();
  EXPECT_TRUE(session_->Close().ok());
  closed->Notify();
}

TEST_F(SessionTest, RenewalsGoOnAfterFailures) {
  Open(absl::Milliseconds(60));
  server_->SetHook([](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "RenewSession" || moment.try_number % 2 == 0) return std::nullopt;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  server_->AwaitCount("RenewSession", 8);
}

TEST_F(SessionTest, AStepIsSealedWithTheRowsOfEachLayer) {
  Open();
  ASSERT_TRUE(Backward(0, 5).ok());
  ASSERT_TRUE(Backward(1, 7).ok());
  ASSERT_TRUE(Backward(0, 3).ok());
  ASSERT_TRUE(Backward(1, 100, /*weight_gradient=*/false).ok());
  EXPECT_EQ(session_->pending_row_count(), 15);

  const auto sealed = session_->SealStep();
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_THAT(sealed->tensor_sums_of_squares, testing::ElementsAre(0.5, 1.5, 2.5));
  EXPECT_TRUE(sealed->finite);
  const v1::SealStepRequest seal = server_->last_seal();
  EXPECT_EQ(seal.step(), 3);
  EXPECT_EQ(seal.attempt(), 5);
  ASSERT_EQ(seal.layers_size(), 2);
  EXPECT_EQ(seal.layers(0).layer(), 0);
  EXPECT_EQ(seal.layers(0).row_count(), 8);
  EXPECT_EQ(seal.layers(1).layer(), 1);
  EXPECT_EQ(seal.layers(1).row_count(), 7);
}

TEST_F(SessionTest, ACommitCarriesTheHyperparametersAndMovesOn) {
  Open();
  ASSERT_TRUE(Backward(0, 5).ok());
  const AdamW adamw{.learning_rate = 1e-3, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-7, .weight_decay = 0.2};
  const Sgd sgd{.learning_rate = 0.5, .momentum = 0.9, .dampening = 0, .weight_decay = 0.3, .nesterov = true};
  const auto committed = session_->CommitStep(
      {.groups = {{{"a", "b"}, adamw}, {{"c"}, sgd}, {{"d"}, KeepFrozen{}}}, .gradient_scale = 0.25});
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(*committed, (ClientPosition{.step = 4, .attempt = 5, .weights_version = 12}));
  EXPECT_EQ(session_->position(), *committed);
  EXPECT_EQ(session_->pending_row_count(), 0);

  const v1::CommitStepRequest commit = server_->last_commit();
  EXPECT_EQ(commit.session_id(), session_->id());
  EXPECT_EQ(commit.step(), 3);
  EXPECT_EQ(commit.attempt(), 5);
  EXPECT_EQ(commit.gradient_scale(), 0.25);
  ASSERT_EQ(commit.groups_size(), 3);
  EXPECT_THAT(commit.groups(0).tensors(), testing::ElementsAre("a", "b"));
  EXPECT_EQ(commit.groups(0).adamw().learning_rate(), 1e-3);
  EXPECT_EQ(commit.groups(0).adamw().beta1(), 0.8);
  EXPECT_EQ(commit.groups(0).adamw().beta2(), 0.95);
  EXPECT_EQ(commit.groups(0).adamw().epsilon(), 1e-7);
  EXPECT_EQ(commit.groups(0).adamw().weight_decay(), 0.2);
  EXPECT_EQ(commit.groups(1).sgd().learning_rate(), 0.5);
  EXPECT_EQ(commit.groups(1).sgd().momentum(), 0.9);
  EXPECT_EQ(commit.groups(1).sgd().weight_decay(), 0.3);
  EXPECT_TRUE(commit.groups(1).sgd().nesterov());
  EXPECT_TRUE(commit.groups(2).has_keep_frozen());
}

TEST_F(SessionTest, AnAttemptThatEndedIsNoticedAndDiscardMovesOn) {
  Open();
  ASSERT_TRUE(Backward(0, 5).ok());
  server_->RaiseAttempt();  // another trainer was lost
  // Not even a renewal slips past it.
  const absl::Status sealed = session_->SealStep().status();
  EXPECT_EQ(sealed.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(sealed), Reason::kStepAborted);
  EXPECT_EQ(session_->position().attempt, 5);

  const auto discarded = session_->DiscardStep("the attempt ended");
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  EXPECT_EQ(*discarded, (ClientPosition{.step = 3, .attempt = 6, .weights_version = 11}));
  EXPECT_EQ(session_->pending_row_count(), 0);
  EXPECT_TRUE(session_->SealStep().ok());
}

TEST_F(SessionTest, DiscardDropsWhatWasSent) {
  Open();
  ASSERT_TRUE(Backward(0, 5).ok());
  const auto discarded = session_->DiscardStep(std::string(1000, 'r'));
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  EXPECT_EQ(discarded->attempt, 6);
  EXPECT_EQ(session_->pending_row_count(), 0);
  EXPECT_EQ(server_->counted_rows(), 0);
}

TEST_F(SessionTest, ResyncFollowsARestore) {
  Open();
  ASSERT_TRUE(client_->SaveCheckpoint("before").ok());
  ASSERT_TRUE(session_->CommitStep({}).ok());
  ASSERT_TRUE(Backward(0, 5).ok());
  const auto restored = client_->RestoreCheckpoint("before");
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(*restored, (ClientPosition{.step = 3, .attempt = 6, .weights_version = 13}));
  const auto resynced = session_->Resync();
  ASSERT_TRUE(resynced.ok()) << resynced.status();
  EXPECT_EQ(*resynced, *restored);
  EXPECT_EQ(session_->position(), *restored);
  EXPECT_EQ(session_->pending_row_count(), 0);
}

TEST_F(SessionTest, ASessionThatTheServerForgotIsReportedAtOnce) {
  Open();
  server_->SetHook([](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method == "CloseSession") return std::nullopt;
    return fake::Refuse(absl::StatusCode::kNotFound, Reason::kUnknownSession, "no such session");
  });
  EXPECT_EQ(ReasonOf(Backward(0, 5)), Reason::kUnknownSession);
  EXPECT_EQ(ReasonOf(session_->SealStep().status()), Reason::kUnknownSession);
  EXPECT_EQ(ReasonOf(session_->CommitStep({}).status()), Reason::kUnknownSession);
  EXPECT_EQ(ReasonOf(session_->DiscardStep("").status()), Reason::kUnknownSession);
  EXPECT_EQ(server_->Count("Backward"), 1);
  EXPECT_EQ(server_->Count("SealStep"), 1);
}

TEST_F(SessionTest, ACommitWhoseAnswerDiedWithTheServerIsAskedForAgainInANewSession) {
  Open();
  const ClientPosition lost = session_->position();
  server_->SetHook([](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "CommitStep" || moment.try_number != 1) return std::nullopt;
    return fake::Refuse(absl::StatusCode::kNotFound, Reason::kUnknownSession, "no such session");
  });
  const CommitOptions commit{.gradient_scale = 0.25};
  ASSERT_TRUE(session_->CommitStep(commit).ok());  // and say that its answer did not come
  session_->TakeUp(lost);
  EXPECT_EQ(ReasonOf(session_->CommitStep(commit).status()), Reason::kUnknownSession);

  const std::unique_ptr<Session> next = *client_->OpenSession({.run_id = "run"});
  EXPECT_EQ(next->position().step, lost.step + 1);
  next->TakeUp(lost);
  const auto again = next->CommitStep(commit);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(server_->last_commit().step(), lost.step);
  EXPECT_EQ(*again, (ClientPosition{.step = 4, .attempt = 5, .weights_version = 12})) << "and not a second step";
  EXPECT_EQ(next->position(), *again);
}

class UnansweredSealTest : public SessionTest {
 protected:
  // What comes of a seal that a server of `model` does not answer.
  absl::Status SealIn50Milliseconds(const v1::GetModelResponse& model) {
    server_ = std::make_unique<FakeServer>(fake::FakeServerOptions{.model = model});
    ClientOptions options;
    options.seal_timeout = absl::Milliseconds(50);
    client_ = *Client::Connect(server_->target(), options);
    session_ = *client_->OpenSession({});
    const auto done = std::make_shared<absl::Notification>();
    server_->SetHook([done](const Moment& moment) -> std::optional<grpc::Status> {
      if (moment.method == "SealStep") done->WaitForNotification();
      return std::nullopt;
    });
    const absl::Status status = session_->SealStep().status();
    done->Notify();
    return status;
  }
};

TEST_F(UnansweredSealTest, FailsInTime) {
  const absl::Status status = SealIn50Milliseconds(FakeModel());
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(status), Reason::kStalled);
  EXPECT_THAT(std::string(status.message()), HasSubstr("SealStep: no answer from"));
}

TEST_F(UnansweredSealTest, NamesWhoIsMissing) {
  v1::GetModelResponse model = FakeModel();
  for (const int rank : {0, 2}) {
    v1::TrainerInfo& trainer = *model.add_trainers();
    trainer.set_trainer_rank(rank);
    trainer.set_trainer_count(4);
    trainer.set_sealed(rank == 0);
  }
  const absl::Status status = SealIn50Milliseconds(model);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), Reason::kTrainerMissing);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("within 50ms; missing: rank 1 (not connected), rank 2, rank 3 (not connected)"));
  EXPECT_EQ(server_->Count("SealStep"), 1);
}

TEST_F(SessionTest, AnOpeningThatWasInterruptedIsClosed) {
  server_ = std::make_unique<FakeServer>();
  std::atomic<bool> interrupted = false;
  ClientOptions options;
  options.interrupted = [&] { return interrupted.load(); };
  client_ = *Client::Connect(server_->target(), options);
  const auto done = std::make_shared<absl::Notification>();
  server_->SetHook([&, done](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method == "OpenSession" && !interrupted.exchange(true)) done->WaitForNotification();
    return std::nullopt;
  });
  EXPECT_EQ(ReasonOf(client_->OpenSession({}).status()), Reason::kCancelled);
  EXPECT_EQ(server_->Count("OpenSession"), 2);
  EXPECT_EQ(server_->Count("CloseSession"), 1);
  done->Notify();
}

TEST_F(SessionTest, ADeletionWhoseAnswerWasLostIsDone) {
  Open();
  ASSERT_TRUE(client_->SaveCheckpoint("a").ok());
  ASSERT_TRUE(client_->SaveCheckpoint("b").ok());
  EXPECT_EQ(client_->DeleteCheckpoint("a")->byte_count, 4096);
  EXPECT_EQ(ReasonOf(client_->DeleteCheckpoint("a").status()), Reason::kUnknownCheckpoint);
  // The first try does its work; then its connection is cut.
  std::atomic<int> tries = 0;
  server_->SetHook([&](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "DeleteCheckpoint") return std::nullopt;
    ++tries;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
  });
  const auto deleted = client_->DeleteCheckpoint("b");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->name, "b");
  EXPECT_EQ(tries, 1) << "the next found none";
}

TEST_F(SessionTest, TheModelAndItsCheckpointsAreReported) {
  Open();
  const ServedModel& model = client_->model();
  EXPECT_EQ(model.model_type, "llama");
  ASSERT_EQ(model.layers.size(), 3);
  EXPECT_EQ(model.FindLayer(0)->hidden_size, 6);
  EXPECT_EQ(model.FindLayer(0)->output_size, 4);
  EXPECT_EQ(model.FindLayer(3), nullptr);
  EXPECT_EQ(model.FindTensor("model.layers.0.mlp.down_proj.weight")->byte_count(), 4 * 7 * 2);
  EXPECT_EQ(model.memory.weights_bytes, 1234);
  EXPECT_EQ(model.position, (ClientPosition{.step = 3, .attempt = 5, .weights_version = 11}));
  EXPECT_EQ(model.tensors[0].checksum, 0);
  EXPECT_EQ(client_->GetModel(/*checksums=*/true)->tensors[0].checksum, ~uint64_t{0});

  std::vector<char> bytes(10);
  EXPECT_EQ(ReasonOf(client_->ReadTensor("none", absl::MakeSpan(bytes)).status()), Reason::kUnknownTensor);
  EXPECT_EQ(ReasonOf(client_->ReadTensor(model.tensors[0].name, absl::MakeSpan(bytes)).status()),
            Reason::kInvalidShape);

  ASSERT_TRUE(client_->SaveCheckpoint("a").ok());
  const auto saved = client_->SaveCheckpoint("b");
  ASSERT_TRUE(saved.ok());
  EXPECT_EQ(saved->name, "b");
  EXPECT_EQ(saved->step, 3);
  EXPECT_EQ(saved->byte_count, 4096);
  const auto listed = client_->ListCheckpoints();
  ASSERT_TRUE(listed.ok());
  ASSERT_EQ(listed->size(), 2);
  EXPECT_EQ(listed->front().name, "a");
  EXPECT_EQ(ReasonOf(client_->RestoreCheckpoint("c").status()), Reason::kUnknownCheckpoint);
}

}  // namespace
}  // namespace shardmlp
