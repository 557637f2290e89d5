// Engines that are replicas over gRPC and Gloo: what takes long on one of them, and is no fault of it.
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/replica_set.h"
#include "tests/model/files.h"
#include "tests/sync/free_port.h"
#include "tests/sync/replica_options.h"

namespace shardmlp::testing {
namespace {

const AdamW kAdamW{.learning_rate = 0.01};
constexpr absl::Duration kSum = absl::Seconds(1);

// Begins, and goes on once it's told to.
class SlowSave {
 public:
  SlowSave(TestEngine& engine, LazyDevice& device) {
    device.BeforeNextCopy([this] {
      held_.Notify();
      gate_.WaitForNotification();
    });
    engine->SaveCheckpoint("slow", save_.done());
    held_.WaitForNotification();
  }
  void GoOn() { gate_.Notify(); }
  absl::StatusOr<CheckpointInfo> Wait() const { return save_.Wait(); }

 private:
  absl::Notification held_;
  absl::Notification gate_;
  Reply<CheckpointInfo> save_;
};

class GlooReplicasTest : public ::testing::Test {
 protected:
  ReplicaParts Parts() {
    ReplicaParts parts;
    parts.replicas = [this](int rank) {
      ReplicasOptions options = FastOptions(rank, 2, coordinator_);
      options.sum_timeout = kSum;
      return MakeReplicas(options).value();
    };
    parts.backend = [this](int rank) {
      auto backend = std::make_unique<LazyDevice>();
      devices_[rank] = backend.get();
      return backend;
    };
    parts.checkpoints = [this](int rank) {
      return CheckpointStore::Open(folders_[rank].path(), model_.spec()).value();
    };
    return parts;
  }
  Batch BatchOf(int step) const { return Batch(model_, {5, 6}, step); }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  const std::string coordinator_ = FreeAddress();
  LazyDevice* devices_[2] = {};
  TempFolder folders_[2];
};

TEST_F(GlooReplicasTest, ASaveThatTakesLongerThanASumMayCostsNobodyTheAttempt) {
  ReplicaSet replicas(model_, 2, OnLoss::kWait, Parts());
  auto trainers = OpenTrainers(replicas, 2);
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.ExpectAlike();
  // With its rows there, which take the device too.
  ASSERT_TRUE(Succeeds(SendParts(trainers, BatchOf(1))));
  SlowSave save(replicas[1], *devices_[1]);
  const Reply<SealResult> first = trainers[0]->StartSeal(), second = trainers[1]->StartSeal();
  absl::SleepFor(2 * kSum);
  EXPECT_FALSE(first.answered()) << first.Wait().status();
  save.GoOn();
  ASSERT_TRUE(Succeeds(first.Wait()));
  ASSERT_TRUE(Succeeds(second.Wait()));
  ASSERT_TRUE(Succeeds(save.Wait()));
  EXPECT_EQ(save.Wait()->step, 1);
  for (const auto& trainer : trainers) ASSERT_TRUE(Succeeds(trainer->Commit(kAdamW)));
  replicas.ExpectAlike();
  EXPECT_EQ(replicas[0]->position().attempt, 0);
}

// A step that was decided on waits for it where it is saved, and the next sums for that.
TEST_F(GlooReplicasTest, NeitherDoesOneThatTheNextStepWaitsFor) {
  ReplicaSet replicas(model_, 2, OnLoss::kWait, Parts());
  auto trainers = OpenTrainers(replicas, 1);
  TrainStep(trainers, BatchOf(0), kAdamW);
  replicas.ExpectAlike();
  ASSERT_TRUE(Succeeds(SendPart(*trainers[0], BatchOf(1), 0)));
  const Reply<SealResult> seal = trainers[0]->StartSeal();
  ASSERT_TRUE(Succeeds(seal.Wait()));
  SlowSave save(replicas[1], *devices_[1]);
  ASSERT_TRUE(Succeeds(trainers[0]->Commit(kAdamW)));
  ASSERT_TRUE(Succeeds(SendPart(*trainers[0], BatchOf(2), 0)));
  const Reply<SealResult> next = trainers[0]->StartSeal();
  absl::SleepFor(2 * kSum);
  EXPECT_FALSE(next.answered()) << next.Wait().status();
  save.GoOn();
  ASSERT_TRUE(Succeeds(next.Wait()));
  ASSERT_TRUE(Succeeds(trainers[0]->Commit(kAdamW)));
  ASSERT_TRUE(Succeeds(save.Wait()));
  EXPECT_EQ(save.Wait()->step, 1) << "of the weights before";
  replicas.ExpectAlike();
}

}  // namespace
}  // namespace shardmlp::testing
