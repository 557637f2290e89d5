#include "server/engine/session_table.h"

#include <set>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

constexpr absl::Duration kLease = absl::Seconds(30);
const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

SessionTable::Limits Limits(int64_t max_sessions = 256, bool frozen = false) {
  return {max_sessions, kLease, frozen, frozen ? max_sessions : max_sessions / 2};
}

SessionSpec Trainer(int rank, int count, const std::string& run = "run") {
  return {run, SessionRole::kTrain, count, rank};
}

SessionSpec Reader() { return {"", SessionRole::kRead, 0, 0}; }

TEST(SessionTableTest, ASessionIsFoundUntilItIsClosed) {
  SessionTable table(Limits());
  const int64_t id = table.Open(Trainer(1, 2), kStart).value();
  EXPECT_GT(id, 0);
  const absl::StatusOr<SessionSpec> found = table.Find(id, kStart);
  ASSERT_TRUE(Succeeds(found));
  EXPECT_EQ(found->trainer_rank, 1);
  EXPECT_TRUE(table.Close(id));
  EXPECT_TRUE(Fails(table.Find(id, kStart), absl::StatusCode::kNotFound, Reason::kUnknownSession));
  EXPECT_FALSE(table.Close(id));
}

TEST(SessionTableTest, ARepeatOfAnOpeningGetsTheSameSession) {
  SessionTable table(Limits());
  SessionSpec spec = Trainer(0, 2);
  spec.opening_id = 7;
  const int64_t id = table.Open(spec, kStart).value();
  EXPECT_EQ(table.Open(spec, kStart + kLease / 2).value(), id);
  EXPECT_TRUE(table.Expire(kStart + kLease).empty());
  spec.opening_id = 8;
  EXPECT_TRUE(Fails(table.Open(spec, kStart), absl::StatusCode::kFailedPrecondition, Reason::kRunConflict));
}

TEST(SessionTableTest, IdsDoNotRepeatAndAreHardToGuess) {
  SessionTable table(Limits());
  std::set<int64_t> ids;
  for (int i = 0; i < 100; ++i) ids.insert(table.Open(Reader(), kStart).value());
  EXPECT_EQ(ids.size(), 100u);
  // 100 draws of 63 random bits: that none exceeds 2^55 has a chance of 2^-800.
  EXPECT_GT(*ids.rbegin(), int64_t{1} << 55);
}

TEST(SessionTableTest, TheLeaseEndsUnlessItIsRenewed) {
  SessionTable table(Limits());
  const int64_t renewed = table.Open(Trainer(0, 2), kStart).value();
  const int64_t silent = table.Open(Trainer(1, 2), kStart).value();
  ASSERT_TRUE(Succeeds(table.Find(renewed, kStart + kLease / 2)));
  EXPECT_TRUE(table.Expire(kStart + kLease - absl::Nanoseconds(1)).empty());
  EXPECT_EQ(table.Expire(kStart + kLease), std::vector<int64_t>{silent});
  EXPECT_TRUE(Fails(table.Find(silent, kStart + kLease), absl::StatusCode::kNotFound, Reason::kUnknownSession));
  EXPECT_EQ(table.Expire(kStart + kLease / 2 + kLease), std::vector<int64_t>{renewed});
}

TEST(SessionTableTest, AnOpenCallKeepsItsSessionAndItsEndRenewsTheLease) {
  SessionTable table(Limits());
  const int64_t id = table.Open(Reader(), kStart).value();
  table.CallOpened(id);
  table.CallOpened(id);
  EXPECT_TRUE(table.Expire(kStart + 10 * kLease).empty());
  table.CallClosed(id, kStart + 10 * kLease);
  EXPECT_TRUE(table.Expire(kStart + 20 * kLease).empty()) << "one call is open yet";
  table.CallClosed(id, kStart + 20 * kLease);
  EXPECT_TRUE(table.Expire(kStart + 21 * kLease - absl::Nanoseconds(1)).empty());
  EXPECT_EQ(table.Expire(kStart + 21 * kLease), std::vector<int64_t>{id});
}

TEST(SessionTableTest, ACallMayOutliveItsSession) {
  SessionTable table(Limits());
  const int64_t id = table.Open(Reader(), kStart).value();
  table.CallOpened(id);
  table.Close(id);
  table.CallClosed(id, kStart);
  EXPECT_TRUE(Fails(table.Find(id, kStart), absl::StatusCode::kNotFound, Reason::kUnknownSession));
}

TEST(SessionTableTest, ASecondRunIsRefusedAndLearnsWhoTrainsAndUntilWhen) {
  SessionTable table(Limits());
  const int64_t id = table.Open(Trainer(0, 1, "first"), kStart).value();
  const SessionSpec second = Trainer(0, 1, "second");
  EXPECT_TRUE(Fails(table.Open(second, kStart + absl::Seconds(10)), absl::StatusCode::kFailedPrecondition,
                    Reason::kRunConflict, {"'first'", "'second'", "lease ends in 20s"}));
  table.CallOpened(id);
  EXPECT_TRUE(Fails(table.Open(second, kStart), absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                    {"it has a call open"}));
  table.Close(id);
  EXPECT_TRUE(Succeeds(table.Open(second, kStart)));
}

TEST(SessionTableTest, TheTrainersOfARunDifferInRankAndAgreeOnTheirNumber) {
  SessionTable table(Limits());
  ASSERT_TRUE(Succeeds(table.Open(Trainer(0, 2), kStart)));
  EXPECT_TRUE(Fails(table.Open(Trainer(0, 2), kStart), absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                    {"rank 0"}));
  EXPECT_TRUE(Fails(table.Open(Trainer(1, 3), kStart), absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                    {"2 trainers", "3"}));
  EXPECT_TRUE(Succeeds(table.Open(Trainer(1, 2), kStart)));
}

TEST(SessionTableTest, ARankThatWasLostMayComeBack) {
  SessionTable table(Limits());
  ASSERT_TRUE(Succeeds(table.Open(Trainer(0, 1), kStart)));
  ASSERT_EQ(table.Expire(kStart + kLease).size(), 1u);
  EXPECT_TRUE(Succeeds(table.Open(Trainer(0, 1), kStart + kLease)));
}

TEST(SessionTableTest, ReadersNeedNoRunAndStandInNobodysWay) {
  SessionTable table(Limits());
  ASSERT_TRUE(Succeeds(table.Open(Trainer(0, 1), kStart)));
  ASSERT_TRUE(Succeeds(table.Open(Reader(), kStart)));
  ASSERT_TRUE(Succeeds(table.Open(Reader(), kStart)));
  EXPECT_EQ(table.Count(SessionRole::kTrain), 1);
  EXPECT_EQ(table.Count(SessionRole::kRead), 2);
}

TEST(SessionTableTest, AFrozenServerTakesAnyNumberOfRuns) {
  SessionTable table(Limits(256, /*frozen=*/true));
  EXPECT_TRUE(Succeeds(table.Open(Trainer(0, 1, "first"), kStart)));
  EXPECT_TRUE(Succeeds(table.Open(Trainer(0, 1, "second"), kStart)));
  EXPECT_TRUE(Succeeds(table.Open(Trainer(0, 1, "second"), kStart)));
}

TEST(SessionTableTest, NoMoreSessionsThanMayBeOpen) {
  SessionTable table(Limits(2, /*frozen=*/true));
  const int64_t id = table.Open(Reader(), kStart).value();
  ASSERT_TRUE(Succeeds(table.Open(Reader(), kStart)));
  EXPECT_TRUE(
      Fails(table.Open(Reader(), kStart), absl::StatusCode::kResourceExhausted, Reason::kTooManySessions, {"2"}));
  table.Close(id);
  EXPECT_TRUE(Succeeds(table.Open(Reader(), kStart)));
}

TEST(SessionTableTest, ReadersLeaveTrainersTheirHalf) {
  SessionTable table(Limits(4));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Succeeds(table.Open(Reader(), kStart)));
  EXPECT_TRUE(Fails(table.Open(Reader(), kStart), absl::StatusCode::kResourceExhausted, Reason::kTooManySessions,
                    {"all 2 read sessions", "4"}));
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(Succeeds(table.Open(Trainer(rank, 3), kStart)));
  EXPECT_TRUE(Fails(table.Open(Trainer(2, 3), kStart), absl::StatusCode::kResourceExhausted, Reason::kTooManySessions,
                    {"all 4 sessions"}));
}

TEST(SessionTableTest, WhatIsOutOfRangeIsNamed) {
  SessionTable table(Limits());
  const auto refused = [&](const SessionSpec& spec, std::initializer_list<absl::string_view> named) {
    EXPECT_TRUE(Fails(table.Open(spec, kStart), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, named));
  };
  refused(Trainer(0, 1, ""), {"run_id has 0 bytes"});
  refused(Trainer(0, 1, std::string(129, 'r')), {"run_id has 129 bytes", "128"});
  refused(Trainer(0, 0), {"trainer_count is 0"});
  refused(Trainer(0, 4097), {"trainer_count is 4097", "4096"});
  refused(Trainer(-1, 2), {"trainer_rank is -1", "0 to 1"});
  refused(Trainer(2, 2), {"trainer_rank is 2", "0 to 1"});
  EXPECT_TRUE(Succeeds(table.Open(Trainer(4095, 4096, std::string(128, 'r')), kStart)));
}

}  // namespace
}  // namespace shardmlp::testing
