// Replicas that the coordinator refuses, or gives up: by name, and without harm to the others.
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/sync/coordinator_harness.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class CoordinatorRefusalTest : public CoordinatorTest {};

TEST_F(CoordinatorRefusalTest, AReplicaThatDiffersIsRefusedByNameAndTheOthersHear) {
  Start(3, OnLoss::kWait);
  Hello(1, 0);
  const auto refused = [&](int64_t connection, const v1::Hello& hello) {
    v1::MeetRequest request;
    *request.mutable_hello() = hello;
    coordinator_->Receive(connection, request);
    EXPECT_EQ(ReasonOf(wire_.ended[connection]), Reason::kReplicaConflict);
    return std::string(wire_.ended[connection].message());
  };
  v1::Hello hello = CoordinatorHello(1, 3);
  hello.set_dtype("bf16");
  EXPECT_EQ(refused(2, hello), "rank 1 has dtype bf16, rank 0 has f32");
  EXPECT_EQ(coordinator_->Missing(),
            "ranks 1, 2 of 3 missing; rank 0 not ready to join; refused: rank 1 has dtype bf16, rank 0 has f32");
  hello.set_model("large");
  hello.set_layers("4-7");
  EXPECT_EQ(refused(3, hello),
            "rank 1 has model large, rank 0 has tiny; rank 1 has layers 4-7, rank 0 has 0-3; rank 1 has dtype bf16, "
            "rank 0 has f32");
  EXPECT_EQ(refused(4, CoordinatorHello(1, 2)), "rank 1 has number of replicas 2, rank 0 has 3");
  EXPECT_EQ(refused(5, CoordinatorHello(3, 4)), "rank 3 has number of replicas 4, rank 0 has 3");
  EXPECT_EQ(refused(6, CoordinatorHello(3, 3)), "rank 3 of 3 replicas");
  Hello(7, 1);
  EXPECT_EQ(coordinator_->Missing(), "rank 2 of 3 missing; ranks 0, 1 not ready to join");
}

TEST_F(CoordinatorRefusalTest, ASecondReplicaOfARankIsRefusedOnceTheFirstShowsThatItLives) {
  Start(2, OnLoss::kWait);
  FormAll();
  Hello(3, 1);
  Join(3);
  EXPECT_TRUE(wire_.ended.empty());
  Beat(2);
  EXPECT_TRUE(wire_.ended.empty()) << "that may have been on its way when it died";
  Beat(2);
  EXPECT_EQ(wire_.ended[3].message(), "rank 1 is taken by a replica that lives");
  EXPECT_EQ(ReasonOf(wire_.ended[3]), Reason::kReplicaConflict);
  Propose(1, 1, "a");
  EXPECT_THAT(wire_.Take(2), ElementsAre("0: a from 0")) << "and the first is not disturbed";
}

TEST_F(CoordinatorRefusalTest, WhoWaitsHasNoSayInTheGenerationThatIsFormed) {
  Start(2, OnLoss::kWait);
  FormAll();
  Hello(3, 1);
  Join(3, {.generation = 7}, 9);
  Propose(1, 1, "a");
  EXPECT_THAT(wire_.Take(2), ElementsAre("0: a from 0"));
  Lose(2);
  Join(1, {.generation = 1});
  EXPECT_THAT(wire_.Take(3), ElementsAre("gather 10: 1 of 2")) << "above all that any of them knows";
}

TEST_F(CoordinatorRefusalTest, ASecondReplicaOfARankWhoseFirstIsDeadTakesItsPlace) {
  Start(2, OnLoss::kWait);
  FormAll();
  Hello(3, 1);
  Join(3);
  Beat(2);
  Lose(2);
  Join(1, {.generation = 1});
  EXPECT_THAT(wire_.Take(3), ElementsAre("gather 2: 1 of 2"));
}

TEST_F(CoordinatorRefusalTest, AThirdReplicaOfARankIsRefusedAtOnce) {
  Start(2, OnLoss::kWait);
  Hello(1, 0);
  Hello(2, 0);
  Hello(3, 0);
  EXPECT_THAT(std::string(wire_.ended[3].message()), HasSubstr("rank 0 is taken"));
  Lose(2);
  Hello(4, 0);
  EXPECT_FALSE(wire_.ended.contains(4)) << "the second gave up";
}

TEST_F(CoordinatorRefusalTest, AReplicaThatStopsIsLostWithItsReason) {
  Start(2, OnLoss::kWait);
  FormAll();
  v1::MeetRequest request;
  request.mutable_leave()->set_reason("its device failed");
  coordinator_->Receive(2, request);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 1: rank 1 was lost: it stopped: its device failed"));
  EXPECT_EQ(wire_.ended[2].code(), absl::StatusCode::kCancelled);
}

TEST_F(CoordinatorRefusalTest, WhatIsTooLargeCostsItsSenderItsConnectionAndReachesNobodyElse) {
  const auto is_refused = [this](int64_t connection) {
    return wire_.ended[connection].code() == absl::StatusCode::kInvalidArgument;
  };
  Start(2, OnLoss::kWait);
  Hello(1, 0);
  Join(1);
  v1::MeetRequest request;
  *request.mutable_hello() = CoordinatorHello(1, 2);
  request.mutable_hello()->set_model(std::string(2 << 20, 'x'));  // no message that repeats it would arrive
  coordinator_->Receive(2, request);
  EXPECT_TRUE(is_refused(2));
  EXPECT_THAT(coordinator_->Missing(), Not(HasSubstr("xxx")));

  Hello(3, 1);
  Join(3, {}, std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(is_refused(3)) << "there is no generation above that";
  Hello(4, 1);
  Join(4);
  for (int i = 0; i < 2; ++i) request.mutable_addresses()->add_addresses(std::string(257, 'x'));
  request.mutable_addresses()->set_generation(1);
  coordinator_->Receive(4, request);
  EXPECT_TRUE(is_refused(4));

  Hello(5, 1);
  Join(5);
  SendFailed(5, 2, std::string(2 << 20, 'x'));
  EXPECT_LT(wire_.Take(1).back().size(), 2000u);
}

TEST_F(CoordinatorRefusalTest, MessagesOutOfOrderEndTheirConnectionAlone) {
  Start(2, OnLoss::kWait);
  Join(9);
  EXPECT_EQ(wire_.ended[9].code(), absl::StatusCode::kInvalidArgument) << "before hello";
  FormAll();
  Hello(2, 1);
  EXPECT_EQ(wire_.ended[2].code(), absl::StatusCode::kInvalidArgument) << "two hellos";
  EXPECT_FALSE(wire_.ended.contains(1));
  Join(1, {.generation = 1});
  Hello(3, 1);
  Join(3);
  Mesh({1, 3}, 2);
  Acknowledge(3, 2, 0);
  EXPECT_EQ(wire_.ended[3].code(), absl::StatusCode::kInvalidArgument) << "of what was never sent";
  Propose(1, 2, std::string((1 << 20) + 1, 'x'));
  EXPECT_EQ(wire_.ended[1].code(), absl::StatusCode::kInvalidArgument) << "above 1 MiB";
}

}  // namespace
}  // namespace shardmlp::testing
