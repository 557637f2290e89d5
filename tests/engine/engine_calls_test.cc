// Which calls are admitted, and which rows they may still get when the world changes under them.
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kRows = 8;  // two tiles

class EngineCallsTest : public ::testing::Test {
 protected:
  ::testing::AssertionResult Refuses(const ForwardSpec& spec, absl::StatusCode code, Reason reason,
                                     std::initializer_list<absl::string_view> named = {}) {
    return Fails(RunningCall::Forward(*engine_, spec, x_), code, reason, named);
  }
  ::testing::AssertionResult Refuses(const BackwardSpec& spec, absl::StatusCode code, Reason reason,
                                     std::initializer_list<absl::string_view> named = {}) {
    return Fails(RunningCall::Backward(*engine_, spec, x_, dy_), code, reason, named);
  }

  static void ExpectNoGradients(Trainer& trainer) {
    const absl::StatusOr<SealResult> seal = trainer.Seal();
    ASSERT_TRUE(Succeeds(seal));
    EXPECT_EQ(seal->tensor_sums_of_squares, std::vector<double>(seal->tensor_sums_of_squares.size(), 0));
  }

  const TinyModel model_{{OddMlp(), OddMlp()}};
  TestEngine engine_{model_, TilesOf(4, model_)};
  Trainer trainer_{*engine_};
  const Dense x_ = RandomDense(kRows, 13, 1);
  const Dense dy_ = RandomDense(kRows, 7, 2);
};

TEST_F(EngineCallsTest, AHeaderThatIsWrongInItself) {
  ForwardSpec layer = trainer_.ForwardHeader(0, kRows);
  layer.layer = 11;
  EXPECT_TRUE(Refuses(layer, absl::StatusCode::kInvalidArgument, Reason::kUnknownLayer, {"layer 11", "10 to 13"}));
  ForwardSpec rows = trainer_.ForwardHeader(0, -1);
  EXPECT_TRUE(Refuses(rows, absl::StatusCode::kInvalidArgument, Reason::kInvalidRows, {"-1"}));
  for (const int64_t call_id : {0, -3}) {
    BackwardSpec header = trainer_.BackwardHeader(0, kRows);
    header.call_id = call_id;
    EXPECT_TRUE(Refuses(header, absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, {"call_id"}));
  }
  EXPECT_EQ(engine_->open_call_count(), 0);
}

TEST_F(EngineCallsTest, ASessionThatIsUnknownClosedOrReads) {
  ForwardSpec forward = trainer_.ForwardHeader(0, kRows);
  forward.session_id += 1;
  EXPECT_TRUE(Refuses(forward, absl::StatusCode::kNotFound, Reason::kUnknownSession));
  Trainer reader(*engine_, 0, 1, SessionRole::kRead);
  EXPECT_TRUE(Refuses(reader.BackwardHeader(0, kRows), absl::StatusCode::kFailedPrecondition, Reason::kFrozen,
                      {"read session"}));
  ASSERT_TRUE(Succeeds(engine_->CloseSession(reader.session())));
  ASSERT_TRUE(Succeeds(engine_->CloseSession(reader.session()))) << "repeats succeed";
  EXPECT_TRUE(Refuses(reader.ForwardHeader(0, kRows), absl::StatusCode::kNotFound, Reason::kUnknownSession));
}

TEST_F(EngineCallsTest, ABackwardOfAnotherStepAttemptOrVersion) {
  BackwardSpec step = trainer_.BackwardHeader(0, kRows);
  step.step = 1;
  EXPECT_TRUE(Refuses(step, absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt, {"step 1"}));
  BackwardSpec version = trainer_.BackwardHeader(0, kRows);
  version.weights_version = 2;
  EXPECT_TRUE(
      Refuses(version, absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights, {"version 2", "version 1"}));
  version.weight_gradient = false;
  EXPECT_TRUE(Refuses(version, absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights));
  const BackwardSpec old_attempt = trainer_.BackwardHeader(0, kRows);
  ASSERT_TRUE(Succeeds(trainer_.Discard()));
  EXPECT_TRUE(Refuses(old_attempt, absl::StatusCode::kAborted, Reason::kStepAborted, {"discarded"}));
  const BackwardSpec old_version = trainer_.BackwardHeader(0, kRows);
  ASSERT_TRUE(Succeeds(trainer_.Seal()));
  ASSERT_TRUE(Succeeds(trainer_.Commit()));
  BackwardSpec new_step = old_version;
  new_step.step = 1;
  EXPECT_TRUE(Refuses(new_step, absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights));
}

// As a server that is started again, perhaps with other weights: what was forwarded on the one before is not
// recomputed.
TEST_F(EngineCallsTest, ABackwardWhoseForwardRanOnAnEngineBefore) {
  const auto start = [this](Metrics& metrics) {
    return Engine::Create(TilesOf(4, model_), OneThread(), model_, MakeLocalReplicas(), nullptr, metrics).value();
  };
  Metrics old_metrics, metrics;
  BackwardSpec header;
  {
    const std::unique_ptr<Engine> engine = start(old_metrics);
    header = Trainer(*engine, 0, 1, SessionRole::kRead).BackwardHeader(0, kRows);
    EXPECT_GE(header.weights_version, 1);
    EXPECT_LT(header.weights_version, int64_t{1} << 53) << "whole as a double";
  }
  const std::unique_ptr<Engine> engine = start(metrics);
  Trainer reader(*engine, 0, 1, SessionRole::kRead);
  header.session_id = reader.session();
  header.weight_gradient = false;
  EXPECT_TRUE(Fails(RunningCall::Backward(*engine, header, x_, dy_), absl::StatusCode::kFailedPrecondition,
                    Reason::kStaleWeights));
  header.weights_version = reader.position().weights_version;
  EXPECT_TRUE(Succeeds(RunningCall::Backward(*engine, header, x_, dy_)));
}

TEST_F(EngineCallsTest, NoMoreCallsThanLanesAndOneMoreOnceOneIsOver) {
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(trainer_.Start(trainer_.ForwardHeader(0, kRows), x_));
  EXPECT_EQ(engine_->open_call_count(), 8);
  EXPECT_TRUE(Refuses(trainer_.ForwardHeader(0, kRows), absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                      {"all 8 calls"}));
  calls.pop_back();
  EXPECT_EQ(engine_->open_call_count(), 7);
  EXPECT_LE(RelativeDifference(trainer_.Forward(0, x_), NaiveForward(model_.layers()[0], x_)), 1e-12);
  EXPECT_EQ(engine_->open_call_count(), 7);
}

TEST_F(EngineCallsTest, ReadersThatTakeAllTheyCanGetLeaveATrainerItsSessionAndItsCalls) {
  EngineOptions options = TilesOf(4, model_);
  options.max_session_count = 8;
  const TestEngine engine(model_, options);
  std::vector<std::unique_ptr<Trainer>> readers;
  for (int i = 0; i < 4; ++i) readers.push_back(std::make_unique<Trainer>(*engine, 0, 1, SessionRole::kRead));
  EXPECT_TRUE(Fails(engine->OpenSession({"", SessionRole::kRead, 0, 0}), absl::StatusCode::kResourceExhausted,
                    Reason::kTooManySessions));
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (const auto& reader : readers) calls.push_back(reader->Start(reader->ForwardHeader(0, kRows), x_));
  EXPECT_TRUE(Fails(RunningCall::Forward(*engine, readers[0]->ForwardHeader(0, kRows), x_),
                    absl::StatusCode::kResourceExhausted, Reason::kOverloaded, {"all 4 calls that readers"}));
  Trainer trainer(*engine);
  for (int i = 0; i < 4; ++i) calls.push_back(trainer.Start(trainer.ForwardHeader(0, kRows), x_));
  ASSERT_TRUE(Succeeds(calls.back()->SendAll()));
  EXPECT_TRUE(Succeeds(calls.back()->Wait()));
}

TEST_F(EngineCallsTest, AFrozenServersReadersMayTakeAll) {
  EngineOptions options = TilesOf(4, model_);
  options.frozen = true;
  options.max_session_count = 1;
  options.max_call_count = 1;
  const TestEngine engine(model_, options);
  Trainer reader(*engine, 0, 1, SessionRole::kRead);
  EXPECT_LE(RelativeDifference(reader.Forward(0, x_), NaiveForward(model_.layers()[0], x_)), 1e-12);
}

TEST_F(EngineCallsTest, ACallThatHasEndedMakesRoomEvenWhereItIsKept) {
  std::vector<std::unique_ptr<RunningCall>> ended;
  for (int i = 0; i < 3 * 8; ++i) {
    ended.push_back(trainer_.Start(trainer_.ForwardHeader(0, kRows), x_));
    ASSERT_TRUE(Succeeds(ended.back()->SendAll()));
    ASSERT_TRUE(Succeeds(ended.back()->Wait()));
  }
}

TEST_F(EngineCallsTest, AStalledCallHoldsUpNobodyElse) {
  const auto unread = trainer_.Start(trainer_.ForwardHeader(0, 100), RandomDense(100, 13, 3));
  unread->StopReading();
  ASSERT_TRUE(Succeeds(unread->Send(16)));  // two tiles out, which nobody takes, and two in
  unread->WaitForRows(8);
  const auto unsent = trainer_.Start(trainer_.BackwardHeader(0, kRows), x_, dy_);
  ASSERT_TRUE(Succeeds(unsent->Send(6)));
  for (int i = 0; i < 10; ++i) trainer_.Forward(1, x_, 3);
  EXPECT_EQ(unread->rows().rows, 8);
  unread->ReadOn();
  ASSERT_TRUE(Succeeds(unread->SendAll()));
  ASSERT_TRUE(Succeeds(unread->Wait()));
  ASSERT_TRUE(Succeeds(unsent->SendAll()));
  ASSERT_TRUE(Succeeds(unsent->Wait()));
  EXPECT_EQ(unread->rows().rows, 100);
}

TEST_F(EngineCallsTest, ACommitInTheMiddleOfAForwardEndsItAndItsRowsAreOfOneVersion) {
  Trainer reader(*engine_, 0, 1, SessionRole::kRead);
  const auto forward = reader.Start(reader.ForwardHeader(0, kRows), x_);
  ASSERT_TRUE(Succeeds(forward->Send(4)));
  forward->WaitForRows(4);
  trainer_.Backward(0, x_, dy_);
  ASSERT_TRUE(Succeeds(trainer_.Seal()));
  ASSERT_TRUE(Succeeds(trainer_.Commit()));
  ASSERT_TRUE(Succeeds(forward->SendAll()));
  EXPECT_TRUE(Fails(forward->Wait(), absl::StatusCode::kUnavailable, Reason::kWeightsChanged));
  EXPECT_EQ(forward->rows().rows, 4);
  EXPECT_LE(RelativeDifference(forward->rows(), NaiveForward(model_.layers()[0], RowsOf(x_, 0, 4))), 1e-12);
  reader.CatchUp();
  EXPECT_LE(RelativeDifference(reader.Forward(0, x_), NaiveForward(engine_.Weights()[0], x_)), 1e-12)
      << "sent again, it is of the new weights";
}

TEST_F(EngineCallsTest, ACommitInTheMiddleOfAReadersBackwardEndsIt) {
  Trainer reader(*engine_, 0, 1, SessionRole::kRead);
  BackwardSpec header = reader.BackwardHeader(0, kRows);
  header.weight_gradient = false;
  const auto backward = reader.Start(header, x_, dy_);
  ASSERT_TRUE(Succeeds(backward->Send(4)));
  backward->WaitForRows(4);
  trainer_.Backward(0, x_, dy_);
  ASSERT_TRUE(Succeeds(trainer_.Seal()));
  ASSERT_TRUE(Succeeds(trainer_.Commit()));
  ASSERT_TRUE(Succeeds(backward->SendAll()));
  EXPECT_TRUE(Fails(backward->Wait(), absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights));
  EXPECT_EQ(backward->rows().rows, 4);
}

TEST_F(EngineCallsTest, ADiscardInTheMiddleOfABackwardAbortsItAndItsRowsAreGone) {
  const auto backward = trainer_.Start(trainer_.BackwardHeader(0, kRows), x_, dy_);
  ASSERT_TRUE(Succeeds(backward->Send(4)));
  backward->WaitForRows(4);
  ASSERT_TRUE(Succeeds(trainer_.Discard()));
  ASSERT_TRUE(Succeeds(backward->SendAll()));
  EXPECT_TRUE(Fails(backward->Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"discarded"}));
  ExpectNoGradients(trainer_);
}

TEST_F(EngineCallsTest, ASessionThatIsClosedUnderItsBackwardAddsNothingMore) {
  const auto backward = trainer_.Start(trainer_.BackwardHeader(0, kRows), x_, dy_);
  ASSERT_TRUE(Succeeds(backward->Send(4)));
  backward->WaitForRows(4);
  ASSERT_TRUE(Succeeds(engine_->CloseSession(trainer_.session())));
  EXPECT_EQ(engine_->position(), (StepPosition{0, 1, 1})) << "it took part, so the attempt is over";
  ASSERT_TRUE(Succeeds(backward->SendAll()));
  EXPECT_TRUE(Fails(backward->Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"closed its session"}));
  Trainer next(*engine_);
  ExpectNoGradients(next);
}

TEST_F(EngineCallsTest, ADrainingEngineTakesNothingNewAndLetsOpenCallsEnd) {
  const auto open = trainer_.Start(trainer_.BackwardHeader(0, kRows), x_, dy_);
  engine_->StartDraining();
  EXPECT_TRUE(Refuses(trainer_.ForwardHeader(0, kRows), absl::StatusCode::kUnavailable, Reason::kDraining));
  EXPECT_TRUE(Fails(engine_->OpenSession({"run", SessionRole::kRead, 1, 0}), absl::StatusCode::kUnavailable,
                    Reason::kDraining));
  ASSERT_TRUE(Succeeds(open->SendAll()));
  ASSERT_TRUE(Succeeds(open->Wait()));
  ASSERT_TRUE(Succeeds(trainer_.Seal()));
  ASSERT_TRUE(Succeeds(trainer_.Commit()));
  EXPECT_EQ(engine_->position().step, 1);
}

// What is on the wire may be narrower than what is computed in; each element is rounded once, to nearest even.
TEST(EngineWireTest, RowsTravelInTheCallsOwnDType) {
  const TinyModel model({OddMlp()});
  const TestEngine engine(model, TilesOf(4, model));
  Trainer trainer(*engine);
  const std::pair<DType, double> cases[] = {
      {DType::kF64, 1e-12}, {DType::kF32, 0x1p-24}, {DType::kF16, 0x1p-11}, {DType::kBF16, 0x1p-8}};
  for (const auto& [dtype, half_unit] : cases) {
    SCOPED_TRACE(std::string(Name(dtype)));
    const Dense x = Decode(Encode(RandomDense(9, 13, 1), dtype).data(), 9, 13, dtype);
    const Dense dy = Decode(Encode(RandomDense(9, 7, 2), dtype).data(), 9, 7, dtype);
    ForwardSpec forward = trainer.ForwardHeader(0, 9);
    forward.dtype = dtype;
    const auto y = trainer.Start(forward, x);
    ASSERT_TRUE(Succeeds(y->SendAll(2)));
    ASSERT_TRUE(Succeeds(y->Wait()));
    EXPECT_LE(RelativeDifference(y->rows(), NaiveForward(model.layers()[0], x)), half_unit);
    BackwardSpec backward = trainer.BackwardHeader(0, 9);
    backward.dtype = dtype;
    const auto dx = trainer.Start(backward, x, dy);
    ASSERT_TRUE(Succeeds(dx->SendAll(2)));
    ASSERT_TRUE(Succeeds(dx->Wait()));
    const NaiveGradients expected = NaiveBackward(model.layers()[0], x, dy);
    EXPECT_LE(RelativeDifference(dx->rows(), expected.dx), half_unit);
    const std::vector<double> squares = Squares(model.spec(), {expected});
    const absl::StatusOr<SealResult> seal = trainer.Seal();
    for (size_t i = 0; i < squares.size(); ++i) {
      EXPECT_NEAR(seal->tensor_sums_of_squares[i] / squares[i], 1, 1e-12) << "the sums are not rounded";
    }
    ASSERT_TRUE(Succeeds(trainer.Discard()));
  }
}

TEST(EngineWireTest, AnF32ServerTakesNoF64) {
  const TinyModel model({OddMlp(DType::kF32)});
  const TestEngine engine(model);
  Trainer trainer(*engine);
  ForwardSpec header = trainer.ForwardHeader(0, 9);
  header.dtype = DType::kF64;
  EXPECT_TRUE(Fails(RunningCall::Forward(*engine, header, RandomDense(9, 13, 1)), absl::StatusCode::kInvalidArgument,
                    Reason::kInvalidDType, {"got f64", "computes in f32"}));
}

}  // namespace
}  // namespace shardmlp::testing
