// Checkpoints of replicas, each of which has a folder of its own: what one restores or starts from, all go on from.
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/replica_set.h"
#include "tests/model/files.h"

namespace shardmlp::testing {
namespace {

const AdamW kAdamW{.learning_rate = 0.01};

class ReplicaCheckpointTest : public ::testing::Test {
 protected:
  static absl::StatusOr<StepPosition> Restore(TestEngine& engine, const std::string& name) {
    Reply<StepPosition> reply;
    engine->RestoreCheckpoint(name, reply.done());
    return reply.Wait();
  }

  const TinyModel model_{{OddMlp(DType::kBF16), UngatedMlp(DType::kBF16)}};
  TempFolder folders_[2];
  ReplicaParts parts_ = [this] {
    ReplicaParts parts;
    parts.checkpoints = [this](int rank) {
      return CheckpointStore::Open(folders_[rank].path(), model_.spec()).value();
    };
    return parts;
  }();
  Batch BatchOf(int step) const { return Batch(model_, {5, 6}, step); }
};

TEST_F(ReplicaCheckpointTest, OneSavesWhileTheOthersGoOnAndWhatItRestoresReachesAll) {
  ReplicaSet replicas(model_, 2, OnLoss::kWait, parts_);
  auto trainers = OpenTrainers(replicas, 2);
  TrainStep(trainers, BatchOf(0), kAdamW);
  Reply<CheckpointInfo> save;
  replicas[1]->SaveCheckpoint("one", save.done());
  TrainStep(trainers, BatchOf(1), kAdamW);
  ASSERT_TRUE(Succeeds(save.Wait()));
  const std::vector<Dense> at_two = replicas.WeightsOf(0);
  TrainStep(trainers, BatchOf(2), kAdamW);

  EXPECT_TRUE(Fails(Restore(replicas[0], "one"), absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint))
      << "it is in the other's folder";
  const Reply<SealResult> waiting = trainers[0]->StartSeal();
  const absl::StatusOr<StepPosition> restored = Restore(replicas[1], "one");
  ASSERT_TRUE(Succeeds(restored));
  EXPECT_TRUE(Fails(waiting.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"a checkpoint was restored"}));
  replicas.AwaitAttempt(0, restored->attempt);
  EXPECT_EQ(replicas[0]->position(), *restored);
  replicas.ExpectAlike();
  for (int step = static_cast<int>(restored->step); step < 2; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
  EXPECT_EQ(replicas.WeightsOf(0), at_two);
  replicas.ExpectAlike();
}

TEST_F(ReplicaCheckpointTest, OneThatWasCutOffIsBehindTheCheckpointOfThoseThatWentOn) {
  std::string restore;
  parts_.options = [&](int) {
    EngineOptions options;
    options.restore = restore;
    return options;
  };
  ReplicaSet replicas(model_, 2, OnLoss::kContinue, parts_);
  auto trainers = OpenTrainers(replicas, 1);
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.ExpectAlike();
  replicas.hub().Cut(1);
  for (int step = 1; step < 3; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
  Reply<CheckpointInfo> save;
  replicas[0]->SaveCheckpoint("three", save.done());
  ASSERT_TRUE(Succeeds(save.Wait()));
  const std::vector<Dense> saved = replicas.WeightsOf(0);
  trainers.clear();
  replicas.Kill(0);
  EXPECT_EQ(replicas[1]->position().step, 1);

  restore = "three";
  replicas.hub().Mend(1);
  replicas.Start(0);
  EXPECT_EQ(replicas[0]->position().step, 3);
  replicas.ExpectAlike();
  EXPECT_EQ(replicas.WeightsOf(1), saved);
}

TEST_F(ReplicaCheckpointTest, ARestoreThatTwoTrainersAskForIsDoneOnce) {
  ReplicaSet replicas(model_, 2, OnLoss::kWait, parts_);
  auto trainers = OpenTrainers(replicas, 2);
  for (int rank = 0; rank < 2; ++rank) {
    Reply<CheckpointInfo> save;
    replicas[rank]->SaveCheckpoint("start", save.done());
    ASSERT_TRUE(Succeeds(save.Wait()));
  }
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.ExpectAlike();
  Reply<StepPosition> first, second;
  replicas[0]->RestoreCheckpoint("start", first.done());
  replicas[1]->RestoreCheckpoint("start", second.done());
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second.Wait()));
  EXPECT_EQ(*first.Wait(), *second.Wait());
  EXPECT_EQ(first.Wait()->attempt, 1);
  EXPECT_EQ(first.Wait()->step, 0);
}

TEST_F(ReplicaCheckpointTest, WhoIsCutOffBeforeItsTurnToRestoreHasRestoredNothing) {
  absl::Notification gate;
  LazyDevice* device = nullptr;  // of replica 0
  parts_.backend = [&](int rank) {
    auto backend = std::make_unique<LazyDevice>();
    if (rank == 0) device = backend.get();
    return backend;
  };
  ReplicaSet replicas(model_, 2, OnLoss::kWait, parts_);
  auto trainers = OpenTrainers(replicas, 2);
  Reply<CheckpointInfo> save;
  replicas[1]->SaveCheckpoint("start", save.done());
  ASSERT_TRUE(Succeeds(save.Wait()));
  TrainStep(trainers, BatchOf(0), kAdamW);
  ASSERT_TRUE(Succeeds(SendParts(trainers, BatchOf(1))));
  const Reply<SealResult> sealed[] = {trainers[0]->StartSeal(), trainers[1]->StartSeal()};
  for (const Reply<SealResult>& seal : sealed) ASSERT_TRUE(Succeeds(seal.Wait()));
  device->HoldUpdates(gate);
  const Reply<StepPosition> commit = trainers[0]->StartCommit(trainers[0]->CommitOf(kAdamW));
  replicas.AwaitStep(1, 2);
  EXPECT_TRUE(Fails(trainers[0]->StartCommit(trainers[0]->CommitOf(KeepFrozen{})).Wait(),
                    absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict))
      << "so replica 0 knows of it too";
  // And applies it yet when it hears that it is to get the checkpoint of replica 1, and loses that one.
  replicas.hub().Hold();
  replicas.hub().DeliverAll();
  Reply<StepPosition> restore;
  replicas[1]->RestoreCheckpoint("start", restore.done());
  while (!replicas.hub().Deliver(0)) std::this_thread::yield();
  replicas.hub().Cut(1);
  replicas.hub().Release();
  gate.Notify();
  replicas.hub().Mend(1);
  EXPECT_EQ(commit.Wait()->step, 2);
  EXPECT_TRUE(Fails(restore.Wait(), absl::StatusCode::kUnavailable, Reason::kReplicaMissing));
  EXPECT_EQ(replicas[0]->position().step, 2);
  replicas.ExpectAlike();
  TrainStep(trainers, BatchOf(2), kAdamW);
  replicas.ExpectAlike();
}

TEST_F(ReplicaCheckpointTest, CheckpointsOfEqualWeightsAndOtherMastersAndMomentsAreNotTakenForTheSame) {
  const AdamW kTooLittleForBF16{.learning_rate = 1e-9};
  std::vector<Dense> weights[2];
  for (int rank = 0; rank < 2; ++rank) {
    TestEngine alone(model_, {}, OneThread(), parts_.checkpoints(rank));
    std::vector<std::unique_ptr<Trainer>> trainers;
    trainers.push_back(std::make_unique<Trainer>(*alone));
    TrainStep(trainers, BatchOf(rank), kTooLittleForBF16);
    Reply<CheckpointInfo> save;
    alone->SaveCheckpoint("one", save.done());
    ASSERT_TRUE(Succeeds(save.Wait()));
    for (const TensorSpec& tensor : model_.spec().tensors) weights[rank].push_back(alone.Read(tensor));
  }
  ASSERT_EQ(weights[0], weights[1]) << "else this shows nothing";
  parts_.options = [](int) {
    EngineOptions options;
    options.restore = "one";
    return options;
  };
  ReplicaSet replicas(model_, 2, OnLoss::kWait, parts_);
  auto trainers = OpenTrainers(replicas, 2);
  for (int step = 0; step < 2; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
  replicas.ExpectAlike();
}

TEST_F(ReplicaCheckpointTest, OneThatStartsFromACheckpointTakesTheOthersAlong) {
  std::vector<Dense> saved;
  {
    ReplicaSet replicas(model_, 2, OnLoss::kWait, parts_);
    auto trainers = OpenTrainers(replicas, 2);
    TrainStep(trainers, BatchOf(0), kAdamW);
    Reply<CheckpointInfo> save;
    replicas[0]->SaveCheckpoint("one", save.done());
    ASSERT_TRUE(Succeeds(save.Wait()));
    saved = replicas.WeightsOf(0);
  }
  parts_.options = [](int rank) {
    EngineOptions options;
    if (rank == 0) options.restore = "one";
    return options;
  };
  ReplicaSet replicas(model_, 2, OnLoss::kWait, parts_);
  EXPECT_EQ(replicas[1]->position().step, 1);
  EXPECT_EQ(replicas.WeightsOf(1), saved);
  replicas.ExpectAlike();
}

}  // namespace
}  // namespace shardmlp::testing
