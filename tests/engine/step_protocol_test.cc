// A step that goes well, and every message of it sent twice.
#include "server/engine/step_protocol.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/step_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(StepTest, OneTrainerSealsAndCommits) {
  EXPECT_EQ(step_.position(), (StepPosition{0, 0, 1}));
  Connect(1, 1);
  EXPECT_EQ(*Add(1, 4), LedgerVerdict::kAdd);
  EXPECT_EQ(*Add(1, 2, /*layer=*/5), LedgerVerdict::kAdd);

  const SealAnswer seal = Seal(1, {{0, 4}, {5, 2}});
  EXPECT_THAT(device_.asked, ElementsAre("sum"));
  EXPECT_EQ(seal->count, 0) << "the sums are not known yet";
  Sum();
  ASSERT_TRUE(Succeeds(seal->result));
  EXPECT_EQ(seal->count, 1);
  EXPECT_THAT(seal->result->tensor_sums_of_squares, ElementsAre(4, 9));
  EXPECT_TRUE(seal->result->finite);
  EXPECT_EQ(seal->result->rows, (LayerRows{{0, 4}, {5, 2}}));

  const PositionAnswer commit = Commit(1);
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply"));
  EXPECT_EQ(device_.decision->gradient_scale, 0.25);
  EXPECT_EQ(commit->count, 0) << "the weights are not new yet";
  Apply();
  ASSERT_TRUE(Succeeds(commit->result));
  EXPECT_EQ(*commit->result, (StepPosition{1, 0, 2}));
  EXPECT_EQ(step_.position(), (StepPosition{1, 0, 2}));
}

TEST_F(StepTest, StepTwoBeginsEmpty) {
  Connect(1, 1);
  CommitOne();
  EXPECT_FALSE(step_.trainers()[0].sealed);
  EXPECT_TRUE(Fails(Seal(1, {{0, 4}})->result, absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch));
  CommitOne();
  EXPECT_EQ(step_.position(), (StepPosition{2, 0, 3}));
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply", "sum", "apply"));
}

TEST_F(StepTest, WhatForwardsLeftGoesWithTheWeights) {
  Connect(1, 1);
  CommitOne();
  EXPECT_EQ(device_.stash_releases, 1);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  Discard(1);
  EXPECT_EQ(device_.stash_releases, 1) << "the weights are the same";
  Restore(0);
  EXPECT_EQ(device_.stash_releases, 2);
}

TEST_F(StepTest, ASealWaitsForEveryTrainer) {
  Connect(3, 3);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  ASSERT_TRUE(Succeeds(Add(3, 3)));
  const SealAnswer first = Seal(1, {{0, 4}});
  const SealAnswer third = Seal(3, {{0, 3}});
  EXPECT_THAT(device_.asked, IsEmpty());
  EXPECT_TRUE(step_.trainers()[0].sealed);
  EXPECT_FALSE(step_.trainers()[1].sealed);
  const SealAnswer second = Seal(2);  // saw no token, and joins all the same
  EXPECT_THAT(device_.asked, ElementsAre("sum"));
  Sum();
  for (const SealAnswer& seal : {first, second, third}) {
    EXPECT_EQ(seal->count, 1);
    ASSERT_TRUE(Succeeds(seal->result));
    EXPECT_EQ(seal->result->rows, (LayerRows{{0, 7}}));
  }
}

TEST_F(StepTest, ASealWaitsForATrainerThatIsNotConnectedYet) {
  Connect(1, 2);
  const SealAnswer first = Seal(1);
  EXPECT_THAT(device_.asked, IsEmpty());
  Connect(2, 2);  // the second; the first is there already
  Seal(2);
  Sum();
  EXPECT_TRUE(Succeeds(first->result));
}

TEST_F(StepTest, RowsThatWereSaidAndNotCountedAreNamedByLayer) {
  Connect(1, 1);
  ASSERT_TRUE(Succeeds(Add(1, 4, 0)));
  ASSERT_TRUE(Succeeds(Add(1, 2, 5)));
  const auto refused = [&](const LayerRows& rows, std::initializer_list<absl::string_view> named) {
    EXPECT_TRUE(Fails(Seal(1, rows)->result, absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch, named));
    EXPECT_FALSE(step_.trainers()[0].sealed);
  };
  refused({{0, 3}, {5, 2}}, {"layer 0: sent 3, counted 4"});
  refused({{0, 4}, {5, 3}}, {"layer 5: sent 3, counted 2"});
  refused({{0, 4}}, {"layer 5: sent 0, counted 2"});
  refused({{0, 4}, {5, 2}, {9, 1}}, {"layer 9: sent 1, counted 0"});
  EXPECT_THAT(device_.asked, IsEmpty());
  Seal(1, {{0, 4}, {5, 2}, {9, 0}});
  EXPECT_THAT(device_.asked, ElementsAre("sum"));
}

TEST_F(StepTest, RowsOfOneTrainerDoNotMakeUpForAnothers) {
  Connect(2, 2);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  EXPECT_TRUE(Fails(Seal(2, {{0, 4}})->result, absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch,
                    {"sent 4, counted 0"}));
}

::testing::AssertionResult IsReplaced(const std::shared_ptr<Answer<SealResult>>& seal) {
  return Fails(seal->result, absl::StatusCode::kCancelled, Reason::kCancelled, {"later seal of session 1"});
}

TEST_F(StepTest, OneSealOfASessionWaitsHoweverOftenItIsSent) {
  Connect(2, 2);
  std::vector<SealAnswer> seals;
  for (int i = 0; i < 100; ++i) seals.push_back(Seal(1));
  const SealAnswer last = seals.back();
  seals.pop_back();
  for (const SealAnswer& seal : seals) EXPECT_TRUE(IsReplaced(seal));
  EXPECT_EQ(last->count, 0);
  const SealAnswer second = Seal(2);
  Sum();
  EXPECT_TRUE(Succeeds(last->result));
  EXPECT_TRUE(Succeeds(second->result)) << "another session's seal replaces none";
}

TEST_F(StepTest, ASealMayBeRepeatedAtAnyTime) {
  Connect(2, 2);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  const StepPosition at = step_.position();
  const LayerRows rows = {{0, 4}};
  const SealAnswer waiting = Seal(1, rows);
  Seal(2);
  const SealAnswer summing = Seal(1, rows);
  EXPECT_TRUE(IsReplaced(waiting));
  EXPECT_THAT(device_.asked, ElementsAre("sum"));
  Sum();
  const SealAnswer sealed = Seal(1, rows);
  Commit(2);
  const SealAnswer applying = Seal(1, rows);
  Apply();
  const SealAnswer committed = Seal(1, rows, at);
  for (const SealAnswer& seal : {summing, sealed, applying, committed}) {
    EXPECT_EQ(seal->count, 1);
    ASSERT_TRUE(Succeeds(seal->result));
    EXPECT_THAT(seal->result->tensor_sums_of_squares, ElementsAre(4, 9));
    EXPECT_EQ(seal->result->rows, rows);
  }
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply"));
  EXPECT_EQ(step_.position().step, 1) << "the repeat of an old seal seals nothing new";
}

TEST_F(StepTest, WhoHasSealedAddsNothingMore) {
  Connect(2, 2);
  const Contribution counted = {1, 77, 0, 4, 0, 4, 1};
  ASSERT_TRUE(Succeeds(Admit(counted, {0, 0, 1})));
  Seal(1, {{0, 4}});
  EXPECT_TRUE(Fails(Add(1, 2), absl::StatusCode::kFailedPrecondition, Reason::kAlreadySealed));
  EXPECT_EQ(*Admit(counted, {0, 0, 1}), LedgerVerdict::kRepeat) << "the answer may have been lost";
  EXPECT_EQ(*Add(2, 3), LedgerVerdict::kAdd) << "the other trainer has not sealed";
  Seal(2, {{0, 3}});
  Sum();
  EXPECT_TRUE(Fails(Add(2, 3), absl::StatusCode::kFailedPrecondition, Reason::kAlreadySealed));
}

TEST_F(StepTest, ATileIsPartOfTheStepFromTheMomentItIsAdmitted) {
  // The tile is on its way to the device when its session, which gave up on the call, seals without it.
  Connect(1, 1);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  EXPECT_TRUE(
      Fails(Seal(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch, {"sent 0, counted 4"}));
  EXPECT_THAT(device_.asked, IsEmpty());
}

TEST_F(StepTest, OnlyTheOpenAttemptOfAKnownTrainerTakesTiles) {
  Connect(1, 1);
  EXPECT_TRUE(Fails(Add(9, 4), absl::StatusCode::kNotFound, Reason::kUnknownSession, {"session 9"}));
  EXPECT_TRUE(Fails(step_.CheckOpen(1, 0), absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt, {"step 1"}));
  EXPECT_TRUE(
      Fails(step_.CheckOpen(0, 1), absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt, {"attempt 1"}));
  Discard(1);
  EXPECT_TRUE(Fails(step_.CheckOpen(0, 0), absl::StatusCode::kAborted, Reason::kStepAborted,
                    {"the loss overflowed", "attempt 1 is open"}));
  EXPECT_TRUE(Succeeds(step_.CheckOpen(0, 1)));
  EXPECT_TRUE(Fails(Admit({1, 5, 0, 4, 0, 4, 1}, {0, 0, 1}), absl::StatusCode::kAborted, Reason::kStepAborted));
}

TEST_F(StepTest, ACommitBeforeAllHaveSealedNamesWhoIsMissing) {
  Connect(2, 3);
  Seal(1);
  EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNotSealed,
                    {"rank 1, rank 2 (not connected)"}));
  Connect(3, 3);
  for (int64_t session = 1; session <= 3; ++session) Seal(session);
  EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNotSealed, {"being summed"}));
  EXPECT_THAT(device_.asked, ElementsAre("sum"));
}

TEST_F(StepTest, ACommitMayBeRepeatedByAnyTrainerAndIsAppliedOnce) {
  Connect(2, 2);
  Seal(1);
  Seal(2);
  Sum();
  const StepPosition at = step_.position();
  const PositionAnswer first = Commit(1);
  const PositionAnswer again = Commit(1);
  const PositionAnswer others = Commit(2);
  EXPECT_EQ(first->count + again->count + others->count, 0);
  Apply();
  const PositionAnswer late = Commit(CommitOf(2, at));
  for (const PositionAnswer& commit : {first, again, others, late}) {
    EXPECT_EQ(commit->count, 1);
    ASSERT_TRUE(Succeeds(commit->result));
    EXPECT_EQ(*commit->result, (StepPosition{1, 0, 2}));
  }
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply"));
}

TEST_F(StepTest, ACommitWithOtherHyperparametersIsRefusedAndTheFirstStands) {
  Connect(2, 2);
  Seal(1);
  Seal(2);
  Sum();
  const StepPosition at = step_.position();
  CommitSpec other_scale = CommitOf(2, at);
  other_scale.gradient_scale = 0.5;
  const CommitSpec other_rate = CommitOf(2, at, /*learning_rate=*/0.125);
  CommitSpec other_optimizer = CommitOf(2, at);
  other_optimizer.groups[0].hyperparameters = AdamW{.learning_rate = 0.5};
  const PositionAnswer first = Commit(1);
  for (int applied = 0; applied < 2; ++applied) {
    for (const CommitSpec& other : {other_scale, other_rate, other_optimizer}) {
      EXPECT_TRUE(
          Fails(Commit(other)->result, absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict, {"step 0"}));
    }
    EXPECT_TRUE(
        Fails(Discard(2, at)->result, absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict, {"step 0"}));
    if (applied == 0) Apply();
  }
  EXPECT_EQ(*first->result, (StepPosition{1, 0, 2}));
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply"));
}

TEST_F(StepTest, WhatWasNotFiniteIsNamedAndCanOnlyBeDiscarded) {
  Connect(1, 1);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  EXPECT_EQ(*Add(1, 4, 0, "rank 0, row 3"), LedgerVerdict::kAdd) << "it is counted, so that the seal adds up";
  ASSERT_TRUE(Succeeds(Add(1, 4, 0, "rank 0, row 9")));
  const SealAnswer seal = Seal(1, {{0, 12}});
  Sum();
  ASSERT_TRUE(Succeeds(seal->result));
  EXPECT_FALSE(seal->result->finite);
  EXPECT_EQ(seal->result->non_finite_origin, "rank 0, row 3") << "the first";
  EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNonFinite, {"rank 0, row 3"}));
  EXPECT_TRUE(Succeeds(Discard(1)->result));
  EXPECT_THAT(device_.asked, ElementsAre("sum", "clear"));
  const SealAnswer redone = Seal(1);
  Sum();
  EXPECT_TRUE(redone->result->finite);
}

TEST_F(StepTest, AGradientThatOverflowsIsNamedByItsTensor) {
  Connect(1, 1);
  for (const double overflow : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const SealAnswer seal = Seal(1);
    Sum(std::vector<double>{4, overflow});
    EXPECT_FALSE(seal->result->finite);
    EXPECT_EQ(seal->result->non_finite_origin, "the gradient of down");
    EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNonFinite, {"down"}));
    Discard(1);
  }
}

TEST_F(StepTest, WhoTakesPartInNoStepIsTold) {
  // A reader, or anyone on a frozen server.
  EXPECT_TRUE(Fails(Seal(5)->result, absl::StatusCode::kFailedPrecondition, Reason::kFrozen, {"session 5"}));
  EXPECT_TRUE(Fails(Commit(5)->result, absl::StatusCode::kFailedPrecondition, Reason::kFrozen));
  EXPECT_TRUE(Fails(Discard(5)->result, absl::StatusCode::kFailedPrecondition, Reason::kFrozen));
  EXPECT_EQ(step_.position(), (StepPosition{0, 0, 1}));
}

TEST_F(StepTest, ARunIsUnderWayForWhoeverWasAwayWhileItCommitted) {
  Connect(2, 2);
  EXPECT_FALSE(step_.RunUnderWay(2)) << "it opened late, and nothing was committed";
  Seal(1);
  Seal(2);
  Sum();
  Commit(1);
  Apply();
  EXPECT_TRUE(step_.RunUnderWay(3));
  Leave(2, /*lost=*/true);
  AddTrainer(3, {"run", SessionRole::kTrain, 2, 1});
  EXPECT_TRUE(step_.RunUnderWay(3));
  Leave(1, /*lost=*/false);
  EXPECT_FALSE(step_.RunUnderWay(3)) << "nobody is left who knows more";
}

TEST_F(StepTest, TrainersAreListedByRank) {
  AddTrainer(5, {"run", SessionRole::kTrain, 2, 1});
  AddTrainer(9, {"run", SessionRole::kTrain, 2, 0});
  Seal(5);
  const std::vector<TrainerStatus> trainers = step_.trainers();
  ASSERT_EQ(trainers.size(), 2u);
  EXPECT_EQ(trainers[0].spec.trainer_rank, 0);
  EXPECT_FALSE(trainers[0].sealed);
  EXPECT_EQ(trainers[1].spec.trainer_rank, 1);
  EXPECT_TRUE(trainers[1].sealed);
}

}  // namespace
}  // namespace shardmlp::testing
