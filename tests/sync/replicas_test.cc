// Replicas that meet over gRPC and sum over Gloo, each with a recorder for an engine: how they form, agree and part.
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/sync/cutting_proxy.h"
#include "tests/sync/gloo_mesh.h"
#include "tests/sync/replica_servers.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

class ReplicasTest : public ::testing::TestWithParam<int> {};

TEST_P(ReplicasTest, TheyFormFromTheMostAdvancedAndSum) {
  const int size = GetParam();
  ReplicaServers servers(size);
  for (int rank = size - 1; rank >= 0; --rank) servers.Start(rank).Join({.step = rank});
  for (int rank = 0; rank < size; ++rank) {
    ASSERT_TRUE(servers.recorder(rank).Hears(absl::StrCat("from rank ", size - 1)));
    const Generation generation = servers.recorder(rank).generation();
    EXPECT_EQ(generation.number, 1);
    ASSERT_EQ(generation.members.size(), static_cast<size_t>(size));
    EXPECT_EQ(generation.members[rank].state.step, rank);
    EXPECT_EQ(generation.group->rank(), rank);
    EXPECT_EQ(generation.group->size(), size);
  }
  OnRanks(size, [&](int rank) {
    double value = rank + 1;
    const MatrixView matrix(&value, 1, 1, DType::kF64);
    EXPECT_TRUE(servers.recorder(rank).generation().group->AllReduceSum({matrix}).ok());
    EXPECT_EQ(value, size * (size + 1) / 2);
  });
}

TEST_P(ReplicasTest, AllHearOneOrderOfWhatAllPropose) {
  constexpr int kMessages = 50;
  const int size = GetParam();
  ReplicaServers servers(size);
  servers.StartAll();
  OnRanks(size, [&](int rank) {
    for (int i = 0; i < kMessages; ++i) servers[rank].replicas->Propose(1, absl::StrCat("m", i));
  });
  std::vector<std::vector<std::string>> heard(size);
  for (int rank = 0; rank < size; ++rank) {
    ASSERT_TRUE(servers.recorder(rank).Hears(absl::StrCat("stable ", size * kMessages - 1)));
    for (const std::string& event : servers.recorder(rank).events()) {
      if (event.find(" from ") != std::string::npos && event.find("formed") == std::string::npos) {
        heard[rank].push_back(event);
      }
    }
    EXPECT_EQ(heard[rank].size(), static_cast<size_t>(size * kMessages));
    EXPECT_EQ(heard[rank], heard[0]);
  }
  // Each one's own are in the order in which it proposed them.
  for (int rank = 0; rank < size; ++rank) {
    int next = 0;
    for (const std::string& event : heard[0]) {
      if (event.ends_with(absl::StrCat(" from ", rank))) {
        EXPECT_THAT(event, HasSubstr(absl::StrCat(": m", next++, " ")));
      }
    }
  }
}

TEST_P(ReplicasTest, AMemberThatDiesIsLostToAllAndItsCollectivesFail) {
  const int size = GetParam();
  ReplicaServers servers(size, OnLoss::kContinue);
  servers.StartAll();
  const int last = size - 1;
  std::thread dies([&] { servers.Kill(last); });
  OnRanks(last, [&](int rank) {
    double value = 1;
    EXPECT_FALSE(servers.recorder(rank).generation().group->AllReduceSum({MatrixView(&value, 1, 1, DType::kF64)}).ok());
    EXPECT_TRUE(servers.recorder(rank).Hears(absl::StrCat("lost: rank ", last, " was lost")));
  });
  dies.join();
  for (int rank = 0; rank < last; ++rank) servers[rank].Join({.generation = 1});
  for (int rank = 0; rank < last; ++rank) {
    ASSERT_TRUE(servers.recorder(rank).Hears("formed 2"));
    EXPECT_EQ(servers.recorder(rank).generation().members.size(), static_cast<size_t>(last));
  }
  // And comes back.
  servers.Start(last).Join();
  EXPECT_TRUE(servers[0].log.Has(absl::StrCat("rank ", last, " waiting to be let in")));
  servers[0].replicas->Admit(2, true);
  for (int rank = 0; rank < last; ++rank) {
    ASSERT_TRUE(servers.recorder(rank).Hears("came back"));
    servers[rank].Join({.generation = 2});
  }
  EXPECT_TRUE(servers.recorder(last).Hears("formed 3"));
}

INSTANTIATE_TEST_SUITE_P(Sizes, ReplicasTest, ::testing::Values(2, 3, 4));

TEST(ReplicasLossTest, WaitingTheyAreCompleteAgainOrNotAtAll) {
  ReplicaServers servers(3, OnLoss::kWait);
  servers.StartAll();
  servers.Kill(2);
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("lost: rank 2 was lost"));
    servers[rank].Join({.generation = 1, .weights_version = 7 + rank});
  }
  EXPECT_TRUE(servers[1].log.Has("rank 2 of 3 missing"));
  servers.Start(2).Join();
  for (const int rank : {0, 1, 2}) {
    EXPECT_TRUE(servers.recorder(rank).Hears("formed 2: ranks 0 1 2, from rank 1"));
  }
}

TEST(ReplicasLossTest, ACutLinkIsALossToBothSidesAndAllAreTogetherAgainOnceItIsMended) {
  ReplicaServers servers(3, OnLoss::kContinue);
  CuttingProxy link(servers.coordinator);
  for (const int rank : {0, 1}) servers.Start(rank).Join();
  ReplicasOptions options = servers.Options(2);
  options.coordinator = link.address();
  ReplicaServer far(options);
  far.Join();
  ASSERT_TRUE(far.recorder.Hears("formed 1"));
  link.Cut();
  EXPECT_TRUE(far.recorder.Hears("cut off, lost: rank 0"));
  far.Join({.generation = 1});
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("lost: rank 2 was lost: nothing was heard from it for 3s"));
    servers[rank].Join({.generation = 1});
  }
  for (const int rank : {0, 1}) ASSERT_TRUE(servers.recorder(rank).Hears("formed 2: ranks 0 1"));
  servers[0].replicas->Admit(2, true);
  link.Mend();
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("rank 2 came back"));
    servers[rank].Join({.generation = 2});
  }
  EXPECT_TRUE(far.recorder.Hears("formed 3: ranks 0 1 2"));
}

TEST(ReplicasLossTest, AGroupThatFailsEndsItsGenerationAndTheNextHasAnother) {
  ReplicaServers servers(3);
  servers.StartAll();
  servers.recorder(1).generation().group->Abort(absl::UnavailableError("the cable is gone"));
  for (const int rank : {0, 1, 2}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("lost: a collective failed on rank ")) << "whichever said so first";
    servers[rank].Join({.generation = 1});
  }
  for (const int rank : {0, 1, 2}) ASSERT_TRUE(servers.recorder(rank).Hears("formed 2"));
  OnRanks(3, [&](int rank) {
    double value = rank;
    EXPECT_TRUE(servers.recorder(rank).generation().group->AllReduceSum({MatrixView(&value, 1, 1, DType::kF64)}).ok());
    EXPECT_EQ(value, 3);
  });
}

TEST(ReplicasLossTest, WithoutRankZeroTheOthersWaitAndItsSuccessorGetsTheNewestState) {
  ReplicaServers servers(3, OnLoss::kContinue);
  servers.StartAll();
  servers.Kill(0);
  for (const int rank : {1, 2}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("lost: rank 0"));
    servers[rank].Join({.generation = 1, .weights_version = rank});
    EXPECT_TRUE(servers[rank].log.Has("rank 0 at "));
  }
  servers.Start(0).Join();
  for (const int rank : {0, 1, 2}) {
    EXPECT_TRUE(servers.recorder(rank).Hears("formed 2: ranks 0 1 2, from rank 2"));
  }
}

TEST(ReplicasLossTest, AReplicaThatStopsIsLostWithItsReasonAndHearsNothingMore) {
  ReplicaServers servers(2);
  servers.StartAll();
  servers[1].replicas->Stop(absl::InternalError("its device failed"));
  const size_t heard = servers.recorder(1).events().size();
  EXPECT_TRUE(servers.recorder(0).Hears("lost: rank 1 was lost: it stopped: its device failed"));
  EXPECT_EQ(servers.recorder(1).events().size(), heard);
  servers[1].replicas->Propose(1, "late");
  servers[1].Join();
}

TEST(ReplicasLossTest, AReplicaThatLeavesIsLostWithItsReasonAndComesBackOnceItJoins) {
  ReplicaServers servers(3, OnLoss::kContinue);
  servers.StartAll();
  for (int times = 0; times < 2; ++times) servers[1].replicas->Leave(absl::UnavailableError("its device hangs"));
  EXPECT_TRUE(servers.recorder(1).Hears("cut off, lost: its device hangs"));
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("lost: rank 1 was lost: it stopped: its device hangs"));
    servers[rank].Join({.generation = 1});
  }
  for (const int rank : {0, 2}) ASSERT_TRUE(servers.recorder(rank).Hears("formed 2: ranks 0 2"));
  servers[0].replicas->Admit(2, true);
  servers[1].Join({.generation = 1});
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(servers.recorder(rank).Hears("rank 1 came back"));
    servers[rank].Join({.generation = 2});
  }
  EXPECT_TRUE(servers.recorder(1).Hears("formed 3: ranks 0 1 2"));
}

TEST(ReplicasLossTest, OneThatNeverJoinsAgainHoldsUpNobodyOnceItLeaves) {
  ReplicaServers servers(3, OnLoss::kContinue);
  servers.StartAll();
  servers.Kill(2);
  for (const int rank : {0, 1}) ASSERT_TRUE(servers.recorder(rank).Hears("lost: rank 2"));
  servers[0].Join({.generation = 1});
  EXPECT_TRUE(servers[0].log.Has("rank 1 not ready to join"));
  servers[1].replicas->Leave(absl::UnavailableError("its sums hang"));
  EXPECT_TRUE(servers.recorder(0).Hears("formed 2: ranks 0, from rank 0"));
}

// Of rank 2, as long as `gate` is closed.
ReplicasOptions WithHangingMesh(ReplicasOptions options, const absl::Notification& gate) {
  options.connect_timeout = absl::Milliseconds(200);
  options.loss_timeout = absl::Seconds(1);
  if (options.rank != 2) return options;
  options.transport.listen = [&gate](int, int) -> absl::StatusOr<std::shared_ptr<PeerGroup>> {
    gate.WaitForNotification();
    return absl::UnavailableError("it hung");
  };
  return options;
}

TEST(ReplicasLossTest, OneThatNeverSaysWhereItIsFoundIsLostInTimeAndDoesNotComeBackBeforeItGoesOn) {
  ReplicaServers servers(3);
  absl::Notification gate;
  std::vector<std::unique_ptr<ReplicaServer>> own;
  for (int rank = 0; rank < 3; ++rank) {
    own.push_back(std::make_unique<ReplicaServer>(WithHangingMesh(servers.Options(rank), gate)));
    own.back()->Join();
  }
  EXPECT_TRUE(own[0]->log.Has("rank 2 not connected to the others yet"));
  EXPECT_TRUE(own[0]->log.Has("rank 2 of 3 missing"));
  gate.Notify();
  own[2] = nullptr;
  own[2] = std::make_unique<ReplicaServer>(servers.Options(2));
  own[2]->Join();
  EXPECT_TRUE(own[0]->recorder.Hears(": ranks 0 1 2"));
}

// Stops its own replicas in mid-call.
class Suicide final : public ReplicaObserver {
 public:
  explicit Suicide(Replicas& replicas) : replicas_(replicas) {}
  void Formed(const Generation&) override {}
  void Agreed(int64_t, int, const std::string&) override { replicas_.Stop(absl::DataLossError("not my weights")); }
  void Stable(int64_t) override {}
  void Lost(const absl::Status&, bool) override {}
  void Refused(const absl::Status&) override {}

 private:
  Replicas& replicas_;
};

TEST(ReplicasLossTest, StopMayBeCalledFromWithinACall) {
  ReplicaServers servers(2);
  servers.Start(0).Join();
  const auto replicas = MakeReplicas(servers.Options(1)).value();
  Suicide suicide(*replicas);
  replicas->Join({}, suicide);
  ASSERT_TRUE(servers.recorder(0).Hears("formed 1"));
  servers[0].replicas->Propose(1, "a");
  EXPECT_TRUE(servers.recorder(0).Hears("not my weights"));
}

TEST(ReplicasAgreementTest, MessagesOfAMiBPassAndLargerOnesCostTheirSenderItsPlace) {
  ReplicaServers servers(2);
  servers.StartAll();
  const std::string large(1 << 20, 'x');
  for (int i = 0; i < 20; ++i) servers[1].replicas->Propose(1, large);
  ASSERT_TRUE(servers.recorder(0).Hears("stable 19"));
  servers[1].replicas->Propose(1, large + "x");
  EXPECT_TRUE(servers.recorder(0).Hears("at most 1048576 expected"));
  EXPECT_TRUE(servers.recorder(1).Hears("lost: "));
}

}  // namespace
}  // namespace shardmlp::testing
