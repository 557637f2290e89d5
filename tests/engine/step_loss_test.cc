// Steps of replicas of which one is lost, or cut off: who knows what was committed, and what waits for that.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/step_agreement_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;

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
  zero_.step.Formed(1, {0}, outbox);
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
    zero_.step.Formed(1, {0}, outbox);
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

}  // namespace
}  // namespace shardmlp::testing
