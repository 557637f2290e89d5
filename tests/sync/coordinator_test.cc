// Who is in, in which order, and what all have: how generations form, agree and end.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/sync/coordinator_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(CoordinatorTest, AGenerationFormsOnceAllHaveJoinedAndAreConnected) {
  Start(2, OnLoss::kWait);
  EXPECT_EQ(coordinator_->Missing(), "ranks 0, 1 of 2 missing");
  Hello(1, 0);
  Join(1);
  EXPECT_EQ(coordinator_->Missing(), "rank 1 of 2 missing");
  Hello(2, 1);
  EXPECT_EQ(coordinator_->Missing(), "rank 1 not ready to join");
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  Join(2);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 1: 0 of 2"));
  EXPECT_THAT(wire_.Take(2), ElementsAre("gather 1: 1 of 2"));
  SendAddresses(2, 1, 2);
  EXPECT_EQ(coordinator_->Missing(), "rank 0 not connected to the others yet");
  SendAddresses(1, 1, 2);
  EXPECT_THAT(wire_.Take(1), ElementsAre("connect: 1for0 2for0"));
  EXPECT_THAT(wire_.Take(2), ElementsAre("connect: 1for1 2for1"));
  SendConnected(1, 1);
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  SendConnected(2, 1);
  EXPECT_THAT(wire_.Take(1), ElementsAre("formed 1: 0 1"));
  EXPECT_THAT(wire_.Take(2), ElementsAre("formed 1: 0 1"));
  EXPECT_EQ(coordinator_->Missing(), "");
}

TEST_F(CoordinatorTest, AMemberThatCannotConnectIsGivenUpAndTheOthersKeepTheirPlaces) {
  Start(2, OnLoss::kWait);
  Hello(1, 0);
  Join(1);
  Hello(2, 1);
  Join(2);
  SendFailed(2, 1, "no route to host");
  EXPECT_EQ(wire_.ended[2].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 1: 0 of 2", "lost 1: rank 1 was lost: no route to host"));
  Hello(3, 1);
  Join(3);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 2: 0 of 2")) << "without another join of rank 0's";
  SendAddresses(1, 1, 2);
  Mesh({1, 3}, 2);
  EXPECT_THAT(wire_.Take(3), ElementsAre("gather 2: 1 of 2", "connect: 1for1 3for1", "formed 2: 0 1"));
}

TEST_F(CoordinatorTest, AMemberThatDoesNotAnswerIsLostInTimeAndTheOthersGoOn) {
  Start(3, OnLoss::kContinue);
  FormAll();
  Lose(3);
  wire_.sent.clear();
  absl::Time now = absl::FromUnixSeconds(1'000'000);
  const auto pass = [&](absl::Duration duration) { coordinator_->Tick(now += duration); };
  for (const int64_t c : {1, 2}) Join(c, {.generation = 1}, 1);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 2: 0 of 2"));
  pass(absl::ZeroDuration());
  SendAddresses(1, 2, 2);
  pass(kMeetTimeout - absl::Seconds(1));
  EXPECT_EQ(coordinator_->Missing(), "rank 2 of 3 missing; rank 1 not connected to the others yet");
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  pass(absl::Seconds(1));
  EXPECT_THAT(wire_.Take(1),
              ElementsAre("lost 2: rank 1 was lost: it did not say where it is found within 25s", "formed 3: 0"));
  EXPECT_EQ(ReasonOf(wire_.ended[2]), Reason::kReplicaLost);
}

TEST_F(CoordinatorTest, SoIsOneThatDoesNotConnectAndTheTimeCountsFromWhenItWasAsked) {
  Start(2, OnLoss::kWait);
  absl::Time now = absl::FromUnixSeconds(1'000'000);
  const auto pass = [&](absl::Duration duration) { coordinator_->Tick(now += duration); };
  for (const int rank : {0, 1}) {
    Hello(rank + 1, rank);
    Join(rank + 1);
  }
  pass(absl::Hours(1));
  for (const int64_t c : {1, 2}) SendAddresses(c, 1, 2);
  pass(kMeetTimeout);
  SendConnected(1, 1);
  pass(kMeetTimeout - absl::Seconds(1));
  wire_.sent.clear();
  pass(absl::Seconds(1));
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 1: rank 1 was lost: it did not connect to the others within 25s"));
  pass(absl::Hours(1));
  Hello(3, 1);
  Join(3);
  Mesh({1, 3}, 2);
  pass(absl::Hours(1));
  EXPECT_EQ(coordinator_->Missing(), "");
}

TEST_F(CoordinatorTest, ACollectiveThatFailsEndsTheGenerationAndCostsNobodyItsConnection) {
  Start(2, OnLoss::kWait);
  FormAll();
  SendFailed(2, 7, "of another generation");
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  SendFailed(2, 1, "timed out");
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 1: a collective failed on rank 1: timed out"));
  EXPECT_THAT(wire_.Take(2), ElementsAre("lost 1: a collective failed on rank 1: timed out"));
  SendFailed(1, 1, "here too");
  Join(1, {.generation = 1});
  Join(2, {.generation = 1});
  EXPECT_THAT(wire_.Take(2), ElementsAre("gather 2: 1 of 2"));
  EXPECT_TRUE(wire_.ended.empty());
}

TEST_F(CoordinatorTest, MessagesGetOneOrderAndAreStableOnceAllAcknowledgedThem) {
  Start(2, OnLoss::kWait);
  FormAll();
  Propose(2, 1, "b");
  Propose(1, 1, "a");
  EXPECT_THAT(wire_.Take(1), ElementsAre("0: b from 1", "1: a from 0"));
  EXPECT_THAT(wire_.Take(2), ElementsAre("0: b from 1", "1: a from 0"));
  Acknowledge(1, 1, 0);
  Acknowledge(1, 1, 1);
  EXPECT_THAT(wire_.Take(1), IsEmpty());
  Acknowledge(2, 1, 1);
  EXPECT_THAT(wire_.Take(1), ElementsAre("stable 1"));
  EXPECT_THAT(wire_.Take(2), ElementsAre("stable 1"));
}

TEST_F(CoordinatorTest, NothingOfAnotherGenerationCounts) {
  Start(2, OnLoss::kWait);
  FormAll();
  Propose(1, 2, "early");
  Acknowledge(1, 2, 0);
  Lose(2);
  Propose(1, 1, "late");
  Hello(3, 1);
  Join(3);
  Join(1, {.generation = 1});
  Mesh({1, 3}, 2);
  Propose(1, 1, "of the last");
  EXPECT_THAT(wire_.Take(3), ElementsAre("gather 2: 1 of 2", "connect: 1for1 3for1", "formed 2: 0 1"));
}

}  // namespace
}  // namespace shardmlp::testing
