// Steps of several replicas, with everything that they agree on delivered by hand.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/step_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Log = std::vector<std::pair<int, StepMessage>>;  // by whom

class Replica final : public StepPeers {
 public:
  Replica(Log& log, int rank) : log_(log), rank_(rank) {}

  void Propose(const StepMessage& message, Outbox&) override { log_.emplace_back(rank_, message); }
  void Rejoin(Outbox&) override { ++rejoined; }

  // Hears of the next `count` messages; of all, where that is -1.
  void Hear(int count = -1) {
    Outbox outbox;
    for (; heard_ < log_.size() && count != 0; --count, ++heard_) {
      step.Agreed(static_cast<int64_t>(heard_), log_[heard_].first, log_[heard_].second, absl::Now(), outbox);
    }
  }
  void Lose(bool heard_all = true) {
    Outbox outbox;
    step.Lost(absl::UnavailableError("replica 2 died"), heard_all, outbox);
  }
  void Receive(StepPosition position, const std::optional<CommittedStep>& committed) {
    Outbox outbox;
    step.Received(position, committed, outbox);
  }
  void GoOn(StepPosition position) {
    Outbox outbox;
    step.GoOnFrom(position, outbox);
  }
  void Form(const std::vector<int>& replicas) {
    Outbox outbox;
    step.Formed(replicas, outbox);
  }
  void Expire(absl::Time now) {
    Outbox outbox;
    step.ExpireSeals(now, outbox);
  }
  void Open(int64_t session, int rank, int count) {
    Outbox outbox;
    step.AddTrainer(session, {"run", SessionRole::kTrain, count, rank}, outbox);
  }
  absl::StatusOr<LedgerVerdict> Add(int64_t session, int64_t rows) {
    Outbox outbox;
    return step.Admit({session, 7, 0, rows, 0, rows, 1}, step.position().step, step.position().attempt, "", outbox);
  }
  std::shared_ptr<Answer<SealResult>> Seal(int64_t session, const LayerRows& rows = {}) {
    auto [answer, done] = Expected<SealResult>();
    Outbox outbox;
    step.Seal({session, step.position().step, step.position().attempt, rows}, absl::Now(), std::move(done), outbox);
    return answer;
  }
  std::shared_ptr<Answer<StepPosition>> Commit(int64_t session, StepPosition at) {
    auto [answer, done] = Expected<StepPosition>();
    Outbox outbox;
    step.Commit({session, at.step, at.attempt, {{{"gate", "down"}, Sgd{.learning_rate = 0.5}}}}, std::move(done),
                outbox);
    return answer;
  }
  std::shared_ptr<Answer<StepPosition>> Discard(int64_t session) {
    auto [answer, done] = Expected<StepPosition>();
    Outbox outbox;
    step.Discard({session, step.position().step, step.position().attempt, "no"}, std::move(done), outbox);
    return answer;
  }
  void Sum(std::vector<double> squares) {
    Outbox outbox;
    step.Summed(step.position(), std::move(squares), outbox);
  }
  void Apply() {
    Outbox outbox;
    step.Applied(absl::OkStatus(), outbox);
  }
  void Stabilize() {
    Outbox outbox;
    step.Stable(static_cast<int64_t>(heard_) - 1, outbox);
  }

  int rejoined = 0;
  NotingDevice device;
  Metrics metrics;

 private:
  Log& log_;
  const int rank_;
  size_t heard_ = 0;

 public:
  StepProtocol step{device, *this, metrics, {"gate", "down"}, absl::Minutes(5), /*first_weights_version=*/1, rank_};
};

// Session 1 at replica 0 is trainer 0, session 2 at replica 1 is trainer 1.
class AgreementTest : public ::testing::Test {
 protected:
  AgreementTest() {
    for (Replica* replica : {&zero_, &one_}) {
      Outbox outbox;
      replica->step.Formed({0, 1}, outbox);
    }
    zero_.Open(1, 0, 2);
    one_.Open(2, 1, 2);
    HearAll();
  }
  void HearAll() {
    size_t before = 0;
    do {
      before = log_.size();
      zero_.Hear();
      one_.Hear();
    } while (log_.size() > before);
  }
  void SealBoth() {
    zero_.Seal(1);
    one_.Seal(2);
    HearAll();
    zero_.Sum({4, 9});
    one_.Sum({4, 9});
    HearAll();
  }

  Log log_;
  Replica zero_{log_, 0};
  Replica one_{log_, 1};
};

TEST_F(AgreementTest, AllSealOnceAllHaveTheSumsAndTheFirstOnesAreEveryones) {
  ASSERT_TRUE(Succeeds(zero_.Add(1, 3)));
  ASSERT_TRUE(Succeeds(one_.Add(2, 4)));
  const auto first = zero_.Seal(1, {{0, 3}}), second = one_.Seal(2, {{0, 4}});
  HearAll();
  EXPECT_THAT(zero_.device.asked, ElementsAre("sum"));
  EXPECT_THAT(one_.device.asked, ElementsAre("sum"));
  one_.Sum({4, 9});
  HearAll();
  EXPECT_EQ(first->count + second->count, 0) << "a commit now might find replica 0 without the sums";
  zero_.Sum({4, 9.000000001});  // as another machine may round
  HearAll();
  for (const auto& seal : {first, second}) {
    ASSERT_TRUE(Succeeds(seal->result));
    EXPECT_THAT(seal->result->tensor_sums_of_squares, ElementsAre(4, 9));
    EXPECT_EQ(seal->result->rows, (LayerRows{{0, 7}}));
  }
}

TEST_F(AgreementTest, AReplicaWithoutATrainerTakesPart) {
  Log log;
  Replica zero(log, 0), one(log, 1);
  for (Replica* replica : {&zero, &one}) {
    Outbox outbox;
    replica->step.Formed({0, 1}, outbox);
  }
  zero.Open(1, 0, 1);
  zero.Seal(1);
  one.Hear();
  EXPECT_THAT(one.device.asked, ElementsAre("sum"));
}

TEST_F(AgreementTest, WhatComesWhileADecisionIsAppliedWaitsForIt) {
  SealBoth();
  zero_.Commit(1, {0, 0, 1});
  HearAll();
  zero_.Apply();
  const auto discard = zero_.Discard(1);
  HearAll();
  EXPECT_EQ(zero_.step.position(), (StepPosition{1, 1, 2}));
  EXPECT_EQ(discard->count, 1);
  EXPECT_EQ(one_.step.position(), (StepPosition{0, 0, 1})) << "it is not there yet";
  one_.Apply();
  EXPECT_EQ(one_.step.position(), (StepPosition{1, 1, 2}));
}

TEST_F(AgreementTest, TheFirstOfACommitAndADiscardStands) {
  SealBoth();
  const auto commit = zero_.Commit(1, {0, 0, 1});
  const auto discard = one_.Discard(2);
  HearAll();
  EXPECT_TRUE(Fails(discard->result, absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict));
  zero_.Apply();
  one_.Apply();
  EXPECT_EQ(commit->count, 0);
  zero_.Stabilize();
  EXPECT_TRUE(Succeeds(commit->result));

  SealBoth();
  const auto first = one_.Discard(2);
  const auto late = zero_.Commit(1, {1, 0, 2});
  HearAll();
  EXPECT_EQ(*first->result, (StepPosition{1, 1, 2}));
  EXPECT_TRUE(Fails(late->result, absl::StatusCode::kAborted, Reason::kStepAborted, {"discarded by trainer rank 1"}));
  EXPECT_EQ(zero_.step.position(), one_.step.position());
}

TEST_F(AgreementTest, ACommitIsNotToldBecauseSomeoneReportsWhoMayNotHaveIt) {
  SealBoth();
  const auto commit = zero_.Commit(1, {0, 0, 1});
  {
    Outbox outbox;
    one_.step.RemoveTrainer(2, /*lost=*/false, outbox);
  }
  zero_.Hear();
  zero_.Apply();
  EXPECT_EQ(commit->count, 0) << "replica 1 reported before it heard of the commit";
  zero_.Stabilize();
  EXPECT_EQ(*commit->result, (StepPosition{1, 0, 2}));
}

TEST_F(AgreementTest, ARunThatCommittedAtAnotherReplicaIsUnderWay) {
  EXPECT_FALSE(one_.step.RunUnderWay(3));
  SealBoth();
  zero_.Commit(1, {0, 0, 1});
  HearAll();
  zero_.Apply();
  one_.Apply();
  {
    Outbox outbox;
    one_.step.RemoveTrainer(2, /*lost=*/true, outbox);
  }
  HearAll();
  EXPECT_TRUE(one_.step.RunUnderWay(3));
  {
    Outbox outbox;
    zero_.step.RemoveTrainer(1, /*lost=*/false, outbox);
  }
  HearAll();
  EXPECT_FALSE(one_.step.RunUnderWay(3)) << "nobody is left who knows more";
}

TEST_F(AgreementTest, OfTwoSessionsOfARankThatOpenAtOnceTheLaterIsRefused) {
  Log log;
  Replica zero(log, 0), one(log, 1);
  for (Replica* replica : {&zero, &one}) {
    Outbox outbox;
    replica->step.Formed({0, 1}, outbox);
  }
  zero.Open(1, 0, 1);
  one.Open(2, 0, 1);
  ASSERT_TRUE(Succeeds(one.Add(2, 4)));
  const auto seal = one.Seal(2, {{0, 4}});
  for (int i = 0; i < 3; ++i) {
    zero.Hear();
    one.Hear();
  }
  const auto refused = [](const auto& result) {
    return Fails(result, absl::StatusCode::kFailedPrecondition, Reason::kRunConflict, {"rank 0", "at replica 0"});
  };
  EXPECT_TRUE(refused(seal->result));
  EXPECT_TRUE(refused(one.Add(2, 4)));
  EXPECT_TRUE(refused(one.Commit(2, one.step.position())->result));
  EXPECT_EQ(zero.step.position().attempt, 1) << "its rows are in the sums";
  EXPECT_EQ(one.step.position().attempt, 1);
  EXPECT_THAT(one.step.trainers(), IsEmpty());
  EXPECT_EQ(zero.step.trainers().size(), 1u);
}

TEST_F(AgreementTest, ALossWhileADecisionIsAppliedWaitsForIt) {
  SealBoth();
  const auto commit = zero_.Commit(1, {0, 0, 1});
  HearAll();
  zero_.Lose();
  EXPECT_EQ(zero_.rejoined, 0) << "its state is not settled";
  zero_.Apply();
  EXPECT_EQ(zero_.rejoined, 1);
  EXPECT_EQ(zero_.step.position(), (StepPosition{1, 0, 2}));
  EXPECT_EQ(commit->count, 0) << "nobody else is known to have it";
  // The next generation goes on from it.
  Outbox outbox;
  zero_.step.GoOnFrom({1, 0, 2}, outbox);
  zero_.step.Formed({0}, outbox);
  zero_.Hear();
  const auto again = zero_.Commit(1, {0, 0, 1});
  EXPECT_TRUE(Succeeds(again->result));
}

// Of a step that replica 0 commits and of which replica 1, which is cut off, has not heard.
class CutOffTest : public AgreementTest {
 protected:
  CutOffTest() {
    zero_.Seal(1);
    seal_ = one_.Seal(2);
    HearAll();
    zero_.Sum({4, 9});
    one_.Sum({4, 9});
  }
  void CommitAtZero() {
    zero_.Hear();
    zero_.Commit(1, {0, 0, 1});
    zero_.Hear();
    zero_.Apply();
  }

  std::shared_ptr<Answer<SealResult>> seal_;
};

TEST_F(CutOffTest, WhoReceivesTheStateKnowsTheLastCommit) {
  CommitAtZero();
  one_.Hear(1);
  one_.Lose(/*heard_all=*/false);
  const auto discard = one_.Discard(2);
  EXPECT_EQ(seal_->count, 0) << "others may have committed it, as here";
  EXPECT_EQ(discard->count, 0);
  EXPECT_EQ(one_.step.position(), (StepPosition{0, 0, 1}));
  EXPECT_EQ(one_.step.JoinPosition(), (StepPosition{0, 1, 1})) << "so that the attempt is over where nobody has";
  one_.Receive({1, 1, 2}, zero_.step.committed());
  EXPECT_THAT(seal_->result->tensor_sums_of_squares, ElementsAre(4, 9));
  EXPECT_TRUE(Fails(discard->result, absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict));
  const auto untold = one_.Commit(2, {0, 0, 1});
  EXPECT_EQ(untold->count, 0);
  one_.Form({1});
  one_.Hear();
  EXPECT_EQ(*untold->result, (StepPosition{1, 0, 2}));
  EXPECT_EQ(one_.step.position(), (StepPosition{1, 1, 2}));
}

TEST_F(CutOffTest, ACommitThatWaitsIsAnsweredAsItWasDecidedElsewhere) {
  HearAll();
  const auto waiting = one_.Commit(2, {0, 0, 1});
  CommitAtZero();
  one_.Lose(/*heard_all=*/false);
  one_.Receive({1, 1, 2}, zero_.step.committed());
  EXPECT_EQ(waiting->count, 0) << "a replica may be lost again, and the commit with it";
  one_.Form({1});
  one_.Hear();
  EXPECT_EQ(*waiting->result, (StepPosition{1, 0, 2}));
}

TEST_F(CutOffTest, WhereNobodyHasCommittedTheAttemptIsOver) {
  HearAll();
  const auto commit = one_.Commit(2, {0, 0, 1});
  one_.Lose(/*heard_all=*/false);
  EXPECT_EQ(commit->count, 0);
  one_.GoOn({0, 1, 1});
  EXPECT_TRUE(Fails(commit->result, absl::StatusCode::kAborted, Reason::kStepAborted));
  EXPECT_EQ(one_.step.position(), (StepPosition{0, 1, 1}));
}

TEST_F(CutOffTest, WhoHasHeardAllKnowsAtOnceThatNobodyHas) {
  HearAll();
  const auto commit = one_.Commit(2, {0, 0, 1});
  one_.Lose();
  EXPECT_TRUE(Fails(commit->result, absl::StatusCode::kAborted, Reason::kStepAborted, {"replica 2 died"}));
}

TEST_F(CutOffTest, WhatWaitsForTooLongIsToldWhoIsMissing) {
  HearAll();
  const auto commit = one_.Commit(2, {0, 0, 1}), discard = one_.Discard(2);
  one_.Lose(/*heard_all=*/false);
  const absl::Time now = absl::Now();
  one_.Expire(now);
  one_.Expire(now + absl::Minutes(5) - absl::Seconds(1));
  EXPECT_EQ(commit->count + discard->count, 0);
  one_.Expire(now + absl::Minutes(5));
  for (const auto& answer : {commit, discard}) {
    EXPECT_TRUE(Fails(answer->result, absl::StatusCode::kUnavailable, Reason::kReplicaMissing, {"replica 2 died"}));
  }
}

TEST_F(AgreementTest, WithoutThisReplicasSumsNobodyHasCommitted) {
  ASSERT_TRUE(Succeeds(one_.Add(2, 4)));
  zero_.Seal(1);
  const auto seal = one_.Seal(2, {{0, 4}});
  HearAll();
  zero_.Sum({4, 9});
  one_.Lose(/*heard_all=*/false);
  EXPECT_TRUE(Fails(seal->result, absl::StatusCode::kAborted, Reason::kStepAborted, {"replica 2 died"}));
}

TEST_F(AgreementTest, WithoutAGenerationSealsAndDiscardsWaitAndRowsAreTaken) {
  ASSERT_TRUE(Succeeds(zero_.Add(1, 3)));
  const auto old = zero_.Seal(1, {{0, 3}});
  zero_.Lose();
  EXPECT_TRUE(Fails(old->result, absl::StatusCode::kAborted, Reason::kStepAborted, {"replica 2 died"}));
  EXPECT_EQ(zero_.step.position(), (StepPosition{0, 1, 1}));
  ASSERT_TRUE(Succeeds(zero_.Add(1, 5)));
  const auto discard = zero_.Discard(1);
  EXPECT_EQ(discard->count, 0);
  EXPECT_EQ(zero_.step.position(), (StepPosition{0, 1, 1})) << "which the others are told";
  {
    Outbox outbox;
    zero_.step.GoOnFrom({0, 1, 1}, outbox);
    zero_.step.Formed({0}, outbox);
  }
  zero_.Hear();
  EXPECT_EQ(*discard->result, (StepPosition{0, 2, 1}));
}

TEST_F(AgreementTest, ADiscardThatWaitsWhileTheOthersGoElsewhereIsRefused) {
  zero_.Lose();
  const auto discard = zero_.Discard(1);
  {
    Outbox outbox;
    zero_.step.Received({5, 1, 9}, std::nullopt, outbox);  // where a checkpoint was restored meanwhile
  }
  EXPECT_TRUE(Fails(discard->result, absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt,
                    {"step 0 can't be discarded", "step 5 is open"}));
}

TEST(StepMessageTest, KeepsEveryDouble) {
  for (const double value : {0.1, -0.0, 1e-308, 5e-324, 1.7976931348623157e308, HUGE_VAL}) {
    const auto back = ParseStepMessage(Serialize(SumReport{3, 4, {value}}));
    ASSERT_TRUE(Succeeds(back));
    EXPECT_EQ(std::get<SumReport>(*back).tensor_sums_of_squares[0], value);
  }
  const auto nan = ParseStepMessage(Serialize(SumReport{3, 4, {NAN}}));
  EXPECT_TRUE(std::isnan(std::get<SumReport>(*nan).tensor_sums_of_squares[0]));
}

TEST(StepMessageTest, ACommitComesBackAsItWas) {
  CommitSpec commit;
  commit.session_id = int64_t{1} << 62;
  commit.step = 3;
  commit.attempt = 4;
  commit.groups = {{{"gate", "up"}, AdamW{0.1, 0.2, 0.3, 0.4, 0.5}},
                   {{"down"}, Sgd{0.1, 0.2, -0.3, 0.4, true}},
                   {{"bias"}, KeepFrozen{}}};
  commit.gradient_scale = 1.0 / 3;
  commit.fresh_optimizer = true;
  const auto back = ParseStepMessage(Serialize(commit));
  ASSERT_TRUE(Succeeds(back));
  const CommitSpec& got = std::get<CommitSpec>(*back);
  EXPECT_EQ(got.session_id, commit.session_id);
  EXPECT_EQ(got.step, 3);
  EXPECT_EQ(got.attempt, 4);
  EXPECT_EQ(got.groups, commit.groups);
  EXPECT_EQ(got.gradient_scale, commit.gradient_scale);
  EXPECT_TRUE(got.fresh_optimizer);
}

TEST(StepMessageTest, WhatIsNoMessageIsRefused) {
  for (const char* text : {"", "{}", "[1]", R"({"kind": 9, "body": {}})", R"({"kind": 1, "body": {"step": "x"}})"}) {
    EXPECT_TRUE(Fails(ParseStepMessage(text), absl::StatusCode::kInternal, Reason::kInternal)) << text;
  }
}

}  // namespace
}  // namespace shardmlp::testing
