// Sessions on the whole engine: opened again, lost by their lease in every part of a step, and missing at the seal.
#include <functional>
#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/hand_clock.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kRows = 10;                              // three tiles
constexpr absl::Duration kLease = absl::Milliseconds(40);  // on the test's clock; the engine looks at it often
const AdamW kAdamW{.learning_rate = 0.01};

// What a step came to, to the bit.
struct Outcome {
  std::vector<double> squares;
  std::vector<Dense> weights;
  bool operator==(const Outcome&) const = default;
};

class LostSessionTest : public ::testing::Test {
 protected:
  EngineOptions Options(absl::Duration lease, absl::Duration seal_timeout) const {
    EngineOptions options = TilesOf(4, model_);
    options.lease = lease;
    options.seal_timeout = seal_timeout;
    options.clock = clock_.reader();
    return options;
  }

  void Backward(Trainer& trainer, int rank) { trainer.Backward(0, x_[rank], dy_[rank]); }

  // Seals and commits what two trainers have sent.
  Outcome Finish(const TestEngine& engine, Trainer& first, Trainer& second) {
    Outcome outcome;
    const Reply<SealResult> one = first.StartSeal(), two = second.StartSeal();
    EXPECT_TRUE(Succeeds(one.Wait()));
    EXPECT_TRUE(Succeeds(two.Wait()));
    if (one.Wait().ok()) outcome.squares = one.Wait()->tensor_sums_of_squares;
    EXPECT_TRUE(Succeeds(first.Commit(kAdamW)));
    EXPECT_TRUE(Succeeds(second.Commit(kAdamW)));
    for (const TensorSpec& tensor : model_.spec().tensors) outcome.weights.push_back(engine.Read(tensor));
    return outcome;
  }

  Outcome Undisturbed() {
    const TestEngine engine(model_, TilesOf(4, model_));
    Trainer first(*engine, 0, 2), second(*engine, 1, 2);
    Backward(first, 0);
    Backward(second, 1);
    return Finish(engine, first, second);
  }

  static ::testing::AssertionResult Lost(const absl::Status& status) {
    return Fails(status, absl::StatusCode::kAborted, Reason::kStepAborted, {"trainer rank 1 of run 'run' was lost"});
  }
  static ::testing::AssertionResult Unknown(const absl::Status& status) {
    return Fails(status, absl::StatusCode::kNotFound, Reason::kUnknownSession);
  }

  // The second trainer falls silent after `work` of a first attempt, and its lease ends. They do the step over, and it
  // is as if nothing had happened.
  void LoseTheSecondAfter(const std::function<void(Trainer& first, Trainer& second)>& work) {
    const TestEngine engine(model_, Options(kLease, absl::Hours(1)));
    Trainer first(*engine, 0, 2), second(*engine, 1, 2);
    work(first, second);
    clock_.Advance(kLease * 0.75);
    ASSERT_TRUE(Succeeds(engine->RenewSession(first.session())));
    clock_.Advance(kLease * 0.75);
    AwaitAttempt(engine, 1);
    EXPECT_EQ(engine->position(), (StepPosition{0, 1, 1}));
    EXPECT_TRUE(Succeeds(engine->RenewSession(first.session())));
    EXPECT_TRUE(Unknown(engine->RenewSession(second.session()).status()));
    EXPECT_TRUE(Lost(first.Commit(kAdamW))) << "of the old attempt";
    EXPECT_TRUE(Unknown(second.Commit(kAdamW)));

    Trainer again(*engine, 1, 2);
    first.CatchUp();
    Backward(first, 0);
    Backward(again, 1);
    EXPECT_EQ(Finish(engine, first, again), Undisturbed());
    EXPECT_EQ(engine->position(), (StepPosition{1, 1, 2}));
  }

  static void AwaitAttempt(const TestEngine& engine, int64_t attempt) {
    while (engine->position().attempt < attempt) std::this_thread::yield();
  }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  const Dense x_[2] = {RandomDense(kRows, 13, 1), RandomDense(kRows, 13, 2)};
  const Dense dy_[2] = {RandomDense(kRows, 7, 3), RandomDense(kRows, 7, 4)};
  HandClock clock_;
};

TEST_F(LostSessionTest, WithoutAnyRowsWhileTheOtherWaitsForItsSeal) {
  Reply<SealResult> seal;
  LoseTheSecondAfter([&](Trainer& first, Trainer&) {
    Backward(first, 0);
    seal = first.StartSeal();
  });
  EXPECT_TRUE(Lost(seal.Wait().status()));
}

TEST_F(LostSessionTest, InTheMiddleOfItsBackward) {
  Reply<SealResult> seal;
  LoseTheSecondAfter([&](Trainer& first, Trainer& second) {
    Backward(first, 0);
    const auto cut = second.Start(second.BackwardHeader(0, kRows), x_[1], dy_[1]);
    ASSERT_TRUE(Succeeds(cut->Send(6)));
    cut->WaitForRows(4);
    cut->Cancel();  // its connection broke
    seal = first.StartSeal();
  });
  EXPECT_TRUE(Lost(seal.Wait().status()));
}

TEST_F(LostSessionTest, WithItsSealWhileTheOtherComputes) {
  Reply<SealResult> seal;
  LoseTheSecondAfter([&](Trainer& first, Trainer& second) {
    Backward(second, 1);
    seal = second.StartSeal();
    Backward(first, 0);
  });
  EXPECT_TRUE(Lost(seal.Wait().status()));
}

TEST_F(LostSessionTest, BetweenTheSealAndTheCommit) {
  LoseTheSecondAfter([&](Trainer& first, Trainer& second) {
    Backward(first, 0);
    Backward(second, 1);
    const Reply<SealResult> one = first.StartSeal(), two = second.StartSeal();
    EXPECT_TRUE(Succeeds(one.Wait()));
    EXPECT_TRUE(Succeeds(two.Wait()));
  });
}

TEST_F(LostSessionTest, ACallThatIsOpenKeepsItsSessionAndOneThatEndsStartsItsLeaseAnew) {
  const TestEngine engine(model_, Options(kLease, absl::Hours(1)));
  Trainer first(*engine, 0, 2), second(*engine, 1, 2);
  const auto open = second.Start(second.BackwardHeader(0, kRows), x_[1], dy_[1]);
  Backward(first, 0);
  for (int i = 0; i < 5; ++i) {
    clock_.Advance(kLease);
    ASSERT_TRUE(Succeeds(engine->RenewSession(first.session())));
  }
  ASSERT_TRUE(Succeeds(open->SendAll()));
  ASSERT_TRUE(Succeeds(open->Wait()));
  clock_.Advance(kLease * 0.9);
  ASSERT_TRUE(Succeeds(engine->RenewSession(first.session())));
  EXPECT_EQ(Finish(engine, first, second), Undisturbed());
}

TEST_F(LostSessionTest, AnOpenBackwardOfAnotherIsAborted) {
  const TestEngine engine(model_, Options(kLease, absl::Hours(1)));
  Trainer first(*engine, 0, 2), second(*engine, 1, 2);
  Backward(second, 1);
  const auto open = first.Start(first.BackwardHeader(0, kRows), x_[0], dy_[0]);
  ASSERT_TRUE(Succeeds(open->Send(4)));
  open->WaitForRows(4);
  const Reply<SealResult> seal = first.StartSeal();  // with rows that were not counted; it fails at once
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch));
  clock_.Advance(kLease);
  AwaitAttempt(engine, 1);
  ASSERT_TRUE(Succeeds(open->SendAll()));
  EXPECT_TRUE(Lost(open->Wait().status()));
  EXPECT_EQ(open->rows().rows, 4);
}

TEST_F(LostSessionTest, ASealThatWaitsForTooLongNamesWhoIsMissingAndMayBeSentAgain) {
  const absl::Duration timeout = absl::Milliseconds(40);
  const TestEngine engine(model_, Options(absl::Hours(1), timeout));
  Trainer first(*engine, 0, 2), second(*engine, 1, 2);
  Backward(first, 0);
  Backward(second, 1);
  const Reply<SealResult> seal = first.StartSeal();
  clock_.Advance(timeout);
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kUnavailable, Reason::kTrainerMissing, {"missing: rank 1"}));
  EXPECT_EQ(engine->position(), (StepPosition{0, 0, 1}));
  EXPECT_EQ(Finish(engine, first, second), Undisturbed());
}

TEST_F(LostSessionTest, ALostReaderDisturbsNobody) {
  const TestEngine engine(model_, Options(kLease, absl::Hours(1)));
  Trainer first(*engine, 0, 2), second(*engine, 1, 2), reader(*engine, 0, 1, SessionRole::kRead);
  Backward(first, 0);
  Backward(second, 1);
  clock_.Advance(kLease * 0.75);
  for (const Trainer* trainer : {&first, &second}) ASSERT_TRUE(Succeeds(engine->RenewSession(trainer->session())));
  clock_.Advance(kLease * 0.75);
  // To ask for the session would renew it.
  while (engine.metrics.Text().find("shardmlp_sessions{role=\"read\"} 1") != std::string::npos) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(Unknown(engine->RenewSession(reader.session()).status()));
  EXPECT_EQ(Finish(engine, first, second), Undisturbed());
}

TEST_F(LostSessionTest, AnOpeningThatIsSentAgainGetsTheSameSessionWithAllItHasDone) {
  const TestEngine engine(model_, TilesOf(4, model_));
  const SessionSpec spec{"run", SessionRole::kTrain, 1, 0, /*opening_id=*/77};
  std::vector<absl::StatusOr<SessionGrant>> grants(8);
  std::vector<std::thread> threads;
  for (auto& grant : grants) threads.emplace_back([&] { grant = engine->OpenSession(spec); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& grant : grants) {
    ASSERT_TRUE(Succeeds(grant));
    EXPECT_EQ(grant->session_id, grants[0]->session_id);
  }
  EXPECT_EQ(engine->trainers().size(), 1u);

  const int64_t session = grants[0]->session_id;
  const auto backward = RunningCall::Backward(*engine,
                                              {.session_id = session,
                                               .layer = 10,
                                               .row_count = kRows,
                                               .dtype = DType::kF64,
                                               .call_id = 1,
                                               .weights_version = 1},
                                              x_[0], dy_[0])
                            .value();
  ASSERT_TRUE(Succeeds(backward->SendAll()));
  ASSERT_TRUE(Succeeds(backward->Wait()));
  EXPECT_EQ(engine->OpenSession(spec)->session_id, session);
  Reply<SealResult> seal;
  engine->SealStep({session, 0, 0, {{10, kRows}}}, seal.done());
  EXPECT_TRUE(Succeeds(seal.Wait())) << "the rows are counted yet";
  EXPECT_EQ(engine->OpenSession(spec)->session_id, session);
  EXPECT_TRUE(engine->trainers()[0].sealed);

  SessionSpec other = spec;
  other.opening_id = 78;
  EXPECT_TRUE(Fails(engine->OpenSession(other), absl::StatusCode::kFailedPrecondition, Reason::kRunConflict));
  ASSERT_TRUE(Succeeds(engine->CloseSession(session)));
  const absl::StatusOr<SessionGrant> fresh = engine->OpenSession(spec);
  ASSERT_TRUE(Succeeds(fresh));
  EXPECT_NE(fresh->session_id, session) << "a session that was closed is never given out again";
}

}  // namespace
}  // namespace shardmlp::testing
