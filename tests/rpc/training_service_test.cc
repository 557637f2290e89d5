// Sessions and steps over gRPC: every field reaches the engine, every answer and every reason comes back.
#include <thread>

#include "absl/synchronization/notification.h"
#include "shardmlp/v1/training.grpc.pb.h"
#include "tests/rpc/service_test.h"

namespace shardmlp {
namespace {

using Stub = v1::Training::Stub;
using testing::_;
using testing::ElementsAre;
using testing::HasSubstr;

class TrainingServiceTest : public ServiceTest<v1::Training> {};

constexpr StepPosition kPosition = {.step = 3, .attempt = 1, .weights_version = 7};

void ExpectPosition(const v1::StepPosition& position) {
  EXPECT_EQ(position.step(), 3);
  EXPECT_EQ(position.attempt(), 1);
  EXPECT_EQ(position.weights_version(), 7);
}

TEST_F(TrainingServiceTest, OpenSessionCarriesTheRunAndGivesTheLease) {
  EXPECT_CALL(engine_, OpenSession(_)).WillOnce([](const SessionSpec& spec) {
    EXPECT_EQ(spec.run_id, "run");
    EXPECT_EQ(spec.role, SessionRole::kTrain);
    EXPECT_EQ(spec.trainer_count, 4);
    EXPECT_EQ(spec.trainer_rank, 2);
    return SessionGrant{
        .session_id = 99, .lease = absl::Milliseconds(1500), .position = kPosition, .run_under_way = true};
  });
  v1::OpenSessionRequest request;
  request.set_run_id("run");
  request.set_role(v1::SESSION_ROLE_TRAIN);
  request.set_trainer_count(4);
  request.set_trainer_rank(2);
  v1::OpenSessionResponse response;
  ASSERT_TRUE(Call(&Stub::OpenSession, request, response).ok());
  EXPECT_EQ(response.session_id(), 99);
  EXPECT_EQ(response.lease().seconds(), 1);
  EXPECT_EQ(response.lease().nanos(), 500000000);
  EXPECT_TRUE(response.run_under_way());
  ExpectPosition(response.position());
}

TEST_F(TrainingServiceTest, ARoleThatIsNoneIsRefusedAheadOfTheEngine) {
  v1::OpenSessionResponse response;
  const absl::Status status = Call(&Stub::OpenSession, v1::OpenSessionRequest(), response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), Reason::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("role is 0"));
}

TEST_F(TrainingServiceTest, AFailureBringsItsReasonMessageAndMetadata) {
  EXPECT_CALL(engine_, RenewSession(5))
      .WillOnce(testing::Return(Error(absl::StatusCode::kNotFound, Reason::kUnknownSession, "no session 5",
                                      {{"session", "5"}, {"lease", "30s"}})));
  v1::RenewSessionRequest request;
  request.set_session_id(5);
  v1::RenewSessionResponse response;
  const absl::Status status = Call(&Stub::RenewSession, request, response);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), Reason::kUnknownSession);
  EXPECT_EQ(status.message(), "no session 5");
  EXPECT_THAT(MetadataOf(status),
              testing::UnorderedElementsAre(std::make_pair("session", "5"), std::make_pair("lease", "30s")));
}

TEST_F(TrainingServiceTest, SealStepAnswersWhenTheEngineDoes) {
  std::thread answering;
  EXPECT_CALL(engine_, SealStep(_, _)).WillOnce([&](const SealSpec& spec, Done<SealResult> done) {
    EXPECT_EQ(spec.session_id, 99);
    EXPECT_EQ(spec.step, 3);
    EXPECT_EQ(spec.attempt, 1);
    EXPECT_EQ(spec.rows, (LayerRows{{0, 100}, {5, 0}}));
    answering = std::thread([done = std::move(done)]() mutable {
      done(SealResult{.tensor_sums_of_squares = {1.5, 0.25},
                      .finite = false,
                      .non_finite_origin = "rank 0, layer 5, row 7",
                      .rows = {{0, 300}}});
    });
  });
  v1::SealStepRequest request;
  request.set_session_id(99);
  request.set_step(3);
  request.set_attempt(1);
  request.add_layers()->set_row_count(100);
  request.add_layers()->set_layer(5);
  v1::SealStepResponse response;
  ASSERT_TRUE(Call(&Stub::SealStep, request, response).ok());
  answering.join();
  EXPECT_THAT(response.tensor_sums_of_squares(), ElementsAre(1.5, 0.25));
  EXPECT_FALSE(response.finite());
  EXPECT_EQ(response.non_finite_origin(), "rank 0, layer 5, row 7");
  ASSERT_EQ(response.layers_size(), 1);
  EXPECT_EQ(response.layers(0).row_count(), 300);
}

TEST_F(TrainingServiceTest, ACancelledSealLetsGoThoughTheEngineHasNotAnswered) {
  absl::Notification sealing;
  Done<SealResult> done;
  EXPECT_CALL(engine_, SealStep(_, _)).WillOnce([&](const SealSpec&, Done<SealResult> given) {
    done = std::move(given);
    sealing.Notify();
  });
  grpc::ClientContext context;
  std::thread canceller([&] {
    sealing.WaitForNotification();
    context.TryCancel();
  });
  v1::SealStepResponse response;
  EXPECT_EQ(stub_->SealStep(&context, v1::SealStepRequest(), &response).error_code(), grpc::StatusCode::CANCELLED);
  canceller.join();
  server_->Shutdown(absl::UnavailableError("going down"), absl::InfiniteFuture());  // waits for every rpc's end
  EXPECT_THAT(metrics_.Text(), HasSubstr("grpc_server_handled_total{grpc_code=\"Canceled\",grpc_method=\"SealStep\","
                                         "grpc_service=\"shardmlp.v1.Training\",grpc_type=\"unary\"} 1\n"));
  done(SealResult{});  // too late, and no matter
}

TEST_F(TrainingServiceTest, ALayerNamedTwiceInASealIsRefused) {
  v1::SealStepRequest request;
  request.add_layers()->set_layer(5);
  request.add_layers()->set_layer(5);
  v1::SealStepResponse response;
  const absl::Status status = Call(&Stub::SealStep, request, response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 5 is named twice"));
}

TEST_F(TrainingServiceTest, CommitStepCarriesEveryHyperparameter) {
  EXPECT_CALL(engine_, CommitStep(_, _)).WillOnce([](const CommitSpec& spec, Done<StepPosition> done) {
    EXPECT_EQ(spec.session_id, 99);
    EXPECT_EQ(spec.step, 3);
    EXPECT_EQ(spec.attempt, 1);
    EXPECT_EQ(spec.gradient_scale, 0.5);
    const AdamW adamw = {.learning_rate = 1, .beta1 = 0.2, .beta2 = 0.3, .epsilon = 4, .weight_decay = 5};
    const Sgd sgd = {.learning_rate = 1, .momentum = 2, .dampening = 3, .weight_decay = 4, .nesterov = true};
    EXPECT_THAT(spec.groups, ElementsAre(ParameterGroup{.tensors = {"a", "b"}, .hyperparameters = adamw},
                                         ParameterGroup{.tensors = {"c"}, .hyperparameters = sgd},
                                         ParameterGroup{.tensors = {"d"}, .hyperparameters = KeepFrozen{}}));
    done(kPosition);
  });
  v1::CommitStepRequest request;
  request.set_session_id(99);
  request.set_step(3);
  request.set_attempt(1);
  request.set_gradient_scale(0.5);
  v1::ParameterGroup& first = *request.add_groups();
  first.add_tensors("a");
  first.add_tensors("b");
  first.mutable_adamw()->set_learning_rate(1);
  first.mutable_adamw()->set_beta1(0.2);
  first.mutable_adamw()->set_beta2(0.3);
  first.mutable_adamw()->set_epsilon(4);
  first.mutable_adamw()->set_weight_decay(5);
  v1::ParameterGroup& second = *request.add_groups();
  second.add_tensors("c");
  second.mutable_sgd()->set_learning_rate(1);
  second.mutable_sgd()->set_momentum(2);
  second.mutable_sgd()->set_dampening(3);
  second.mutable_sgd()->set_weight_decay(4);
  second.mutable_sgd()->set_nesterov(true);
  v1::ParameterGroup& third = *request.add_groups();
  third.add_tensors("d");
  third.mutable_keep_frozen();
  v1::CommitStepResponse response;
  ASSERT_TRUE(Call(&Stub::CommitStep, request, response).ok());
  ExpectPosition(response.position());
}

TEST_F(TrainingServiceTest, AGroupWithoutOptimizerIsRefused) {
  v1::CommitStepRequest request;
  request.add_groups()->add_tensors("a");
  v1::CommitStepResponse response;
  const absl::Status status = Call(&Stub::CommitStep, request, response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected adamw, sgd or keep_frozen"));
}

TEST_F(TrainingServiceTest, DiscardStepCarriesAReasonOfBoundedLength) {
  EXPECT_CALL(engine_, DiscardStep(_, _)).WillOnce([](const DiscardSpec& spec, Done<StepPosition> done) {
    EXPECT_EQ(spec.reason, std::string(256, 'x'));
    done(kPosition);
  });
  v1::DiscardStepRequest request;
  request.set_reason(std::string(256, 'x'));
  v1::DiscardStepResponse response;
  ASSERT_TRUE(Call(&Stub::DiscardStep, request, response).ok());
  ExpectPosition(response.position());
  request.mutable_reason()->push_back('x');
  const absl::Status status = Call(&Stub::DiscardStep, request, response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("257 bytes, at most 256"));
}

TEST_F(TrainingServiceTest, CloseSessionPassesTheSessionOn) {
  EXPECT_CALL(engine_, CloseSession(99)).WillOnce(testing::Return(absl::OkStatus()));
  v1::CloseSessionRequest request;
  request.set_session_id(99);
  v1::CloseSessionResponse response;
  EXPECT_TRUE(Call(&Stub::CloseSession, request, response).ok());
}

}  // namespace
}  // namespace shardmlp
