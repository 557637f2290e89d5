// What the engine's tests count on: that the coordinator is carried as a network would.
#include "tests/sync/hub_replicas.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/sync/recorder.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Ranks with a recorder each.
struct Servers {
  Servers(int size, OnLoss on_loss) : hub(size, on_loss), recorders(size) {
    for (int rank = 0; rank < size; ++rank) replicas.push_back(hub.Start(rank));
  }
  void Join(int rank, const ReplicaState& state = {}) { replicas[rank]->Join(state, recorders[rank]); }
  void JoinAll() {
    for (size_t rank = 0; rank < replicas.size(); ++rank) Join(rank);
    for (Recorder& recorder : recorders) recorder.Take();
  }

  HubReplicas hub;
  std::vector<Recorder> recorders;
  std::vector<std::unique_ptr<Replicas>> replicas;
};

TEST(HubReplicasTest, AllJoinThenOneOrderForAll) {
  Servers servers(3, OnLoss::kWait);
  servers.Join(0, {.step = 1});
  servers.Join(2, {.step = 2});
  EXPECT_THAT(servers.recorders[0].Take(), IsEmpty());
  servers.Join(1);
  servers.replicas[2]->Propose(1, "b");
  servers.replicas[0]->Propose(1, "a");
  for (Recorder& recorder : servers.recorders) {
    EXPECT_THAT(recorder.Take(), ElementsAre("formed 1: ranks 0 1 2, from rank 2", "0: b from 2", "stable 0",
                                             "1: a from 0", "stable 1"));
  }
}

TEST(HubReplicasTest, HeldItDeliversOneAtATimeAndIsStableWhenAllHaveIt) {
  Servers servers(2, OnLoss::kWait);
  servers.JoinAll();
  servers.hub.Hold();
  servers.replicas[1]->Propose(1, "a");
  servers.replicas[1]->Propose(1, "b");
  EXPECT_TRUE(servers.hub.Deliver(0));
  EXPECT_TRUE(servers.hub.Deliver(0));
  EXPECT_FALSE(servers.hub.Deliver(0)) << "rank 1 has none of it yet";
  EXPECT_THAT(servers.recorders[0].Take(), ElementsAre("0: a from 1", "1: b from 1"));
  EXPECT_TRUE(servers.hub.Deliver(1));
  EXPECT_TRUE(servers.hub.Deliver(0));
  EXPECT_THAT(servers.recorders[0].Take(), ElementsAre("stable 0"));
  servers.hub.Release();
  EXPECT_THAT(servers.recorders[0].Take(), ElementsAre("stable 1"));
  EXPECT_THAT(servers.recorders[1].Take(), ElementsAre("0: a from 1", "1: b from 1", "stable 0", "stable 1"));
}

TEST(HubReplicasTest, WhoIsLeftHearsAllBeforeTheLossAndWhoIsCutOffDoesNot) {
  Servers servers(4, OnLoss::kContinue);
  servers.JoinAll();
  servers.hub.Hold();
  servers.replicas[0]->Propose(1, "a");
  servers.hub.Deliver(1);
  servers.hub.Kill(2);
  servers.hub.Cut(3);
  servers.hub.Release();
  EXPECT_THAT(servers.recorders[0].Take(), ElementsAre("0: a from 0", "lost: rank 2 was lost: its connection ended"));
  EXPECT_THAT(servers.recorders[1].Take(), ElementsAre("0: a from 0", "lost: rank 2 was lost: its connection ended"));
  EXPECT_THAT(servers.recorders[2].Take(), IsEmpty());
  EXPECT_THAT(servers.recorders[3].Take(), ElementsAre("cut off, lost: rank 0 was lost"));

  servers.Join(0, {.generation = 1, .weights_version = 5});
  EXPECT_EQ(servers.hub.generation(), 0) << "rank 1 lives";
  servers.Join(1, {.generation = 1, .weights_version = 6});
  EXPECT_THAT(servers.recorders[0].Take(), ElementsAre("formed 2: ranks 0 1, from rank 1"));
}

TEST(HubReplicasTest, WhoComesBackIsLetInWhenRankZeroSaysSo) {
  Servers servers(3, OnLoss::kContinue);
  servers.JoinAll();
  servers.replicas[2].reset();
  servers.Join(0, {.generation = 1});
  servers.Join(1, {.generation = 1});
  servers.replicas[2] = servers.hub.Start(2);
  servers.Join(2);
  EXPECT_EQ(servers.hub.generation(), 2);
  servers.replicas[1]->Admit(2, true);
  servers.replicas[0]->Admit(1, true);
  EXPECT_EQ(servers.hub.generation(), 2) << "not rank 0's word on this generation";
  servers.replicas[0]->Admit(2, true);
  servers.Join(1, {.generation = 2});
  servers.Join(0, {.generation = 2});
  EXPECT_THAT(servers.recorders[2].Take(), ElementsAre("formed 3: ranks 0 1 2, from rank 0"));
}

TEST(HubReplicasTest, WaitingMeansForAllRanks) {
  Servers servers(2, OnLoss::kWait);
  servers.JoinAll();
  servers.hub.Cut(1);
  EXPECT_THAT(servers.recorders[0].Take(), ElementsAre("lost: rank 1 was lost: its connection ended"));
  EXPECT_THAT(servers.recorders[1].Take(), ElementsAre("cut off, lost: rank 0 was lost"));
  servers.Join(0);
  servers.Join(1);
  EXPECT_EQ(servers.hub.generation(), 0);
  servers.hub.Mend(1);
  EXPECT_EQ(servers.hub.generation(), 2);
}

TEST(HubReplicasTest, WithoutRankZeroNobodyGoesOn) {
  Servers servers(3, OnLoss::kContinue);
  servers.JoinAll();
  servers.hub.Kill(0);
  for (int rank = 1; rank < 3; ++rank) servers.Join(rank, {.generation = 1});
  EXPECT_EQ(servers.hub.generation(), 0);
  servers.replicas[0] = servers.hub.Start(0);
  servers.Join(0);
  EXPECT_EQ(servers.recorders[0].events().back(), "formed 2: ranks 0 1 2, from rank 1");
}

TEST(HubReplicasTest, TheGroupSumsAndBroadcastsAndFailsWhereAMemberIsLost) {
  Servers servers(2, OnLoss::kWait);
  servers.JoinAll();
  std::vector<float> values[2] = {{1, 2, 100, 3, 4, 100}, {10, 20, 200, 30, 40, 200}};  // [2, 2], row stride 3
  const auto run = [&](int rank) {
    const MatrixView mine(values[rank].data(), 2, 2, 3, DType::kF32);
    const auto group = servers.recorders[rank].generation().group;
    EXPECT_TRUE(group->AllReduceSum({mine}).ok());
    if (rank == 1) values[rank][4] = 45;
    EXPECT_TRUE(group->Broadcast(1, {mine}).ok());
    if (rank == 0) {
      EXPECT_EQ(group->AllReduceSum({mine}).message(), "rank 1 was lost");
    }
  };
  std::thread other([&] { run(1); });
  std::thread killer([&] {
    other.join();
    servers.hub.Kill(1);
  });
  run(0);
  killer.join();
  EXPECT_EQ(values[0], (std::vector<float>{11, 22, 100, 33, 45, 100}));
  EXPECT_EQ(values[1], (std::vector<float>{11, 22, 200, 33, 45, 200}));
}

}  // namespace
}  // namespace shardmlp::testing
