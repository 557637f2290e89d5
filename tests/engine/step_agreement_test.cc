// What the replicas of a step agree on.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/step_agreement_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

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
  for (Replica* replica : {&zero, &one}) replica->Form({0, 1}, 1);
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
  one_.Remove(2, /*lost=*/false);
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
  one_.Remove(2, /*lost=*/true);
  HearAll();
  EXPECT_TRUE(one_.step.RunUnderWay(3));
  zero_.Remove(1, /*lost=*/false);
  HearAll();
  EXPECT_FALSE(one_.step.RunUnderWay(3)) << "nobody is left who knows more";
}

TEST_F(AgreementTest, OfTwoSessionsOfARankThatOpenAtOnceTheLaterIsRefused) {
  Log log;
  Replica zero(log, 0), one(log, 1);
  for (Replica* replica : {&zero, &one}) replica->Form({0, 1}, 1);
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

// Replica 1 is cut off with trainer 1's session, which then moves to replica 0. Both are together again before that
// session's lease ends, and report in either order.
class MovedTrainerTest : public AgreementTest, public ::testing::WithParamInterface<bool> {
 protected:
  MovedTrainerTest() {
    zero_.Lose();
    one_.Lose(/*heard_all=*/false);
    zero_.Form({0}, 2);
    zero_.Open(3, 1, 2);
    zero_.Hear();
    one_.Miss();
    zero_.Lose();
    Replica& first = GetParam() ? zero_ : one_;
    Replica& second = GetParam() ? one_ : zero_;
    first.Form({0, 1}, 3);
    second.Form({0, 1}, 3);
    HearAll();
  }
};

TEST_P(MovedTrainerTest, IsWhereItCameLastAndNoTwoOfItAreCounted) {
  EXPECT_TRUE(Fails(one_.Add(2, 4), absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                    {"rank 1 of run 'run'", "replica 0"}));
  EXPECT_TRUE(Fails(one_.Seal(2)->result, absl::StatusCode::kFailedPrecondition, Reason::kRunConflict));
  ASSERT_TRUE(Succeeds(zero_.Add(1, 5)));
  ASSERT_TRUE(Succeeds(zero_.Add(3, 6)));
  const auto seal = zero_.Seal(1, {{0, 5}});
  HearAll();
  EXPECT_THAT(one_.device.asked, Not(Contains("sum"))) << "it has not sealed where it is";
  const auto moved = zero_.Seal(3, {{0, 6}});
  HearAll();
  zero_.Sum({4, 9});
  one_.Sum({4, 9});
  HearAll();
  ASSERT_TRUE(Succeeds(seal->result));
  EXPECT_EQ(moved->result->rows, (LayerRows{{0, 11}}));
}

INSTANTIATE_TEST_SUITE_P(Orders, MovedTrainerTest, ::testing::Bool());

}  // namespace
}  // namespace shardmlp::testing
