// Who is in, in which order, and what all have: stories of one coordinator, without network or time.
#include "server/sync/rendezvous/coordinator.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Connections that write down what they are sent.
class Wire final : public Coordinator::Carrier {
 public:
  void Send(int64_t connection, const v1::MeetResponse& response) override {
    if (!response.has_waiting()) sent[connection].push_back(Describe(response));
  }
  void End(int64_t connection, const absl::Status& why) override { ended[connection] = why; }

  // What was sent there since the last call.
  std::vector<std::string> Take(int64_t connection) { return std::exchange(sent[connection], {}); }

  std::map<int64_t, std::vector<std::string>> sent;
  std::map<int64_t, absl::Status> ended;

 private:
  static std::string Describe(const v1::MeetResponse& response) {
    if (response.has_gather()) {
      const v1::Gather& gather = response.gather();
      return absl::StrCat("gather ", gather.generation(), ": ", gather.index(), " of ", gather.member_count());
    }
    if (response.has_connect()) return absl::StrCat("connect: ", absl::StrJoin(response.connect().addresses(), " "));
    if (response.has_formed()) {
      std::string text = absl::StrCat("formed ", response.formed().generation(), ":");
      for (const v1::Member& member : response.formed().members()) absl::StrAppend(&text, " ", member.rank());
      return text;
    }
    if (response.has_agreed()) {
      const v1::Agreed& agreed = response.agreed();
      return absl::StrCat(agreed.index(), ": ", agreed.message(), " from ", agreed.rank());
    }
    if (response.has_stable()) return absl::StrCat("stable ", response.stable().index());
    if (response.has_lost()) {
      return absl::StrCat("lost ", response.lost().generation(), ": ", response.lost().reason());
    }
    return response.ShortDebugString();
  }
};

v1::Hello HelloOf(int rank, int size) {
  v1::Hello hello;
  hello.set_rank(rank);
  hello.set_size(size);
  hello.set_model("tiny");
  hello.set_layers("0-3");
  hello.set_dtype("f32");
  return hello;
}

// A coordinator, and what replicas say to it. A connection is named by its number; here rank r's first is r + 1.
class CoordinatorTest : public ::testing::Test {
 protected:
  void Start(int size, OnLoss on_loss) {
    size_ = size;
    coordinator_.emplace(HelloOf(0, size), on_loss, wire_);
  }

  void Hello(int64_t connection, int rank) {
    v1::MeetRequest request;
    *request.mutable_hello() = HelloOf(rank, size_);
    coordinator_->Receive(connection, request);
  }
  void Join(int64_t connection, const ReplicaState& state = {}, int64_t last_generation = 0) {
    v1::MeetRequest request;
    v1::ReplicaPosition& position = *request.mutable_join()->mutable_position();
    position.set_generation(state.generation);
    position.set_step(state.step);
    position.set_weights_version(state.weights_version);
    request.mutable_join()->set_last_generation(last_generation);
    coordinator_->Receive(connection, request);
  }
  void SendAddresses(int64_t connection, int64_t generation, int count) {
    v1::MeetRequest request;
    request.mutable_addresses()->set_generation(generation);
    for (int i = 0; i < count; ++i) request.mutable_addresses()->add_addresses(absl::StrCat(connection, "for", i));
    coordinator_->Receive(connection, request);
  }
  void SendConnected(int64_t connection, int64_t generation) {
    v1::MeetRequest request;
    request.mutable_connected()->set_generation(generation);
    coordinator_->Receive(connection, request);
  }
  void SendFailed(int64_t connection, int64_t generation, const std::string& error) {
    v1::MeetRequest request;
    request.mutable_failed()->set_generation(generation);
    request.mutable_failed()->set_error(error);
    coordinator_->Receive(connection, request);
  }
  void Propose(int64_t connection, int64_t generation, const std::string& message) {
    v1::MeetRequest request;
    request.mutable_propose()->set_generation(generation);
    request.mutable_propose()->set_message(message);
    coordinator_->Receive(connection, request);
  }
  void Acknowledge(int64_t connection, int64_t generation, int64_t index) {
    v1::MeetRequest request;
    request.mutable_acknowledge()->set_generation(generation);
    request.mutable_acknowledge()->set_index(index);
    coordinator_->Receive(connection, request);
  }
  void Admit(int64_t connection, int64_t generation, bool now) {
    v1::MeetRequest request;
    request.mutable_admit()->set_generation(generation);
    request.mutable_admit()->set_now(now);
    coordinator_->Receive(connection, request);
  }
  void Beat(int64_t connection) {
    v1::MeetRequest request;
    request.mutable_heartbeat();
    coordinator_->Receive(connection, request);
  }
  void Lose(int64_t connection) { coordinator_->Closed(connection, absl::UnavailableError("its connection ended")); }

  // The members' answers to Gather and Connect.
  void Mesh(const std::vector<int64_t>& connections, int64_t generation) {
    for (const int64_t c : connections) SendAddresses(c, generation, static_cast<int>(connections.size()));
    for (const int64_t c : connections) SendConnected(c, generation);
  }
  // All ranks join with equal states and hear Formed.
  void FormAll() {
    std::vector<int64_t> connections;
    for (int rank = 0; rank < size_; ++rank) {
      connections.push_back(rank + 1);
      Hello(rank + 1, rank);
      Join(rank + 1);
    }
    Mesh(connections, 1);
    wire_.sent.clear();
  }

  int size_ = 0;
  Wire wire_;
  std::optional<Coordinator> coordinator_;
};

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

TEST_F(CoordinatorTest, WaitingMeansForAllRanks) {
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

TEST_F(CoordinatorTest, ContinuingMeansWithThoseThatAreLeftOnceAllOfThemHaveJoined) {
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

TEST_F(CoordinatorTest, TheFirstGenerationHasAllRanksEvenWhereTheyContinue) {
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

TEST_F(CoordinatorTest, NobodyContinuesFromAnOlderStateThanTheLastOnes) {
  Start(3, OnLoss::kContinue);
  for (int rank = 0; rank < 3; ++rank) Hello(rank + 1, rank);
  Join(1);
  Join(2, {.generation = 5, .weights_version = 100}, 5);
  Join(3);
  Mesh({1, 2, 3}, 6);
  wire_.sent.clear();
  // Rank 1 is lost before anyone has its state.
  Lose(2);
  Join(1, {}, 6);
  Join(3, {}, 6);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 6: rank 1 was lost: its connection ended"));
  EXPECT_EQ(coordinator_->Missing(), "rank 1 of 3 missing");
  // It was its link alone.
  Hello(4, 1);
  Join(4, {.generation = 5, .weights_version = 100}, 6);
  EXPECT_THAT(wire_.Take(1), ElementsAre("gather 7: 0 of 3"));
}

TEST_F(CoordinatorTest, WhereOneHasTheLastStateTheOthersMayBeBehind) {
  Start(3, OnLoss::kContinue);
  for (int rank = 0; rank < 3; ++rank) Hello(rank + 1, rank);
  Join(1);
  Join(2, {.generation = 5, .weights_version = 100}, 5);
  Join(3);
  Mesh({1, 2, 3}, 6);
  wire_.sent.clear();
  Lose(2);
  Join(1, {}, 6);
  Join(3, {.generation = 6, .weights_version = 100}, 6);
  Mesh({1, 3}, 7);
  EXPECT_EQ(wire_.Take(3).back(), "formed 7: 0 2");
}

TEST_F(CoordinatorTest, WhoComesBackIsLetInWhenRankZeroSaysSo) {
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

TEST_F(CoordinatorTest, ADoorThatStandsOpenLetsInWhoComesLater) {
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

TEST_F(CoordinatorTest, AReplicaThatDiffersIsRefusedByNameAndTheOthersHear) {
  Start(3, OnLoss::kWait);
  Hello(1, 0);
  const auto refused = [&](int64_t connection, const v1::Hello& hello) {
    v1::MeetRequest request;
    *request.mutable_hello() = hello;
    coordinator_->Receive(connection, request);
    EXPECT_EQ(ReasonOf(wire_.ended[connection]), Reason::kReplicaConflict);
    return std::string(wire_.ended[connection].message());
  };
  v1::Hello hello = HelloOf(1, 3);
  hello.set_dtype("bf16");
  EXPECT_EQ(refused(2, hello), "rank 1 has dtype bf16, rank 0 has f32");
  EXPECT_EQ(coordinator_->Missing(),
            "ranks 1, 2 of 3 missing; rank 0 not ready to join; refused: rank 1 has dtype bf16, rank 0 has f32");
  hello.set_model("large");
  hello.set_layers("4-7");
  EXPECT_EQ(refused(3, hello),
            "rank 1 has model large, rank 0 has tiny; rank 1 has layers 4-7, rank 0 has 0-3; rank 1 has dtype bf16, "
            "rank 0 has f32");
  EXPECT_EQ(refused(4, HelloOf(1, 2)), "rank 1 has number of replicas 2, rank 0 has 3");
  EXPECT_EQ(refused(5, HelloOf(3, 4)), "rank 3 has number of replicas 4, rank 0 has 3");
  EXPECT_EQ(refused(6, HelloOf(3, 3)), "rank 3 of 3 replicas");
  Hello(7, 1);
  EXPECT_EQ(coordinator_->Missing(), "rank 2 of 3 missing; ranks 0, 1 not ready to join");
}

TEST_F(CoordinatorTest, ASecondReplicaOfARankIsRefusedOnceTheFirstShowsThatItLives) {
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

TEST_F(CoordinatorTest, WhoWaitsHasNoSayInTheGenerationThatIsFormed) {
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

TEST_F(CoordinatorTest, ASecondReplicaOfARankWhoseFirstIsDeadTakesItsPlace) {
  Start(2, OnLoss::kWait);
  FormAll();
  Hello(3, 1);
  Join(3);
  Beat(2);
  Lose(2);
  Join(1, {.generation = 1});
  EXPECT_THAT(wire_.Take(3), ElementsAre("gather 2: 1 of 2"));
}

TEST_F(CoordinatorTest, AThirdReplicaOfARankIsRefusedAtOnce) {
  Start(2, OnLoss::kWait);
  Hello(1, 0);
  Hello(2, 0);
  Hello(3, 0);
  EXPECT_THAT(std::string(wire_.ended[3].message()), HasSubstr("rank 0 is taken"));
  Lose(2);
  Hello(4, 0);
  EXPECT_FALSE(wire_.ended.contains(4)) << "the second gave up";
}

TEST_F(CoordinatorTest, AReplicaThatStopsIsLostWithItsReason) {
  Start(2, OnLoss::kWait);
  FormAll();
  v1::MeetRequest request;
  request.mutable_leave()->set_reason("its device failed");
  coordinator_->Receive(2, request);
  EXPECT_THAT(wire_.Take(1), ElementsAre("lost 1: rank 1 was lost: it stopped: its device failed"));
  EXPECT_EQ(wire_.ended[2].code(), absl::StatusCode::kCancelled);
}

TEST_F(CoordinatorTest, WhatIsTooLargeCostsItsSenderItsConnectionAndReachesNobodyElse) {
  const auto is_refused = [this](int64_t connection) {
    return wire_.ended[connection].code() == absl::StatusCode::kInvalidArgument;
  };
  Start(2, OnLoss::kWait);
  Hello(1, 0);
  Join(1);
  v1::MeetRequest request;
  *request.mutable_hello() = HelloOf(1, 2);
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

TEST_F(CoordinatorTest, MessagesOutOfOrderEndTheirConnectionAlone) {
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
