// Attempts that end early: discarded, lost, timed out, failed, restored, stopped.
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/step_protocol.h"
#include "tests/engine/step_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

::testing::AssertionResult IsAborted(const absl::StatusOr<SealResult>& result, absl::string_view why) {
  return Fails(result, absl::StatusCode::kAborted, Reason::kStepAborted, {why});
}

TEST_F(StepTest, ADiscardClearsAndRaisesTheAttempt) {
  Connect(1, 1);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  const PositionAnswer discard = Discard(1);
  ASSERT_TRUE(Succeeds(discard->result));
  EXPECT_EQ(*discard->result, (StepPosition{0, 1, 1})) << "the weights are the same";
  EXPECT_THAT(device_.asked, ElementsAre("clear"));
  EXPECT_TRUE(Fails(Seal(1, {{0, 4}})->result, absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch))
      << "the ledger is empty";
}

TEST_F(StepTest, ADiscardAnswersTheSealsThatWait) {
  Connect(2, 2);
  const SealAnswer seal = Seal(1);
  Discard(2);
  EXPECT_EQ(seal->count, 1);
  EXPECT_TRUE(IsAborted(seal->result, "discarded by trainer rank 1: the loss overflowed"));
  EXPECT_FALSE(step_.trainers()[0].sealed);
}

TEST_F(StepTest, ADiscardWhileTheGradientsAreSummedMakesTheSumsMeaningless) {
  Connect(1, 1);
  const SealAnswer seal = Seal(1);
  Discard(1);
  Sum();
  EXPECT_EQ(seal->count, 1);
  EXPECT_TRUE(IsAborted(seal->result, "discarded"));
  EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNotSealed));
  // Nor are they taken for the next attempt's.
  const StepPosition old = device_.summing;
  const SealAnswer next = Seal(1);
  device_.summing = old;
  Sum();
  EXPECT_EQ(next->count, 0);
}

TEST_F(StepTest, ASealedStepMayBeDiscarded) {
  Connect(1, 1);
  SealOne();
  EXPECT_TRUE(Succeeds(Discard(1)->result));
  EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNotSealed));
  EXPECT_THAT(device_.asked, ElementsAre("sum", "clear"));
}

TEST_F(StepTest, ADiscardThatIsRepeatedDiscardsOnce) {
  Connect(2, 2);
  const StepPosition at = step_.position();
  EXPECT_EQ(*Discard(1, at)->result, (StepPosition{0, 1, 1}));
  EXPECT_EQ(*Discard(1, at)->result, (StepPosition{0, 1, 1}));
  EXPECT_EQ(*Discard(2, at)->result, (StepPosition{0, 1, 1}));
  EXPECT_THAT(device_.asked, ElementsAre("clear"));
  EXPECT_TRUE(Fails(Discard(1, {0, 2, 1})->result, absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt))
      << "an attempt that never was";
}

TEST_F(StepTest, SealsAndCommitsOfAnAttemptThatIsOverAreAborted) {
  Connect(1, 1);
  const StepPosition old = step_.position();
  Discard(1);
  EXPECT_TRUE(IsAborted(Seal(1, {}, old)->result, "discarded"));
  EXPECT_TRUE(Fails(Commit(CommitOf(1, old))->result, absl::StatusCode::kAborted, Reason::kStepAborted));
}

// Trainer 2 of 2 leaves; trainer 1 stays. In which cases does the attempt end?
class LeavingTest : public StepTest {
 protected:
  LeavingTest() { Connect(2, 2); }
  bool EndedBy(bool lost) {
    const int64_t attempt = step_.position().attempt;
    Leave(2, lost);
    EXPECT_EQ(step_.trainers().size(), 1u);
    return step_.position().attempt > attempt;
  }
};

TEST_F(LeavingTest, BetweenStepsNothingIsLost) {
  EXPECT_FALSE(EndedBy(/*lost=*/true));
  EXPECT_THAT(device_.asked, IsEmpty());
}

TEST_F(LeavingTest, WithGradientsOfItsOwn) {
  ASSERT_TRUE(Succeeds(Add(2, 4)));
  EXPECT_TRUE(EndedBy(/*lost=*/false));
  EXPECT_THAT(device_.asked, ElementsAre("clear"));
}

TEST_F(LeavingTest, WithASealAlone) {
  Seal(2);
  EXPECT_TRUE(EndedBy(/*lost=*/false));
}

TEST_F(LeavingTest, LostWhileOthersAreInMidStep) {
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  EXPECT_TRUE(EndedBy(/*lost=*/true));
}

TEST_F(LeavingTest, ClosedBeforeItTookPart) {
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  const SealAnswer seal = Seal(1, {{0, 4}});
  EXPECT_FALSE(EndedBy(/*lost=*/false));
  EXPECT_EQ(seal->count, 0) << "the rank may come back and seal";
  AddTrainer(3, {"run", SessionRole::kTrain, 2, 1});
  Seal(3);
  Sum();
  EXPECT_TRUE(Succeeds(seal->result));
}

TEST_F(LeavingTest, LostWhileAnotherWaitsForItsSeal) {
  const SealAnswer seal = Seal(1);
  EXPECT_TRUE(EndedBy(/*lost=*/true));
  EXPECT_EQ(seal->count, 1);
  EXPECT_TRUE(IsAborted(seal->result, "trainer rank 1 of run 'run' was lost"));
}

TEST_F(LeavingTest, LostWhileTheGradientsAreSummed) {
  const SealAnswer first = Seal(1);
  const SealAnswer second = Seal(2);
  EXPECT_TRUE(EndedBy(/*lost=*/true));
  EXPECT_TRUE(IsAborted(first->result, "lost"));
  Sum();
  EXPECT_EQ(first->count, 1);
  EXPECT_EQ(second->count, 1);
  EXPECT_THAT(device_.asked, ElementsAre("sum", "clear"));
}

TEST_F(LeavingTest, LostOnceSealed) {
  Seal(1);
  Seal(2);
  Sum();
  const StepPosition at = step_.position();
  EXPECT_TRUE(EndedBy(/*lost=*/true));
  EXPECT_TRUE(Fails(Commit(CommitOf(1, at))->result, absl::StatusCode::kAborted, Reason::kStepAborted,
                    {"trainer rank 1", "lost"}));
}

TEST_F(LeavingTest, ADecidedStepIsAppliedWhoeverIsLeft) {
  Seal(1);
  Seal(2);
  Sum();
  const PositionAnswer commit = Commit(2);
  EXPECT_FALSE(EndedBy(/*lost=*/true));
  Apply();
  EXPECT_EQ(*commit->result, (StepPosition{1, 0, 2}));
  EXPECT_EQ(*Commit(CommitOf(1, {0, 0, 1}))->result, (StepPosition{1, 0, 2}));
}

TEST_F(StepTest, SealsThatWaitTooLongNameWhoIsMissing) {
  Connect(3, 4);
  const SealAnswer early = Seal(1);
  now_ += kSealTimeout / 2;
  const SealAnswer late = Seal(2);
  now_ += kSealTimeout / 2 - absl::Nanoseconds(1);
  Expire();
  EXPECT_EQ(early->count, 0);
  now_ += absl::Nanoseconds(1);
  Expire();
  EXPECT_TRUE(Fails(early->result, absl::StatusCode::kUnavailable, Reason::kTrainerMissing,
                    {"5m", "rank 2, rank 3 (not connected)"}));
  EXPECT_EQ(late->count, 0) << "each waits its own time";
  now_ += kSealTimeout;
  Expire();
  EXPECT_EQ(early->count, 1);
  EXPECT_EQ(late->count, 1);
  // Nothing was lost: the others may still seal, and the first asks again.
  Connect(4, 4);
  for (int64_t session = 1; session <= 4; ++session) Seal(session);
  Sum();
  EXPECT_TRUE(Succeeds(Seal(1)->result));
}

TEST_F(StepTest, NoSealTimesOutForALongSum) {
  Connect(1, 1);
  const SealAnswer seal = Seal(1);
  now_ += 2 * kSealTimeout;
  Expire();
  EXPECT_EQ(seal->count, 0);
  Sum();
  EXPECT_TRUE(Succeeds(seal->result));
}

TEST_F(StepTest, SumsThatFailEndTheAttempt) {
  Connect(1, 1);
  const SealAnswer seal = Seal(1);
  Sum(absl::UnavailableError("a replica died"));
  EXPECT_TRUE(IsAborted(seal->result, "a replica died"));
  EXPECT_EQ(step_.position(), (StepPosition{0, 1, 1}));
  EXPECT_THAT(device_.asked, ElementsAre("sum", "clear"));
}

TEST_F(StepTest, ACommitThatFailsIsAnsweredAndSoIsItsRepeat) {
  Connect(1, 1);
  SealOne();
  const StepPosition at = step_.position();
  const PositionAnswer commit = Commit(1);
  Apply(Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, "the device failed: ECC"));
  EXPECT_TRUE(Fails(commit->result, absl::StatusCode::kInternal, Reason::kDeviceFailed, {"ECC"}));
  EXPECT_EQ(step_.position(), (StepPosition{0, 1, 1}));
  const PositionAnswer again = Commit(CommitOf(1, at));
  EXPECT_EQ(again->count, 1);
  EXPECT_TRUE(Fails(again->result, absl::StatusCode::kAborted, Reason::kStepAborted, {"could not be applied", "ECC"}));
}

TEST_F(StepTest, ARestoreTakesTheCheckpointsStepAndNeverLowersTheAttempt) {
  Connect(1, 1);
  for (int i = 0; i < 3; ++i) CommitOne();
  Discard(1);
  EXPECT_EQ(step_.position(), (StepPosition{3, 1, 4}));
  Restore(1);
  EXPECT_EQ(step_.position(), (StepPosition{1, 2, 5}));
  EXPECT_TRUE(Fails(step_.CheckOpen(3, 1), absl::StatusCode::kAborted, Reason::kStepAborted,
                    {"a checkpoint was restored", "step 1 attempt 2 is open"}));
  CommitOne();
  EXPECT_EQ(step_.position(), (StepPosition{2, 2, 6}));
}

TEST_F(StepTest, AStepThatIsNotTheOpenOneAnyMoreIsNotSaidToBeDiscarded) {
  Connect(1, 1);
  CommitOne();
  const StepPosition at = step_.position();
  Restore(0);
  EXPECT_TRUE(Fails(Discard(1, at)->result, absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt,
                    {"step 1 can't be discarded", "step 0 is open"}));
}

TEST_F(StepTest, ARestoreEndsTheAttemptInEveryPhase) {
  Connect(1, 1);
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  Restore(0);
  const SealAnswer summing = Seal(1);
  Restore(0);
  Sum();
  EXPECT_TRUE(IsAborted(summing->result, "restored"));
  SealOne();
  Restore(0);
  EXPECT_TRUE(Fails(Commit(1)->result, absl::StatusCode::kFailedPrecondition, Reason::kNotSealed));
  EXPECT_EQ(step_.position(), (StepPosition{0, 3, 4}));
}

TEST_F(StepTest, ARestoreCountsAsAnAbortedStepWhereItEndsOne) {
  const auto aborted = [this](int count) {
    return absl::StrContains(metrics_.Text(), absl::StrCat("shardmlp_steps_total{outcome=\"aborted\"} ", count, "\n"));
  };
  Restore(4);  // as a server that starts from a checkpoint
  Connect(1, 2);
  Restore(4);
  EXPECT_TRUE(aborted(0)) << metrics_.Text();
  ASSERT_TRUE(Succeeds(Add(1, 4)));
  Restore(4);
  EXPECT_TRUE(aborted(1)) << metrics_.Text();
  Seal(1);
  now_ += kSealTimeout;
  Expire();
  Restore(4);
  EXPECT_TRUE(aborted(2)) << "its seal gave up waiting, and stands";
}

TEST_F(StepTest, AStepThatIsNotFiniteIsCountedOnce) {
  const auto counted = [this](int count) {
    return absl::StrContains(metrics_.Text(), absl::StrCat("shardmlp_non_finite_steps_total ", count, "\n"));
  };
  Connect(1, 1);
  for (int tile = 0; tile < 3; ++tile) ASSERT_TRUE(Succeeds(Add(1, 4, 0, "rank 0, row 3")));
  Seal(1, {{0, 12}});
  Sum(std::vector<double>{NAN, NAN});
  EXPECT_TRUE(counted(1)) << metrics_.Text();
  Discard(1);
  Seal(1);
  Sum(std::vector<double>{NAN, NAN});
  EXPECT_TRUE(counted(2)) << metrics_.Text();
}

TEST_F(StepTest, ARestoreThatComesWhileACommitIsAppliedWaitsForIt) {
  Connect(1, 1);
  SealOne();
  const PositionAnswer commit = Commit(1);
  auto [restore, done] = Expected<StepPosition>();
  {
    Outbox outbox;
    step_.Restore({"old", "1"}, std::move(done), outbox);
  }
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply"))
      << "the gradients are for the weights before the checkpoint's";
  Apply();
  EXPECT_EQ(*commit->result, (StepPosition{1, 0, 2}));
  EXPECT_THAT(device_.asked, ElementsAre("sum", "apply", "restore old of 0"));
  EXPECT_EQ(restore->count, 0);
  {
    Outbox outbox;
    step_.Restored({"old", "1"}, 7, outbox);
  }
  EXPECT_EQ(*restore->result, (StepPosition{7, 1, 3}));
  CommitOne();
  EXPECT_EQ(step_.position(), (StepPosition{8, 1, 4}));
}

TEST_F(StepTest, StoppingAnswersWhoeverWaits) {
  Connect(2, 2);
  const SealAnswer seal = Seal(1);
  {
    Outbox outbox;
    step_.Stop(absl::UnavailableError("the server is shutting down"), outbox);
    EXPECT_EQ(seal->count, 0) << "answers go out when the outbox does, after the lock";
  }
  EXPECT_EQ(seal->count, 1);
  EXPECT_THAT(seal->result.status().message(), HasSubstr("shutting down"));
  Seal(1);
  Seal(2);
  Sum();
  const PositionAnswer commit = Commit(1);
  {
    Outbox outbox;
    step_.Stop(absl::UnavailableError("the server is shutting down"), outbox);
  }
  EXPECT_EQ(commit->count, 1);
  Apply();
  EXPECT_EQ(commit->count, 1);
}

}  // namespace
}  // namespace shardmlp::testing
