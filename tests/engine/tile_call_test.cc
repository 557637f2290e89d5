// A call's rows on their way through tiles, one thing at a time.
#include "server/engine/tile_call.h"

#include <cmath>
#include <limits>
#include <map>

#include "gtest/gtest.h"
#include "tests/engine/call_harness.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

Dense Expected(const CallRig& rig) {
  return rig.spec.pass == Pass::kForward ? HostForward(rig.x) : HostBackward(rig.x, rig.dy);
}

TEST(TileCallTest, ShardsAreJoinedAndSplitIntoTilesOfAnySize) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (int64_t tile_rows = 1; tile_rows <= 12; ++tile_rows) {
      for (int64_t shard_rows = 1; shard_rows <= 11; ++shard_rows) {
        CallRig rig(pass, 11, tile_rows);
        rig.Send(shard_rows);
        SCOPED_TRACE(absl::StrCat("shards of ", shard_rows, ", tiles of ", tile_rows));
        EXPECT_EQ(rig.sink.rows(), Expected(rig));
        ASSERT_TRUE(Succeeds(rig.sink.summary));
        EXPECT_EQ(rig.sink.summary->row_count, 11);
        EXPECT_EQ(rig.sink.summary->weights_version, 5);
        EXPECT_EQ(rig.sink.summary->repeated_row_count, 0);
        EXPECT_EQ(rig.sink.finishes, 1);
        EXPECT_EQ(rig.host->finished_calls, 1);
      }
    }
  }
}

TEST(TileCallTest, TilesAndTheirHashesDependOnRowsAlone) {
  // However a call is cut into shards, a retry meets the same tiles: that is what makes it countable once.
  for (const int64_t tile_rows : {1, 4, 11, 100}) {
    std::map<int64_t, uint64_t> hashes;  // by first row
    for (int64_t shard_rows = 1; shard_rows <= 11; ++shard_rows) {
      CallRig rig(Pass::kBackward, 11, tile_rows);
      rig.Send(shard_rows);
      ASSERT_EQ(static_cast<int64_t>(rig.host->tiles.size()), (11 + tile_rows - 1) / tile_rows);
      for (const Tile& tile : rig.host->tiles) {
        EXPECT_EQ(tile.row_begin % tile_rows, 0);
        EXPECT_EQ(tile.row_count, std::min(tile_rows, 11 - tile.row_begin));
        EXPECT_EQ(hashes.try_emplace(tile.row_begin, tile.dy_hash).first->second, tile.dy_hash);
      }
    }
    std::map<uint64_t, int64_t> distinct;
    for (const auto& [row, hash] : hashes) distinct[hash] = row;
    EXPECT_EQ(distinct.size(), hashes.size()) << "other rows have another hash";
  }
}

TEST(TileCallTest, NoRowsAreAnsweredAtOnce) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    CallRig rig(pass, 0, 4);
    ASSERT_TRUE(Succeeds(rig.call->End(0)));
    EXPECT_EQ(rig.sink.results, 0);
    ASSERT_TRUE(Succeeds(rig.sink.summary));
    EXPECT_EQ(rig.sink.summary->row_count, 0);
    EXPECT_EQ(rig.sink.summary->weights_version, 5) << "a backward may follow";
    EXPECT_EQ(rig.host->submitted(), 0u);
    EXPECT_EQ(rig.host->finished_calls, 1);
  }
}

TEST(TileCallTest, TheEndMayComeBeforeOrAfterTheLastResult) {
  CallRig rig(Pass::kForward, 4, 4);
  rig.Place(0, 4);
  rig.host->Run();
  EXPECT_EQ(rig.sink.results, 1);
  EXPECT_EQ(rig.sink.finishes, 0) << "the client has not said that this was all";
  ASSERT_TRUE(Succeeds(rig.call->End(4)));
  EXPECT_EQ(rig.sink.finishes, 1);

  CallRig early(Pass::kForward, 4, 4);
  early.Place(0, 4);
  ASSERT_TRUE(Succeeds(early.call->End(4)));
  EXPECT_EQ(early.sink.finishes, 0);
  early.host->Run();
  EXPECT_EQ(early.sink.finishes, 1);
}

class RefusalTest : public ::testing::TestWithParam<Pass> {
 protected:
  std::string X(int64_t rows) const { return std::string(rows * kHidden * 8, 'x'); }
  std::string Dy(int64_t rows) const { return std::string(rows * kOutput * 8, 'y'); }
  ::testing::AssertionResult Refuses(int64_t row_offset, int64_t row_count, const std::string& x, const std::string& dy,
                                     Reason reason, std::initializer_list<absl::string_view> named) {
    return Fails(rig_.TryPlace(row_offset, row_count, 0, x, dy), absl::StatusCode::kInvalidArgument, reason, named);
  }
  // Nothing was taken: the right shards still go through.
  void ExpectUnharmed(int64_t placed) {
    rig_.Place(placed, 10 - placed);
    rig_.host->Run();
    EXPECT_TRUE(Succeeds(rig_.call->End(10)));
    EXPECT_EQ(rig_.sink.rows(), Expected(rig_));
  }

  CallRig rig_{GetParam(), 10, 100};
};

TEST_P(RefusalTest, RowsOutOfOrderMissingOrTwice) {
  rig_.Place(0, 4);
  EXPECT_TRUE(Refuses(5, 2, X(2), Dy(2), Reason::kInvalidRows, {"at row 5", "expected row 4"}));
  EXPECT_TRUE(Refuses(0, 4, X(4), Dy(4), Reason::kInvalidRows, {"at row 0", "expected row 4"}));
  EXPECT_TRUE(Refuses(3, 2, X(2), Dy(2), Reason::kInvalidRows, {"at row 3", "expected row 4"}));
  EXPECT_TRUE(Refuses(-1, 2, X(2), Dy(2), Reason::kInvalidRows, {"at row -1"}));
  EXPECT_TRUE(Refuses(std::numeric_limits<int64_t>::max(), 2, X(2), Dy(2), Reason::kInvalidRows, {"expected row 4"}));
  ExpectUnharmed(4);
}

TEST_P(RefusalTest, TooManyRowsOrNone) {
  rig_.Place(0, 4);
  EXPECT_TRUE(Refuses(4, 7, X(7), Dy(7), Reason::kInvalidRows, {"7 rows at row 4", "has 10"}));
  EXPECT_TRUE(Refuses(4, 11, X(11), Dy(11), Reason::kInvalidRows, {"11 rows"}));
  EXPECT_TRUE(Refuses(4, 0, "", "", Reason::kInvalidRows, {"0 rows", "1 to"}));
  EXPECT_TRUE(Refuses(4, -1, "", "", Reason::kInvalidRows, {"-1 rows"}));
  ExpectUnharmed(4);
}

TEST_P(RefusalTest, PayloadsOfAnotherSize) {
  EXPECT_TRUE(Refuses(0, 4, X(3), Dy(4), Reason::kInvalidShape, {"x has 72 bytes", "24 for each row of [4, 3] f64"}));
  EXPECT_TRUE(Refuses(0, 4, X(4) + "x", Dy(4), Reason::kInvalidShape, {"x has 97 bytes"}));
  EXPECT_TRUE(Refuses(0, 4, "", Dy(4), Reason::kInvalidShape, {"x has 0 bytes"}));
  if (GetParam() == Pass::kBackward) {
    EXPECT_TRUE(
        Refuses(0, 4, X(4), Dy(5), Reason::kInvalidShape, {"dy has 80 bytes", "16 for each row of [4, 2] f64"}));
    EXPECT_TRUE(Refuses(0, 4, X(4), "", Reason::kInvalidShape, {"dy has 0 bytes"}));
  }
  ExpectUnharmed(0);
}

TEST_P(RefusalTest, AnEndThatDoesNotAddUp) {
  const auto refuses = [&](int64_t rows, std::initializer_list<absl::string_view> named) {
    EXPECT_TRUE(Fails(rig_.call->End(rows), absl::StatusCode::kInvalidArgument, Reason::kInvalidRows, named));
  };
  refuses(10, {"10 rows said", "0 rows sent", "expected 10"});
  rig_.Place(0, 9);
  refuses(10, {"9 rows sent"});
  refuses(9, {"9 rows said"});
  rig_.Place(9, 1);
  refuses(11, {"11 rows said"});
  rig_.host->Run();
  EXPECT_EQ(rig_.sink.finishes, 0);
}

INSTANTIATE_TEST_SUITE_P(Passes, RefusalTest, ::testing::Values(Pass::kForward, Pass::kBackward));

TEST(TileCallTest, AShardThatClaimsMoreRowsThanThereCanBeIsRefused) {
  // Rows of 24 bytes: 2^61 of them come to 0 bytes modulo 2^64, which is what an empty payload has.
  const int64_t total = std::numeric_limits<int64_t>::max();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    CallRig rig(pass, total, 4);
    for (const int64_t claimed : {int64_t{1} << 61, int64_t{1} << 62, total}) {
      EXPECT_TRUE(Fails(rig.TryPlace(0, claimed, 0, "", ""), absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
                        {"x has 0 bytes"}));
    }
    rig.Place(0, 1);
    EXPECT_TRUE(Fails(rig.TryPlace(1, total, 0, "", ""), absl::StatusCode::kInvalidArgument, Reason::kInvalidRows,
                      {"at row 1"}));
  }
}

TEST(TileCallTest, ACallThatIsOverTakesNothing) {
  CallRig rig(Pass::kForward, 10, 4);
  rig.call->Cancel();
  EXPECT_TRUE(Fails(rig.TryPlace(0, 1, 0, std::string(24, 'x'), ""), absl::StatusCode::kCancelled, Reason::kCancelled));
  EXPECT_EQ(rig.sink.total(), 0);
}

TEST(TileCallTest, ResultsThatAreNotGivenBackHoldUpTheirOwnCall) {
  CallRig rig(Pass::kForward, 24, 4);  // six tiles
  rig.sink.keep = true;
  // Two tiles are answered and kept, and two more received; then there is no room.
  EXPECT_EQ(rig.Place(0, 24), 8) << "two tiles can be received at once";
  rig.host->Run();
  EXPECT_EQ(rig.sink.rooms, 1);
  EXPECT_EQ(rig.Place(0, 24, 8), 8);
  EXPECT_EQ(rig.host->submitted(), 0u) << "no output is free";
  rig.host->Run();
  EXPECT_EQ(rig.sink.results, 2);
  EXPECT_EQ(rig.Place(0, 24, 16), 0);
  // Each result that is given back lets one tile on.
  rig.sink.GiveBack();
  EXPECT_EQ(rig.host->submitted(), 1u);
  rig.host->Run();
  EXPECT_EQ(rig.sink.results, 3);
  EXPECT_EQ(rig.sink.rooms, 2);
  EXPECT_EQ(rig.Place(0, 24, 16), 4);
  while (rig.sink.held() > 0) {
    rig.sink.GiveBack();
    rig.host->Run();
  }
  EXPECT_EQ(rig.Place(0, 24, 20), 4);
  EXPECT_TRUE(Succeeds(rig.call->End(24)));
  rig.host->Run();
  EXPECT_TRUE(Succeeds(rig.sink.summary));
  EXPECT_EQ(rig.sink.rows(), HostForward(rig.x));
}

TEST(TileCallTest, ABackwardWithoutInputGradientHasNoResultsToWaitFor) {
  CallRig rig(Pass::kBackward, 24, 4, /*input_gradient=*/false);
  rig.sink.keep = true;
  rig.Send(24);
  EXPECT_EQ(rig.sink.results, 0);
  ASSERT_TRUE(Succeeds(rig.sink.summary));
  EXPECT_EQ(rig.sink.summary->row_count, 24);
  ASSERT_EQ(rig.host->tiles.size(), 6u);
  for (const Tile& tile : rig.host->tiles) EXPECT_EQ(tile.output, -1);
}

TEST(TileCallTest, TilesInFlightTogetherUseBuffersOfTheirOwn) {
  CallRig rig(Pass::kBackward, 8, 4);
  rig.Place(0, 8);
  ASSERT_TRUE(rig.host->Start());
  ASSERT_TRUE(rig.host->Start());
  EXPECT_NE(rig.host->tiles[0].input, rig.host->tiles[1].input);
  EXPECT_NE(rig.host->tiles[0].output, rig.host->tiles[1].output);
  rig.host->Run();
  EXPECT_EQ(rig.sink.rows(), HostBackward(rig.x, rig.dy));
}

TEST(TileCallTest, RowsThatWereCountedBeforeAreSaid) {
  CallRig rig(Pass::kBackward, 12, 4);
  rig.host->repeat = true;
  rig.Place(0, 8);
  rig.host->Run();
  rig.host->repeat = false;
  rig.Place(8, 4);
  EXPECT_TRUE(Succeeds(rig.call->End(12)));
  rig.host->Run();
  EXPECT_EQ(rig.sink.summary->repeated_row_count, 8);
  EXPECT_EQ(rig.sink.rows(), HostBackward(rig.x, rig.dy));
}

TEST(TileCallTest, ATileThatIsRefusedEndsTheCall) {
  CallRig rig(Pass::kBackward, 12, 4);
  rig.Place(0, 8);
  ASSERT_TRUE(rig.host->Start());
  ASSERT_TRUE(rig.host->Finish());
  rig.host->admission = Error(absl::StatusCode::kAborted, Reason::kStepAborted, "the attempt is over");
  rig.host->Run();
  EXPECT_EQ(rig.sink.results, 1);
  EXPECT_EQ(rig.sink.finishes, 1);
  EXPECT_TRUE(Fails(rig.sink.summary, absl::StatusCode::kAborted, Reason::kStepAborted));
  EXPECT_EQ(rig.host->finished_calls, 1);
  EXPECT_TRUE(Fails(rig.TryPlace(8, 1, 0, std::string(24, 'x'), std::string(16, 'y')), absl::StatusCode::kCancelled,
                    Reason::kCancelled));
}

TEST(TileCallTest, ADeviceThatFailsEndsTheCall) {
  CallRig rig(Pass::kForward, 8, 4);
  rig.host->device = Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, "the device failed");
  rig.Place(0, 8);
  ASSERT_TRUE(rig.host->Start());
  ASSERT_TRUE(rig.host->Start());
  rig.host->Run();
  EXPECT_EQ(rig.sink.results, 0);
  EXPECT_EQ(rig.sink.finishes, 1);
  EXPECT_TRUE(Fails(rig.sink.summary, absl::StatusCode::kInternal, Reason::kDeviceFailed));
}

TEST(TileCallTest, ACommitInTheMiddleEndsTheCallAndNeverMixesVersions) {
  CallRig rig(Pass::kForward, 8, 4);
  rig.Place(0, 8);
  ASSERT_TRUE(rig.host->Start());
  ASSERT_TRUE(rig.host->Finish());
  rig.host->version = 6;
  rig.host->Run();
  EXPECT_EQ(rig.sink.rows(), HostForward(RowsOf(rig.x, 0, 4))) << "rows of the first version alone";
  EXPECT_TRUE(Fails(rig.sink.summary, absl::StatusCode::kUnavailable, Reason::kWeightsChanged));
  EXPECT_EQ(rig.host->awaited, 2) << "the tile that was started may still write into the call's staging";
}

TEST(TileCallTest, NanAndInfinityAreFoundByTheirRowInTheCall) {
  struct Case {
    int64_t x_row, dy_row;          // -1 for none
    std::vector<int64_t> expected;  // for each of the three tiles of 4 rows
  };
  for (const Case& c : {Case{-1, -1, {-1, -1, -1}}, Case{5, -1, {-1, 5, -1}}, Case{-1, 11, {-1, -1, 11}},
                        Case{0, 1, {0, -1, -1}}, Case{3, 4, {3, 4, -1}}}) {
    for (const int64_t shard_rows : {1, 3, 5, 12}) {
      CallRig rig(Pass::kBackward, 12, 4);
      Dense x = rig.x, dy = rig.dy;
      if (c.x_row >= 0) x.at(c.x_row, 2) = NAN;
      if (c.dy_row >= 0) dy.at(c.dy_row, 1) = -INFINITY;
      for (int64_t begin = 0; begin < 12; begin += shard_rows) {
        const int64_t count = std::min(shard_rows, 12 - begin);
        for (int64_t placed = 0; placed < count; rig.host->Run()) {
          placed += rig.TryPlace(begin, count, placed, Encode(RowsOf(x, begin, count), DType::kF64),
                                 Encode(RowsOf(dy, begin, count), DType::kF64))
                        .value();
        }
      }
      ASSERT_EQ(rig.host->tiles.size(), 3u);
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(rig.host->tiles[i].non_finite_row, c.expected[i])
            << "x row " << c.x_row << ", dy row " << c.dy_row << ", shards of " << shard_rows << ", tile " << i;
      }
    }
  }
}

}  // namespace
}  // namespace shardmlp::testing
