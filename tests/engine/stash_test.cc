// Who gets room in the stash, who makes room, and when it is given back.
#include "server/engine/stash.h"

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kXBytes = 64;  // of a row
constexpr int64_t kGateUpBytes = 192;

class StashTest : public ::testing::Test {
 protected:
  explicit StashTest(int64_t bytes = 1024)
      : memory_(StashMemory::Create(OneThread(), bytes).value()), stash_(memory_, metrics_) {}

  static Stash::Call CallOf(int64_t rows, int64_t session = 1, int layer = 0) {
    return {session, layer, rows, DType::kF32};
  }
  // A forward that was answered; its ticket, and whether it holds the rows' x and [G | U].
  int64_t Forward(const Stash::Call& call, Stash::Claim claim = {}) {
    const Stash::Kept kept = stash_.Keep(call, claim, {kXBytes, kGateUpBytes}, 1);
    if (kept.rows != nullptr) stash_.Finished(kept.ticket, Pass::kForward, /*answered=*/true);
    return kept.ticket;
  }
  enum class Has { kNothing, kX, kXAndGateUp };
  Has Holds(int64_t ticket, const Stash::Call& call) {
    const auto rows = stash_.Find(ticket, call);
    if (!rows.ok()) {
      EXPECT_TRUE(Fails(rows, absl::StatusCode::kFailedPrecondition, Reason::kTicketMissing));
      return Has::kNothing;
    }
    stash_.Finished(ticket, Pass::kBackward, /*answered=*/false);
    return (*rows)->gate_up == nullptr ? Has::kX : Has::kXAndGateUp;
  }
  bool MetricsSay(const std::string& line) const {
    return absl::StrContains(metrics_.Text(), absl::StrCat(line, "\n"));
  }

  Metrics metrics_;
  const std::shared_ptr<StashMemory> memory_;
  Stash stash_;
};

TEST_F(StashTest, MemoryIsLentInPiecesThatComeBackWhole) {
  std::vector<std::shared_ptr<void>> pieces;
  for (int i = 0; i < 16; ++i) pieces.push_back(memory_->Take(i % 2 == 0 ? 64 : 33));
  for (size_t i = 1; i < pieces.size(); ++i) {
    EXPECT_EQ(static_cast<char*>(pieces[i].get()) - static_cast<char*>(pieces[i - 1].get()), 64);
  }
  EXPECT_EQ(memory_->Take(1), nullptr);
  // Whatever the order, neighbours join.
  for (const int i : {3, 5, 4}) pieces[i] = nullptr;
  EXPECT_EQ(memory_->Take(193), nullptr);
  EXPECT_NE(memory_->Take(192), nullptr);
  pieces.clear();
  EXPECT_NE(memory_->Take(1024), nullptr);
}

TEST_F(StashTest, ATicketIsGoodForTheVeryCallItWasGivenFor) {
  const Stash::Call call = CallOf(2);
  const int64_t ticket = Forward(call);
  EXPECT_EQ(Holds(ticket, call), Has::kXAndGateUp);
  EXPECT_EQ(Holds(ticket + 1, call), Has::kNothing);
  EXPECT_EQ(Holds(ticket, CallOf(2, 2)), Has::kNothing);
  EXPECT_EQ(Holds(ticket, CallOf(2, 1, 1)), Has::kNothing);
  EXPECT_EQ(Holds(ticket, CallOf(1)), Has::kNothing);
  Stash::Call other_dtype = call;
  other_dtype.dtype = DType::kBF16;
  EXPECT_EQ(Holds(ticket, other_dtype), Has::kNothing);
  EXPECT_EQ(Holds(ticket, call), Has::kXAndGateUp) << "it is not the worse for it";
  EXPECT_TRUE(MetricsSay("shardmlp_stash_tickets_total{event=\"granted\"} 1"));
  EXPECT_TRUE(MetricsSay("shardmlp_stash_tickets_total{event=\"hit\"} 2"));
  EXPECT_TRUE(MetricsSay("shardmlp_stash_tickets_total{event=\"missed\"} 5"));
}

TEST_F(StashTest, AnAnsweredBackwardUsesTheTicketUpAndAnyOtherDoesNot) {
  const int64_t ticket = Forward(CallOf(2));
  EXPECT_TRUE(MetricsSay("shardmlp_stash_bytes 512"));
  ASSERT_TRUE(Succeeds(stash_.Find(ticket, CallOf(2))));
  stash_.Finished(ticket, Pass::kBackward, /*answered=*/false);
  ASSERT_TRUE(Succeeds(stash_.Find(ticket, CallOf(2))));
  stash_.Finished(ticket, Pass::kBackward, /*answered=*/true);
  EXPECT_EQ(Holds(ticket, CallOf(2)), Has::kNothing);
  EXPECT_TRUE(MetricsSay("shardmlp_stash_bytes 0"));
  stash_.Finished(ticket, Pass::kBackward, /*answered=*/true);  // of a retry that was under way too
}

TEST_F(StashTest, AForwardThatWasNotAnsweredLeavesNothing) {
  const Stash::Kept kept = stash_.Keep(CallOf(4), /*claim=*/{}, {kXBytes, kGateUpBytes}, 1);
  EXPECT_NE(kept.rows, nullptr);
  stash_.Finished(kept.ticket, Pass::kForward, /*answered=*/false);
  EXPECT_EQ(Holds(kept.ticket, CallOf(4)), Has::kNothing);
  EXPECT_TRUE(MetricsSay("shardmlp_stash_bytes 0"));
}

TEST_F(StashTest, TheOldestMakeRoomFirstWithGateAndUpThenWithX) {
  // Four rows of x and [G | U] fill it; sixteen of x do.
  std::vector<int64_t> tickets;
  for (int n = 0; n < 4; ++n) tickets.push_back(Forward(CallOf(1, 1, n)));
  for (int n = 0; n < 4; ++n) EXPECT_EQ(Holds(tickets[n], CallOf(1, 1, n)), Has::kXAndGateUp);
  tickets.push_back(Forward(CallOf(1, 1, 4)));
  EXPECT_EQ(Holds(tickets[0], CallOf(1, 1, 0)), Has::kX);
  EXPECT_EQ(Holds(tickets[4], CallOf(1, 1, 4)), Has::kXAndGateUp);
  for (int n = 5; n < 20; ++n) tickets.push_back(Forward(CallOf(1, 1, n)));
  int held = 0;
  for (int n = 0; n < 20; ++n) {
    const bool holds = Holds(tickets[n], CallOf(1, 1, n)) != Has::kNothing;
    EXPECT_TRUE(holds || held == 0) << "those that are left are the newest";
    held += holds ? 1 : 0;
  }
  EXPECT_EQ(held, 16) << "x of as many as there is room for";
}

TEST_F(StashTest, WhatACallUsesKeepsItsRoom) {
  Stash::Kept open = stash_.Keep(CallOf(4), /*claim=*/{}, {kXBytes, kGateUpBytes}, 1);
  EXPECT_EQ(Forward(CallOf(1)), 0);
  stash_.Finished(open.ticket, Pass::kForward, /*answered=*/true);
  open.rows = nullptr;
  EXPECT_NE(Forward(CallOf(1)), 0);
}

TEST_F(StashTest, MemoryGoesBackWhenTheCallLetsGoOfIt) {
  const Stash::Kept kept = stash_.Keep(CallOf(4), /*claim=*/{}, {kXBytes, kGateUpBytes}, 1);
  stash_.ReleaseAll();
  EXPECT_TRUE(MetricsSay("shardmlp_stash_bytes 0"));
  EXPECT_EQ(memory_->Take(64), nullptr) << "a tile may still be on the device";
}

TEST_F(StashTest, ReadersTakeNoRoomOfATrainer) {
  const int64_t trainers = Forward(CallOf(2, 1));
  const int64_t readers = Forward(CallOf(2, 2), {.reader = true});
  EXPECT_NE(Forward(CallOf(2, 3), {.reader = true}), 0);
  EXPECT_EQ(Holds(trainers, CallOf(2, 1)), Has::kXAndGateUp);
  EXPECT_NE(Holds(readers, CallOf(2, 2)), Has::kXAndGateUp);
  EXPECT_EQ(Forward(CallOf(9, 3), {.reader = true}), 0);
  EXPECT_EQ(Holds(trainers, CallOf(2, 1)), Has::kXAndGateUp);
  EXPECT_NE(Forward(CallOf(16, 1)), 0) << "a trainer takes all of it";
}

TEST_F(StashTest, WhatCanNeverFitTakesNothing) {
  const int64_t ticket = Forward(CallOf(2));
  for (const int64_t rows : {int64_t{0}, int64_t{17}, int64_t{1} << 62, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(Forward(CallOf(rows)), 0) << rows;
  }
  EXPECT_EQ(Holds(ticket, CallOf(2)), Has::kXAndGateUp);
  EXPECT_NE(Forward(CallOf(16)), 0);  // x alone
}

TEST_F(StashTest, ASessionThatEndsTakesItsTicketsAlong) {
  const int64_t first = Forward(CallOf(1, 1)), other = Forward(CallOf(1, 2)), last = Forward(CallOf(1, 1));
  stash_.ReleaseSession(1);
  EXPECT_EQ(Holds(first, CallOf(1, 1)), Has::kNothing);
  EXPECT_EQ(Holds(last, CallOf(1, 1)), Has::kNothing);
  EXPECT_EQ(Holds(other, CallOf(1, 2)), Has::kXAndGateUp);
  EXPECT_TRUE(MetricsSay("shardmlp_stash_bytes 256"));
}

TEST_F(StashTest, APinnedInputStaysUntilItsOwnerReleasesIt) {
  const Stash::Call call = CallOf(2);
  const int64_t pinned = Forward(call, {.pinned = true});
  EXPECT_EQ(Holds(pinned, call), Has::kXAndGateUp);
  EXPECT_NE(Forward(CallOf(14)), 0) << "its [G | U] makes room";
  EXPECT_EQ(Forward(CallOf(15)), 0);
  EXPECT_EQ(Holds(pinned, call), Has::kX);
  ASSERT_TRUE(Succeeds(stash_.Find(pinned, call)));
  stash_.Finished(pinned, Pass::kBackward, /*answered=*/true);
  EXPECT_EQ(Holds(pinned, call), Has::kX) << "a graph that was retained goes back again";
  stash_.Release(pinned, /*session_id=*/2);
  EXPECT_EQ(Holds(pinned, call), Has::kX) << "it is session 1's";
  stash_.Release(pinned, /*session_id=*/1);
  stash_.Release(pinned, /*session_id=*/1);
  EXPECT_EQ(Holds(pinned, call), Has::kNothing);
  EXPECT_NE(Forward(CallOf(16), {.pinned = true}), 0);
  EXPECT_EQ(Forward(CallOf(1), {.pinned = true}), 0);
  EXPECT_TRUE(Fails(stash_.Full(CallOf(1), {kXBytes, kGateUpBytes}), absl::StatusCode::kFailedPrecondition,
                    Reason::kStashFull, {"64 bytes each", "1024"}));
  stash_.ReleaseAll();
  EXPECT_TRUE(MetricsSay("shardmlp_stash_bytes 0"));
}

TEST_F(StashTest, ReadersPinHalfAtMost) {
  const Stash::Claim claim = {.pinned = true, .reader = true};
  const int64_t first = Forward(CallOf(8, 2), claim);
  EXPECT_NE(first, 0);
  EXPECT_EQ(Forward(CallOf(1, 3), claim), 0);
  EXPECT_NE(Forward(CallOf(8, 1), {.pinned = true}), 0) << "the rest is the trainers'";
  stash_.Release(first, 2);
  EXPECT_NE(Forward(CallOf(8, 3), claim), 0);
}

class NoStashTest : public StashTest {
 protected:
  NoStashTest() : StashTest(0) {}
};

TEST_F(NoStashTest, GivesNoTicket) { EXPECT_EQ(Forward(CallOf(1)), 0); }

}  // namespace
}  // namespace shardmlp::testing
