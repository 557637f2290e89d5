// Who goes on after a loss, from whose state, and when who comes back is let in.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/sync/coordinator_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

class CoordinatorLossTest : public CoordinatorTest {
 protected:
  // Generation 6 of all, of whom rank 1 alone has the last state.
  void FormAroundRankOne() {
    Start(3, OnLoss::kContinue);
    for (int rank = 0; rank < 3; ++rank) Hello(rank + 1, rank);
    Join(1);
    Join(2, {.generation = 5, .weights_version = 100}, 5);
    Join(3);
    Mesh({1, 2, 3}, 6);
    wire_.sent.clear();
  }
};

TEST_F(CoordinatorLossTest, WaitingMeansForAllRanks) {
  Start(3, OnLoss::kWait);
  FormAll();
  Lose(2);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 1: rank 1 was lost: its connection ended"));
  EXPECT_THAT(wire_.Take(3), ElementsAre("lost 1: rank 1 was lost: its connection ended"));
  Join(1, {.generation = 1});
  Join(3, {.generation = 1});
  EXPECT_EQ(coordinator_->Missing(), "rank 1 of 3 missing");
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  Hello(4, 1);
  Join(4);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 2: 0 of 3"));
}

TEST_F(CoordinatorLossTest, ContinuingMeansWithThoseThatAreLeftOnceAllOfThemHaveJoined) {
  Start(3, OnLoss::kContinue);
  FormAll();
  Lose(2);
  Join(1, {.generation = 1});
  EXPECT_EQ(coordinator_->Missing(), "rank 1 of 3 missing; rank 2 not ready to join");
  Join(3, {.generation = 1});
  Mesh({1, 3}, 2);
  EXPECT_THAT(wire_.Take(3), ElementsAre("lost 1: rank 1 was lost: its connection ended", "gather 2: 1 of 2",
                                         "connect: 1for1 3for1", "formed 2: 0 2"));
  EXPECT_EQ(coordinator_->Missing(), "rank 1 of 3 missing");
  Lose(3);
  Join(1, {.generation = 2});
  EXPECT_THAT(wire_.Take(1), Not(IsEmpty()));
  EXPECT_EQ(coordinator_->Missing(), "ranks 1, 2 of 3 missing");
  Propose(1, 3, "alone");
  EXPECT_THAT(wire_.Take(1), ElementsAre("0: alone from 0")) << "a generation of one needs no connections";
}

TEST_F(CoordinatorLossTest, TheFirstGenerationHasAllRanksEvenWhereTheyContinue) {
  Start(3, OnLoss::kContinue);
  Hello(1, 0);
  Join(1, {.generation = 7, .weights_version = 40}, 7);
  Hello(2, 1);
  Join(2, {.generation = 8, .weights_version = 41}, 8);
  EXPECT_EQ(coordinator_->Missing(), "rank 2 of 3 missing") << "it may have what nobody else has";
  Hello(3, 2);
  Join(3, {.generation = 3, .weights_version = 90}, 9);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 10: 0 of 3")) << "above all that anyone heard of";
}

TEST_F(CoordinatorLossTest, NobodyContinuesFromAnOlderStateThanTheLastOnes) {
  FormAroundRankOne();
  Lose(2);  // before anyone has its state
  Join(1, {}, 6);
  Join(3, {}, 6);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 6: rank 1 was lost: its connection ended"));
  EXPECT_EQ(coordinator_->Missing(), "rank 1 of 3 missing");
  // It was its link alone.
  Hello(4, 1);
  Join(4, {.generation = 5, .weights_version = 100}, 6);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 7: 0 of 3"));
}

TEST_F(CoordinatorLossTest, WhereOneHasTheLastStateTheOthersMayBeBehind) {
  FormAroundRankOne();
  Lose(2);
  Join(1, {}, 6);
  Join(3, {.generation = 6, .weights_version = 100}, 6);
  Mesh({1, 3}, 7);
  EXPECT_EQ(wire_.Take(3).back(), "formed 7: 0 2");
}

TEST_F(CoordinatorLossTest, WhoComesBackIsLetInWhenRankZeroSaysSo) {
  Start(3, OnLoss::kContinue);
  FormAll();
  Lose(3);
  Join(1, {.generation = 1});
  Join(2, {.generation = 1});
  Mesh({1, 2}, 2);
  wire_.sent.clear();
  Hello(4, 2);
  Join(4);
  EXPECT_EQ(coordinator_->Missing(), "rank 2 waiting to be let in");
  Admit(2, 2, true);
  Admit(1, 1, true);
  Admit(1, 2, false);
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  Admit(1, 2, true);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 2: rank 2 came back"));
  EXPECT_THAT(wire_.Take(4), IsEmpty()) << "it keeps its place";
  Join(1, {.generation = 2});
  Join(2, {.generation = 2});
  Mesh({1, 2, 4}, 3);
  EXPECT_EQ(wire_.Take(4).back(), "formed 3: 0 1 2");
}

TEST_F(CoordinatorLossTest, ADoorThatStandsOpenLetsInWhoComesLater) {
  Start(2, OnLoss::kContinue);
  FormAll();
  Lose(2);
  Join(1, {.generation = 1});
  Admit(1, 2, true);
  wire_.sent.clear();
  Hello(3, 1);
  Join(3);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 2: rank 1 came back"));
}

}  // namespace
}  // namespace shardmlp::testing
