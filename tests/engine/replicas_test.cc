// N engines that are replicas are one engine that saw the whole batch.
#include <cmath>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/replica_set.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

const Sgd kSgd{.learning_rate = 1};
const AdamW kAdamW{.learning_rate = 0.01};

TinyModel ModelOf(DType dtype) { return TinyModel({OddMlp(dtype), UngatedMlp(dtype)}); }

struct SetCase {
  int replicas;
  std::vector<int64_t> rows;  // of each trainer
};

class ReplicasTest : public ::testing::TestWithParam<SetCase> {
 protected:
  static void ExpectOneEngines(DType dtype, double bound) {
    const TinyModel model = ModelOf(dtype);
    ReplicaSet replicas(model, GetParam().replicas);
    ExpectAsOneEngine(replicas, model, GetParam().rows, bound);
  }
};

TEST_P(ReplicasTest, AreOneEngineThatSawTheWholeBatchInF64) { ExpectOneEngines(DType::kF64, 1e-12); }
TEST_P(ReplicasTest, AreOneEngineThatSawTheWholeBatchInF32) { ExpectOneEngines(DType::kF32, 1e-5); }

std::vector<SetCase> SetCases() {
  std::vector<SetCase> cases;
  for (int replicas = 1; replicas <= 4; ++replicas) {
    for (const std::vector<int64_t>& rows :
         std::vector<std::vector<int64_t>>{{9}, {5, 0}, {7, 0, 3}, {0, 11, 2, 1}, {4, 1, 0, 9, 2}}) {
      cases.push_back({replicas, rows});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Sets, ReplicasTest, ::testing::ValuesIn(SetCases()), [](const auto& info) {
  return absl::StrCat(info.param.replicas, "ReplicasOf", info.param.rows.size(), "Trainers");
});

class TwoReplicasTest : public ::testing::Test {
 protected:
  const TinyModel model_ = ModelOf(DType::kF64);
  ReplicaSet replicas_{model_, 2};
  std::vector<std::unique_ptr<Trainer>> trainers_ = OpenTrainers(replicas_, 2);
  const Batch batch_{model_, {5, 6}, 1};

  void SendBoth() { ASSERT_TRUE(Succeeds(SendParts(trainers_, batch_))); }
};

TEST_F(TwoReplicasTest, StartFromTheVersionOfOne) {
  EXPECT_EQ(replicas_[0]->position(), (StepPosition{0, 0, 1001}));
  EXPECT_EQ(replicas_[1]->position(), (StepPosition{0, 0, 1001}));
}

TEST_F(TwoReplicasTest, TheSealIsOfBothAndTheSameAtBoth) {
  SendBoth();
  const Reply<SealResult> first = trainers_[0]->StartSeal();
  EXPECT_FALSE(first.answered()) << "the other replica's trainer has not sealed";
  const absl::StatusOr<SealResult> second = trainers_[1]->Seal();
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second));
  EXPECT_EQ(first.Wait()->tensor_sums_of_squares, second->tensor_sums_of_squares);
  EXPECT_EQ(second->rows, (LayerRows{{10, 11}, {13, 11}}));
}

TEST_F(TwoReplicasTest, ADiscardAtOneEndsTheAttemptAtBoth) {
  SendBoth();
  const Reply<SealResult> seal = trainers_[0]->StartSeal();
  ASSERT_TRUE(Succeeds(trainers_[1]->Discard()));
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"discarded by trainer rank 1"}));
  EXPECT_EQ(replicas_[0]->position().attempt, 1);
  EXPECT_EQ(replicas_[1]->position().attempt, 1);
  TrainStep(trainers_, batch_, kSgd);
  replicas_.ExpectAlike();
}

TEST_F(TwoReplicasTest, ATrainerThatLeavesOneInMidStepEndsTheAttemptAtBoth) {
  SendBoth();
  const Reply<SealResult> seal = trainers_[0]->StartSeal();
  ASSERT_TRUE(Succeeds(replicas_[1]->CloseSession(trainers_[1]->session())));
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"trainer rank 1", "closed"}));
  trainers_[1] = std::make_unique<Trainer>(*replicas_[1], 1, 2);
  TrainStep(trainers_, batch_, kSgd);
  replicas_.ExpectAlike();
}

TEST_F(TwoReplicasTest, WhatIsNotFiniteAtOneIsSoAtBothAndNamed) {
  Batch bad = batch_;
  bad.dy[1][0].at(3, 2) = NAN;
  ASSERT_TRUE(Succeeds(SendPart(*trainers_[0], bad, 0)));
  ASSERT_TRUE(Succeeds(SendPart(*trainers_[1], bad, 1)));
  const Reply<SealResult> first = trainers_[0]->StartSeal(), second = trainers_[1]->StartSeal();
  for (const Reply<SealResult>& seal : {first, second}) {
    ASSERT_TRUE(Succeeds(seal.Wait()));
    EXPECT_FALSE(seal.Wait()->finite);
    EXPECT_THAT(seal.Wait()->non_finite_origin, ::testing::HasSubstr("trainer rank 1"));
  }
  EXPECT_TRUE(Fails(trainers_[0]->Commit(), absl::StatusCode::kFailedPrecondition, Reason::kNonFinite));
  ASSERT_TRUE(Succeeds(trainers_[0]->Discard()));
  TrainStep(trainers_, batch_, kSgd);
  replicas_.ExpectAlike();
}

TEST_F(TwoReplicasTest, ARankOrARunThatIsAtTheOtherIsRefusedByName) {
  TrainStep(trainers_, batch_, kSgd);  // so that each has heard of the other's trainer
  EXPECT_TRUE(Fails(replicas_[0]->OpenSession({"run", SessionRole::kTrain, 2, 1}),
                    absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                    {"rank 1 of run 'run' is at replica 1"}));
  ASSERT_TRUE(Succeeds(replicas_[0]->CloseSession(trainers_[0]->session())));
  EXPECT_TRUE(Fails(replicas_[0]->OpenSession({"other", SessionRole::kTrain, 1, 0}),
                    absl::StatusCode::kFailedPrecondition, Reason::kRunConflict, {"run 'run' trains at replica 1"}));
  EXPECT_TRUE(Fails(replicas_[0]->OpenSession({"run", SessionRole::kTrain, 3, 0}),
                    absl::StatusCode::kFailedPrecondition, Reason::kRunConflict, {"has 2 trainers at replica 1"}));
  EXPECT_TRUE(Succeeds(replicas_[0]->OpenSession({"run", SessionRole::kTrain, 2, 0})));
  EXPECT_TRUE(Succeeds(replicas_[0]->OpenSession({"", SessionRole::kRead}))) << "readers go anywhere";
}

TEST_F(TwoReplicasTest, TheFirstCommitStandsWhicheverReplicaItCameTo) {
  SendBoth();
  const Reply<SealResult> first = trainers_[0]->StartSeal(), second = trainers_[1]->StartSeal();
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second.Wait()));
  replicas_.hub().Hold();
  const Reply<StepPosition> one = trainers_[1]->StartCommit(trainers_[1]->CommitOf(kSgd));
  replicas_.DeliverUntilStep(1, 1);
  const Reply<StepPosition> two = trainers_[0]->StartCommit(trainers_[0]->CommitOf(kAdamW));
  replicas_.hub().Release();
  EXPECT_TRUE(Succeeds(one.Wait()));
  EXPECT_TRUE(Fails(two.Wait(), absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict, {"sgd"}));
  EXPECT_TRUE(Succeeds(trainers_[0]->Commit(kSgd)));
  replicas_.ExpectAlike();
}

TEST_F(TwoReplicasTest, ACommitIsAnsweredOnceBothHaveIt) {
  SendBoth();
  const Reply<SealResult> first = trainers_[0]->StartSeal(), second = trainers_[1]->StartSeal();
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second.Wait()));
  replicas_.hub().Hold();
  const CommitSpec spec = trainers_[0]->CommitOf(kSgd);
  const Reply<StepPosition> commit = trainers_[0]->StartCommit(spec);
  replicas_.DeliverUntilStep(0, 1);
  const Reply<StepPosition> again = trainers_[0]->StartCommit(spec);
  EXPECT_FALSE(commit.answered());
  EXPECT_FALSE(again.answered());
  replicas_.hub().Release();
  EXPECT_EQ(commit.Wait()->step, 1);
  EXPECT_EQ(again.Wait()->step, 1);
  replicas_.ExpectAlike();
}

TEST_F(TwoReplicasTest, ReadersAreAnsweredWhileAReplicaWaitsForTheOther) {
  SendBoth();
  replicas_.hub().Hold();
  const Reply<SealResult> first = trainers_[0]->StartSeal(), second = trainers_[1]->StartSeal();
  replicas_.DeliverUntilSumming(0, *trainers_[0]);  // and replica 1 has not heard of them
  Trainer reader(*replicas_[0], 0, 1, SessionRole::kRead);
  const Dense x = RandomDense(6, 13, 1);
  EXPECT_LE(RelativeDifference(reader.Forward(0, x), NaiveForward(model_.layers()[0], x)), 1e-12);
  EXPECT_FALSE(first.answered());
  replicas_.hub().Release();
  EXPECT_TRUE(Succeeds(first.Wait()));
  EXPECT_TRUE(Succeeds(second.Wait()));
}

TEST_F(TwoReplicasTest, SumsOfAnAttemptThatEndedLeaveTheNextAlone) {
  SendBoth();
  replicas_.hub().Hold();
  const Reply<SealResult> seal = trainers_[0]->StartSeal();
  trainers_[1]->StartSeal();
  replicas_.DeliverUntilSumming(0, *trainers_[0]);
  const Reply<StepPosition> discard = trainers_[0]->StartDiscard("the loss overflowed");
  while (!discard.answered()) replicas_.hub().Deliver(0);
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted));
  trainers_[0]->CatchUp();
  // Replica 1 is not in the sums yet, so that those of replica 0 are under way and rows have to wait for them; or they
  // have not begun.
  absl::Status sent = SendPart(*trainers_[0], batch_, 0);
  EXPECT_TRUE(sent.ok() || ReasonOf(sent) == Reason::kOverloaded) << sent;
  replicas_.hub().Release();
  while (!sent.ok()) sent = SendPart(*trainers_[0], batch_, 0);
  replicas_.AwaitAttempt(1, 1);
  trainers_[1]->CatchUp();
  ASSERT_TRUE(Succeeds(SendPart(*trainers_[1], batch_, 1)));
  const Reply<SealResult> first = trainers_[0]->StartSeal(), second = trainers_[1]->StartSeal();
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second.Wait()));

  ReplicaSet undisturbed(model_, 2);
  auto trainers = OpenTrainers(undisturbed, 2);
  ASSERT_TRUE(Succeeds(SendParts(trainers, batch_)));
  const Reply<SealResult> expected = trainers[0]->StartSeal();
  trainers[1]->StartSeal();
  EXPECT_EQ(first.Wait()->tensor_sums_of_squares, expected.Wait()->tensor_sums_of_squares);
}

TEST(ReplicasDriftTest, StopsEveryReplicaAndNamesTheLayer) {
  const TinyModel model = ModelOf(DType::kF64);
  LazyDevice* device = nullptr;
  ReplicaSet replicas(model, 3, OnLoss::kContinue, LazyParts(1, device));
  auto trainers = OpenTrainers(replicas, 2);
  TrainStep(trainers, Batch(model, {5, 6}, 1), kAdamW);
  const int first_of_second_layer = 6;  // the first has six tensors
  device->SkewUpdate(first_of_second_layer + 1);
  TrainStep(trainers, Batch(model, {5, 6}, 2), kAdamW);
  const Batch batch(model, {5, 6}, 3);
  for (int rank = 0; rank < 2; ++rank) {
    trainers[rank]->CatchUp();
    ASSERT_TRUE(Succeeds(SendPart(*trainers[rank], batch, rank)));
  }
  const Reply<SealResult> first = trainers[0]->StartSeal(), second = trainers[1]->StartSeal();
  const auto drifted = [](const auto& result) {
    return Fails(result, absl::StatusCode::kDataLoss, Reason::kReplicaDrift,
                 {"the weights of layer 13: ", "ranks 0 and 2", "rank 1"});
  };
  EXPECT_TRUE(drifted(first.Wait()));
  EXPECT_TRUE(drifted(second.Wait()));
  for (int rank = 0; rank < 3; ++rank) {
    while (replicas[rank]->health().ok()) std::this_thread::yield();
    EXPECT_TRUE(drifted(replicas[rank]->health())) << rank;
  }
  EXPECT_TRUE(drifted(trainers[0]->Discard()));
}

}  // namespace
}  // namespace shardmlp::testing
