// Replicas that live and don't go on: their device hangs, or a sum. The others are not held up for longer than is said.
#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/engine/hand_clock.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/replica_set.h"
#include "tests/model/files.h"

namespace shardmlp::testing {
namespace {

const AdamW kAdamW{.learning_rate = 0.01};
constexpr absl::Duration kHang = absl::Milliseconds(600);

// A group that calls `before_sum`, where there is one, ahead of each of this rank's sums.
class HookedGroup final : public ReplicaGroup {
 public:
  HookedGroup(std::shared_ptr<ReplicaGroup> group, const std::function<void()>& before_sum)
      : group_(std::move(group)), before_sum_(before_sum) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  bool device_memory() const override { return group_->device_memory(); }
  absl::Status AllReduceSum(absl::Span<const MatrixView> matrices) override {
    if (before_sum_) before_sum_();
    return group_->AllReduceSum(matrices);
  }
  absl::Status Broadcast(int root, absl::Span<const MatrixView> matrices) override {
    return group_->Broadcast(root, matrices);
  }
  void Abort(absl::Status reason) override { group_->Abort(std::move(reason)); }

 private:
  const std::shared_ptr<ReplicaGroup> group_;
  const std::function<void()>& before_sum_;
};

// Another's part, in groups that `wrap` makes of its own.
class WrappedReplicas final : public Replicas, private ReplicaObserver {
 public:
  using Wrap = std::function<std::shared_ptr<ReplicaGroup>(std::shared_ptr<ReplicaGroup>)>;
  WrappedReplicas(std::unique_ptr<Replicas> replicas, Wrap wrap)
      : wrap_(std::move(wrap)), replicas_(std::move(replicas)) {}

  int rank() const override { return replicas_->rank(); }
  int size() const override { return replicas_->size(); }
  void Join(const ReplicaState& state, ReplicaObserver& observer) override {
    observer_ = &observer;
    replicas_->Join(state, *this);
  }
  void Propose(int64_t generation, std::string message) override { replicas_->Propose(generation, std::move(message)); }
  void Admit(int64_t generation, bool now) override { replicas_->Admit(generation, now); }
  void Leave(const absl::Status& why) override { replicas_->Leave(why); }
  std::string Missing() const override { return replicas_->Missing(); }
  void Stop(const absl::Status& why) override { replicas_->Stop(why); }

 private:
  void Formed(const Generation& generation) override {
    Generation wrapped = generation;
    wrapped.group = wrap_(generation.group);
    observer_.load()->Formed(wrapped);
  }
  void Agreed(int64_t index, int from, const std::string& message) override {
    observer_.load()->Agreed(index, from, message);
  }
  void Stable(int64_t index) override { observer_.load()->Stable(index); }
  void Lost(const absl::Status& why, bool heard_all) override { observer_.load()->Lost(why, heard_all); }
  void Refused(const absl::Status& why) override { observer_.load()->Refused(why); }

  const Wrap wrap_;
  std::atomic<ReplicaObserver*> observer_ = nullptr;
  const std::unique_ptr<Replicas> replicas_;  // first to go
};

// Replicas 0 to 3; trainers at 0 and 1; 2 hangs, in step 1 or 2 of four.
class HangTest : public ::testing::TestWithParam<OnLoss> {
 protected:
  HangTest() {
    ReplicaParts parts = LazyParts(2, device_);
    parts.options = [this](int) {
      EngineOptions options;
      options.lease = options.seal_timeout = absl::Hours(100'000);
      options.hang_timeout = kHang;
      options.clock = clock_.reader();
      return options;
    };
    parts.checkpoints = [this](int rank) {
      return rank == 2 ? CheckpointStore::Open(folder_.path(), model_.spec()).value() : nullptr;
    };
    parts.replicas = [this](int rank) -> std::unique_ptr<Replicas> {
      const auto wrap = [this, rank](std::shared_ptr<ReplicaGroup> group) {
        return rank == 2 ? std::make_shared<HookedGroup>(std::move(group), before_sum_) : group;
      };
      return std::make_unique<WrappedReplicas>(hub_.Start(rank), wrap);
    };
    replicas_ = std::make_unique<ReplicaSet>(model_, 4, GetParam(), parts);
    trainers_ = OpenTrainers(*replicas_, 2);
    TrainStep(trainers_, BatchOf(0), kAdamW);
    replicas_->ExpectAlike();
  }
  ~HangTest() override {
    if (!gate_.HasBeenNotified()) gate_.Notify();
  }

  Batch BatchOf(int step) const { return Batch(model_, {5, 6}, step); }
  // Time passes until it is so.
  void PassUntil(const std::function<bool()>& so) {
    while (!so()) {
      clock_.Advance(kHang / 8);
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  void AwaitMembers(int count) {
    PassUntil([&] { return (*replicas_)[0]->replica().member_count == count; });
  }
  std::vector<Reply<SealResult>> SendAndSeal(int step) {
    EXPECT_TRUE(Succeeds(SendParts(trainers_, BatchOf(step))));
    return {trainers_[0]->StartSeal(), trainers_[1]->StartSeal()};
  }
  // Time passes, and replica 2 is lost to the others, since `what` hangs.
  void ExpectLost(const std::vector<Reply<SealResult>>& seals, absl::string_view what) {
    PassUntil([&] { return seals[0].answered() && seals[1].answered(); });
    for (const Reply<SealResult>& seal : seals) {
      EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted,
                        {"a replica was lost: rank 2", what, "has been at one thing for 600ms"}));
    }
  }
  // The rest of the training, from step `done`: without replica 2 as long as it hangs, or once it goes on again; of
  // `members` in the end.
  void ExpectAsUndisturbed(int done, int members) {
    for (int step = done; step < 3 && GetParam() == OnLoss::kContinue; ++step) {
      TrainStep(trainers_, BatchOf(step), kAdamW);
    }
    gate_.Notify();
    AwaitMembers(members);
    if (start_.joinable()) start_.join();
    for (int step = static_cast<int>((*replicas_)[0]->position().step); step < 4; ++step) {
      TrainStep(trainers_, BatchOf(step), kAdamW);
    }
    replicas_->ExpectAlike();
    ReplicaSet undisturbed(model_, 2);
    auto trainers = OpenTrainers(undisturbed, 2);
    for (int step = 0; step < 4; ++step) TrainStep(trainers, BatchOf(step), kAdamW);
    EXPECT_EQ(replicas_->WeightsOf(2), undisturbed.WeightsOf(1));
  }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  TempFolder folder_;  // of replica 2
  HandClock clock_;
  absl::Notification gate_;
  absl::Notification stuck_;
  std::function<void()> before_sum_;  // of replica 2
  HubReplicas hub_{4, GetParam()};
  LazyDevice* device_ = nullptr;  // of replica 2
  std::unique_ptr<ReplicaSet> replicas_;
  std::thread start_;  // of a replica that comes back, which waits for all
  std::vector<std::unique_ptr<Trainer>> trainers_;
};

TEST_P(HangTest, ADeviceThatHangsAsItAppliesIsLostBeforeTheNextSums) {
  device_->HoldUpdates(gate_);
  TrainStep(trainers_, BatchOf(1), kAdamW);
  ExpectLost(SendAndSeal(2), "its device");
  ExpectAsUndisturbed(2, 4);
}

TEST_P(HangTest, ADeviceThatHangsAfterTheSumsIsLost) {
  device_->BeforeNextSquares([this] { gate_.WaitForNotification(); });
  ExpectLost(SendAndSeal(1), "its device");
  ExpectAsUndisturbed(1, 4);
}

TEST_P(HangTest, ASumThatHangsThoughItWasAbortedHoldsUpNoGenerationThatFollows) {
  before_sum_ = [this] {
    if (!stuck_.HasBeenNotified()) stuck_.Notify();
    gate_.WaitForNotification();
  };
  const auto seals = SendAndSeal(1);
  stuck_.WaitForNotification();
  replicas_->Kill(3);
  for (const Reply<SealResult>& seal : seals) {
    EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"a replica was lost: "}));
  }
  if (GetParam() == OnLoss::kContinue) {
    AwaitMembers(2);
    return ExpectAsUndisturbed(1, 3);
  }
  start_ = std::thread([this] { replicas_->Start(3); });
  ExpectAsUndisturbed(1, 4);
}

TEST_P(HangTest, ASaveIsNoHangHoweverLongItTakes) {
  absl::Notification held;
  device_->BeforeNextCopy([&] {
    held.Notify();
    gate_.WaitForNotification();
  });
  Reply<CheckpointInfo> save;
  (*replicas_)[2]->SaveCheckpoint("slow", save.done());
  held.WaitForNotification();
  const auto seals = SendAndSeal(1);
  const absl::Time start = absl::Now();
  PassUntil([&] { return absl::Now() - start > 2 * kHang; });
  EXPECT_FALSE(seals[0].answered());
  gate_.Notify();
  for (const Reply<SealResult>& seal : seals) EXPECT_TRUE(Succeeds(seal.Wait()));
  EXPECT_TRUE(Succeeds(save.Wait()));
  EXPECT_EQ((*replicas_)[0]->position(), (*replicas_)[2]->position());
  EXPECT_EQ((*replicas_)[0]->position().attempt, 0);
}

// The others would wait for it in the middle of the sum, which is bounded.
TEST_P(HangTest, ASaveWaitsForASumThatNeedsTheDevice) {
  Reply<CheckpointInfo> save;
  std::atomic<bool> asked = false, saved = false;
  before_sum_ = [&] {
    if (asked.exchange(true)) return;
    (*replicas_)[2]->SaveCheckpoint("late", save.done());
    const absl::Time start = absl::Now();
    while (!save.answered() && absl::Now() - start < absl::Milliseconds(300)) absl::SleepFor(absl::Milliseconds(1));
    saved = save.answered();
  };
  for (const Reply<SealResult>& seal : SendAndSeal(1)) EXPECT_TRUE(Succeeds(seal.Wait()));
  EXPECT_FALSE(saved);
  EXPECT_TRUE(Succeeds(save.Wait()));
}

INSTANTIATE_TEST_SUITE_P(OnLoss, HangTest, ::testing::Values(OnLoss::kWait, OnLoss::kContinue),
                         [](const auto& info) { return info.param == OnLoss::kWait ? "Wait" : "Continue"; });

}  // namespace
}  // namespace shardmlp::testing
