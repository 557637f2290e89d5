// The set of one, by the contract of Replicas.
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/sync/replicas.h"
#include "tests/sync/recorder.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(LocalReplicasTest, ItFormsAtOnceFromItsOwnState) {
  Recorder recorder;
  const auto replicas = MakeLocalReplicas();
  replicas->Join({.generation = 4, .step = 7, .attempt = 2, .weights_version = 99}, recorder);
  EXPECT_THAT(recorder.Take(), ElementsAre("formed 5: ranks 0, from rank 0"));
  EXPECT_EQ(recorder.generation().members[0].state.step, 7);
  EXPECT_EQ(recorder.generation().group->size(), 1);
}

TEST(LocalReplicasTest, AMessageIsDeliveredAndStableBeforeProposeReturns) {
  Recorder recorder;
  const auto replicas = MakeLocalReplicas();
  replicas->Join({}, recorder);
  recorder.Take();
  replicas->Propose(1, "a");
  EXPECT_THAT(recorder.Take(), ElementsAre("0: a from 0", "stable 0"));
  replicas->Propose(1, "b");
  EXPECT_THAT(recorder.Take(), ElementsAre("1: b from 0", "stable 1"));
}

TEST(LocalReplicasTest, NothingFollowsOutsideOfItsGeneration) {
  Recorder recorder;
  const auto replicas = MakeLocalReplicas();
  replicas->Propose(1, "ahead of Join");
  replicas->Join({}, recorder);
  recorder.Take();
  replicas->Propose(2, "of a generation to come");
  EXPECT_THAT(recorder.Take(), IsEmpty());
  replicas->Stop(absl::OkStatus());
  replicas->Propose(1, "after Stop");
  EXPECT_THAT(recorder.Take(), IsEmpty());
}

// Proposes one message of each that it hears of.
class Echo final : public ReplicaObserver {
 public:
  explicit Echo(Replicas& replicas) : replicas_(replicas) {}
  void Formed(const Generation& generation) override {
    generation_ = generation.number;
    replicas_.Propose(generation_, "ab");
    heard += "formed ";
  }
  void Agreed(int64_t, int, const std::string& message) override {
    if (message.size() > 1) {
      for (const char letter : message) replicas_.Propose(generation_, std::string(1, letter));
    }
    heard += message + " ";
  }
  void Stable(int64_t index) override { heard += std::to_string(index) + " "; }
  void Lost(const absl::Status&, bool) override {}
  void Refused(const absl::Status&) override {}

  std::string heard;

 private:
  Replicas& replicas_;
  int64_t generation_ = 0;
};

TEST(LocalReplicasTest, WhatIsProposedFromWithinACallIsDeliveredAfterIt) {
  const auto replicas = MakeLocalReplicas();
  Echo echo(*replicas);
  replicas->Join({}, echo);
  EXPECT_EQ(echo.heard, "formed ab 0 a 1 b 2 ");
}

TEST(LocalReplicasTest, ThreadsThatProposeGetOneOrder) {
  Recorder recorder;
  const auto replicas = MakeLocalReplicas();
  replicas->Join({}, recorder);
  recorder.Take();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 100; ++j) replicas->Propose(1, "x");
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto events = recorder.Take();
  ASSERT_THAT(events, SizeIs(800));
  for (int i = 0; i < 400; ++i) {
    EXPECT_EQ(events[2 * i], absl::StrCat(i, ": x from 0"));
    EXPECT_EQ(events[2 * i + 1], absl::StrCat("stable ", i));
  }
}

ReplicaMember At(int rank, int64_t generation, int64_t step, int64_t weights_version) {
  return {.rank = rank, .state = {.generation = generation, .step = step, .weights_version = weights_version}};
}

TEST(MostAdvancedTest, TheNewestGenerationThenTheHighestVersionThenTheLowestRank) {
  EXPECT_EQ(MostAdvanced({At(0, 3, 5, 100)}), 0);
  EXPECT_EQ(MostAdvanced({At(0, 3, 5, 100), At(1, 4, 5, 100), At(2, 2, 9, 900)}), 1);
  EXPECT_EQ(MostAdvanced({At(0, 4, 5, 100), At(1, 4, 6, 101), At(3, 4, 6, 101)}), 1);
  EXPECT_EQ(MostAdvanced({At(0, 4, 6, 100), At(2, 4, 5, 100)}), 0);
}

TEST(MostAdvancedTest, WhereAllJustStartedTheHighestStepGoesFirst) {
  EXPECT_EQ(MostAdvanced({At(0, 0, 5, 900), At(1, 0, 6, 100), At(2, 0, 6, 100)}), 1);
  EXPECT_EQ(MostAdvanced({At(0, 0, 0, 100), At(1, 0, 0, 900)}), 1);
  EXPECT_EQ(MostAdvanced({At(0, 0, 50, 100), At(1, 1, 0, 50)}), 1) << "whoever was in a generation is ahead of all";
}

ReplicaMember From(int rank, int64_t checkpoint_generation, int64_t step) {
  return {.rank = rank, .state = {.checkpoint_generation = checkpoint_generation, .step = step}};
}

TEST(MostAdvancedTest, ACheckpointIsOfItsGenerationBehindWhoLivedThroughThat) {
  EXPECT_EQ(MostAdvanced({From(0, 7, 100), At(1, 6, 50, 900)}), 0) << "1 was cut off while the others went on";
  EXPECT_EQ(MostAdvanced({From(0, 7, 100), At(1, 7, 60, 900)}), 1) << "they had gone back, and on from there";
  EXPECT_EQ(MostAdvanced({From(0, 7, 100), From(1, 7, 120), From(2, 6, 900)}), 1);
}

}  // namespace
}  // namespace shardmlp::testing
