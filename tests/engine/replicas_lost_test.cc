// Replicas that are lost in every phase of a step, and that come back: training ends as if nothing had happened.
#include <functional>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/engine/hand_clock.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/replica_set.h"

namespace shardmlp::testing {
namespace {

const AdamW kAdamW{.learning_rate = 0.01};

void SendAndSeal(std::vector<std::unique_ptr<Trainer>>& trainers, const Batch& batch) {
  ASSERT_TRUE(Succeeds(SendParts(trainers, batch)));
  const Reply<SealResult> first = trainers[0]->StartSeal(), second = trainers[1]->StartSeal();
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second.Wait()));
}

// Three replicas; trainers at 0 and 1; 2 is the one that is lost, in step 1 of three.
class LostReplicaTest : public ::testing::TestWithParam<OnLoss> {
 protected:
  LostReplicaTest() {
    replicas_ = std::make_unique<ReplicaSet>(model_, 3, GetParam(), LazyParts(0, device_));
    trainers_ = OpenTrainers(*replicas_, 2);
    TrainStep(trainers_, BatchOf(0), kAdamW);
  }

  Batch BatchOf(int step) const { return Batch(model_, {5, 6}, step); }
  void SendBoth() { ASSERT_TRUE(Succeeds(SendParts(trainers_, BatchOf(1)))); }
  void SealBoth() { SendAndSeal(trainers_, BatchOf(1)); }
  template <typename T>
  static ::testing::AssertionResult Lost(const T& result) {
    return Fails(result, absl::StatusCode::kAborted, Reason::kStepAborted, {"a replica was lost", "rank 2"});
  }

  // The rest of the training; `done`: step 1 has been committed.
  void ExpectAsUndisturbed(bool done) {
    if (GetParam() == OnLoss::kWait) replicas_->Start(2);
    for (int step = done ? 2 : 1; step < 3; ++step) TrainStep(trainers_, BatchOf(step), kAdamW);
    if (GetParam() == OnLoss::kContinue) replicas_->Start(2);
    TrainStep(trainers_, BatchOf(3), kAdamW);
    replicas_->ExpectAlike();
    EXPECT_EQ((*replicas_)[0]->position().step, 4);

    ReplicaSet undisturbed(model_, 3);
    auto trainers = OpenTrainers(undisturbed, 2);
    for (int step = 0; step < 4; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
    EXPECT_EQ(replicas_->WeightsOf(2), undisturbed.WeightsOf(2));
  }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  absl::Notification gate_;
  LazyDevice* device_ = nullptr;  // of replica 0
  std::unique_ptr<ReplicaSet> replicas_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
};

TEST_P(LostReplicaTest, BetweenSteps) {
  replicas_->Kill(2);
  for (int rank = 0; rank < 2 && GetParam() == OnLoss::kContinue; ++rank) {
    while ((*replicas_)[rank]->replica().member_count != 2) std::this_thread::yield();
  }
  ExpectAsUndisturbed(false);
  EXPECT_EQ((*replicas_)[0]->position().attempt, 0) << "there was nothing to do over";
}

TEST_P(LostReplicaTest, WhileRowsAreSent) {
  SendBoth();
  replicas_->Kill(2);
  EXPECT_TRUE(Lost(trainers_[0]->Seal()));
  ExpectAsUndisturbed(false);
}

TEST_P(LostReplicaTest, WhileASealWaits) {
  SendBoth();
  const Reply<SealResult> seal = trainers_[0]->StartSeal();
  replicas_->Kill(2);
  EXPECT_TRUE(Lost(seal.Wait()));
  ExpectAsUndisturbed(false);
}

TEST_P(LostReplicaTest, WhileTheGradientsAreSummed) {
  SendBoth();
  replicas_->hub().Hold();
  const Reply<SealResult> first = trainers_[0]->StartSeal(), second = trainers_[1]->StartSeal();
  for (int rank = 0; rank < 2; ++rank) replicas_->DeliverUntilSumming(rank, *trainers_[rank]);
  replicas_->Kill(2);
  replicas_->hub().Release();
  EXPECT_TRUE(Lost(first.Wait()));
  EXPECT_TRUE(Lost(second.Wait()));
  ExpectAsUndisturbed(false);
}

TEST_P(LostReplicaTest, OnceSealed) {
  SealBoth();
  replicas_->Kill(2);
  EXPECT_TRUE(Lost(trainers_[1]->Commit(kAdamW)));
  ExpectAsUndisturbed(false);
}

TEST_P(LostReplicaTest, OnceTheCommitIsAtOneOfThree) {
  SealBoth();
  replicas_->hub().Hold();
  const CommitSpec commit = trainers_[0]->CommitOf(kAdamW);
  const Reply<StepPosition> first = trainers_[0]->StartCommit(commit);
  replicas_->DeliverUntilStep(0, 2);
  replicas_->Kill(2);
  replicas_->hub().Cut(1);  // what was on the way there is lost
  replicas_->hub().Mend(1);
  EXPECT_FALSE(first.answered()) << "the others don't have it";
  const Reply<StepPosition> again = trainers_[0]->StartCommit(commit);
  replicas_->hub().Release();
  if (GetParam() == OnLoss::kWait) replicas_->Start(2);
  EXPECT_EQ(first.Wait()->step, 2);
  EXPECT_EQ(again.Wait()->step, 2);
  replicas_->AwaitStep(1, 2);
  EXPECT_EQ(trainers_[1]->StartCommit(trainers_[1]->CommitOf(kAdamW)).Wait()->step, 2) << "it got the state from there";
  if (GetParam() == OnLoss::kWait) replicas_->Kill(2);
  ExpectAsUndisturbed(true);
}

TEST_P(LostReplicaTest, WhileTheCommitIsApplied) {
  SealBoth();
  device_->HoldUpdates(gate_);
  const Reply<StepPosition> commit = trainers_[0]->StartCommit(trainers_[0]->CommitOf(kAdamW));
  replicas_->AwaitStep(1, 2);
  replicas_->Kill(2);
  EXPECT_FALSE(commit.answered());
  gate_.Notify();
  if (GetParam() == OnLoss::kWait) replicas_->Start(2);
  EXPECT_EQ(commit.Wait()->step, 2);
  if (GetParam() == OnLoss::kWait) replicas_->Kill(2);
  ExpectAsUndisturbed(true);
}

INSTANTIATE_TEST_SUITE_P(OnLoss, LostReplicaTest, ::testing::Values(OnLoss::kWait, OnLoss::kContinue),
                         [](const auto& info) { return info.param == OnLoss::kWait ? "Wait" : "Continue"; });

class ReplacedReplicaTest : public ::testing::Test {
 protected:
  const TinyModel model_{{OddMlp(DType::kBF16), UngatedMlp(DType::kBF16)}};
  Batch BatchOf(int step) const { return Batch(model_, {5, 6}, step); }

  std::vector<Dense> Undisturbed(int steps) {
    ReplicaSet replicas(model_, 2);
    auto trainers = OpenTrainers(replicas, 2);
    for (int step = 0; step < steps; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
    return replicas.WeightsOf(1);
  }
};

TEST_F(ReplacedReplicaTest, ANewcomerGetsWeightsMastersMomentsAndVersion) {
  ReplicaSet replicas(model_, 2);
  auto trainers = OpenTrainers(replicas, 2);
  for (int step = 0; step < 3; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
  for (int lost = 0; lost < 2; ++lost) {
    trainers[lost] = nullptr;
    replicas.Kill(lost);
    replicas.Start(lost);
    replicas.ExpectAlike();
    trainers[lost] = std::make_unique<Trainer>(*replicas[lost], lost, 2);
    EXPECT_EQ(trainers[lost]->position(), replicas[1 - lost]->position());
    TrainStep(trainers, BatchOf(3 + lost), kAdamW);
  }
  replicas.ExpectAlike();
  EXPECT_EQ(replicas.WeightsOf(0), Undisturbed(5)) << "the masters and moments were the same too";
}

TEST_F(ReplacedReplicaTest, ACommitThatOnlyTheLostOneHadIsDoneOver) {
  ReplicaSet replicas(model_, 2);
  auto trainers = OpenTrainers(replicas, 2);
  TrainStep(trainers, BatchOf(0), kAdamW);
  SendAndSeal(trainers, BatchOf(1));
  replicas.hub().Hold();
  const Reply<StepPosition> told = trainers[0]->StartCommit(trainers[0]->CommitOf(kAdamW));
  const Reply<StepPosition> other = trainers[1]->StartCommit(trainers[1]->CommitOf(kAdamW));
  replicas.DeliverUntilStep(0, 2);
  EXPECT_FALSE(told.answered());
  trainers[0] = nullptr;
  replicas.Kill(0);
  replicas.hub().Release();
  EXPECT_FALSE(other.answered()) << "for all that replica 1 knows, the other has it";
  replicas.Start(0);
  EXPECT_TRUE(Fails(other.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"a replica was lost"}));
  trainers[0] = std::make_unique<Trainer>(*replicas[0], 0, 2);
  EXPECT_EQ(trainers[0]->position().step, 1);
  TrainStep(trainers, BatchOf(1), kAdamW);
  replicas.ExpectAlike();
  EXPECT_EQ(replicas.WeightsOf(0), Undisturbed(2));
}

TEST_F(ReplacedReplicaTest, OneThatIsLostWithItsTrainerEndsTheStepAndBothBeginItAgain) {
  ReplicaSet replicas(model_, 2);
  auto trainers = OpenTrainers(replicas, 2);
  ASSERT_TRUE(Succeeds(SendParts(trainers, BatchOf(0))));
  const Reply<SealResult> seal = trainers[0]->StartSeal();
  trainers[1] = nullptr;
  replicas.Kill(1);
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"a replica was lost"}));
  // Meanwhile rows of the next attempt are taken, and discards and seals wait.
  trainers[0]->CatchUp();
  ASSERT_TRUE(Succeeds(SendPart(*trainers[0], BatchOf(0), 0)));
  const Reply<StepPosition> discard = trainers[0]->StartDiscard();
  EXPECT_FALSE(discard.answered());
  replicas.Start(1);
  ASSERT_TRUE(Succeeds(discard.Wait()));
  EXPECT_EQ(discard.Wait()->attempt, 2);
  trainers[1] = std::make_unique<Trainer>(*replicas[1], 1, 2);
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.ExpectAlike();
  EXPECT_EQ(replicas.WeightsOf(1), Undisturbed(1));
}

TEST_F(ReplacedReplicaTest, RowsThatWereSentMeanwhileCountWhereNothingWasLost) {
  ReplicaSet replicas(model_, 2);
  auto trainers = OpenTrainers(replicas, 1);
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.Kill(1);
  ASSERT_TRUE(Succeeds(SendPart(*trainers[0], BatchOf(1), 0)));
  const Reply<SealResult> seal = trainers[0]->StartSeal();
  EXPECT_FALSE(seal.answered());
  replicas.Start(1);
  ASSERT_TRUE(Succeeds(seal.Wait()));
  ASSERT_TRUE(Succeeds(trainers[0]->Commit(kAdamW)));
  EXPECT_EQ(replicas[0]->position().attempt, 0);
  replicas.ExpectAlike();
}

TEST_F(ReplacedReplicaTest, ASealThatWaitsTooLongForAReplicaSaysSo) {
  HandClock clock;
  ReplicaSet replicas(model_, 2, OnLoss::kWait, ClockedParts(clock, absl::Hours(1), absl::Milliseconds(40)));
  auto trainers = OpenTrainers(replicas, 1);
  replicas.Kill(1);
  const Reply<SealResult> seal = trainers[0]->StartSeal();
  clock.Advance(absl::Milliseconds(40));
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kUnavailable, Reason::kReplicaMissing,
                    {"missing: replicas: rank 1 of 2 missing", "rank 1 was lost"}));
  replicas.Start(1);
  EXPECT_TRUE(Succeeds(trainers[0]->Seal())) << "sent again";
}

TEST_F(ReplacedReplicaTest, ATrainerThatIsLostAtOneEndsTheAttemptAtBoth) {
  HandClock clock;
  ReplicaSet replicas(model_, 2, OnLoss::kWait, ClockedParts(clock, absl::Milliseconds(40), absl::Hours(1)));
  auto trainers = OpenTrainers(replicas, 2);
  ASSERT_TRUE(Succeeds(SendParts(trainers, BatchOf(0))));
  const Reply<SealResult> seal = trainers[0]->StartSeal();
  clock.Advance(absl::Milliseconds(30));
  ASSERT_TRUE(Succeeds(replicas[0]->RenewSession(trainers[0]->session())));
  clock.Advance(absl::Milliseconds(30));
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted,
                    {"trainer rank 1 of run 'run' was lost: its lease ended"}));
  trainers[1] = std::make_unique<Trainer>(*replicas[1], 1, 2);
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.ExpectAlike();
  EXPECT_EQ(replicas.WeightsOf(0), Undisturbed(1));
}

TEST_F(ReplacedReplicaTest, OneWhoseDeviceBreaksLeavesTheOthers) {
  LazyDevice* device = nullptr;
  ReplicaSet replicas(model_, 2, OnLoss::kContinue, LazyParts(1, device));
  auto trainers = OpenTrainers(replicas, 1);
  ASSERT_TRUE(Succeeds(SendPart(*trainers[0], BatchOf(0), 0)));
  device->Break();
  EXPECT_TRUE(Fails(trainers[0]->Seal(), absl::StatusCode::kAborted, Reason::kStepAborted, {"the lazy device broke"}));
  EXPECT_TRUE(Fails(replicas[1]->health(), absl::StatusCode::kInternal, Reason::kDeviceFailed));
  TrainStep(trainers, BatchOf(0), kAdamW);
  EXPECT_EQ(replicas[0]->position().step, 1);
}

}  // namespace
}  // namespace shardmlp::testing
