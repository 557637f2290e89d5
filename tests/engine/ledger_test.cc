#include "server/engine/ledger.h"

#include <malloc.h>

#include "gtest/gtest.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kSession = 7;
constexpr int64_t kCall = 100;
constexpr int kLayer = 3;
constexpr int64_t kRows = 10;  // of the call, in tiles of 4, 4 and 2

Contribution Tile(int64_t row_begin, int64_t row_count, uint64_t dy_hash) {
  return {kSession, kCall, kLayer, kRows, row_begin, row_count, dy_hash};
}

// Marks the tile, which must be new.
void Add(Ledger& ledger, const Contribution& tile) {
  const absl::StatusOr<LedgerVerdict> verdict = ledger.Check(tile);
  ASSERT_TRUE(Succeeds(verdict));
  ASSERT_EQ(*verdict, LedgerVerdict::kAdd);
  ledger.Mark(tile);
}

TEST(LedgerTest, ATileIsAddedOnceAndThenRepeated) {
  Ledger ledger;
  EXPECT_TRUE(ledger.empty());
  Add(ledger, Tile(0, 4, 11));
  EXPECT_FALSE(ledger.empty());
  EXPECT_EQ(*ledger.Check(Tile(0, 4, 11)), LedgerVerdict::kRepeat);
  EXPECT_EQ(*ledger.Check(Tile(4, 4, 12)), LedgerVerdict::kAdd);
}

TEST(LedgerTest, ATryThatWasCutAnywhereGoesOnWhereItStopped) {
  for (int marked = 0; marked <= 3; ++marked) {
    const Contribution tiles[] = {Tile(0, 4, 11), Tile(4, 4, 12), Tile(8, 2, 13)};
    Ledger ledger;
    for (int i = 0; i < marked; ++i) Add(ledger, tiles[i]);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(*ledger.Check(tiles[i]), i < marked ? LedgerVerdict::kRepeat : LedgerVerdict::kAdd)
          << marked << " marked, tile " << i;
      if (i >= marked) ledger.Mark(tiles[i]);
    }
    EXPECT_EQ(ledger.RowsOf(kSession), (LayerRows{{kLayer, kRows}}));
  }
}

TEST(LedgerTest, TheSameCallWithAnotherDyIsRefused) {
  Ledger ledger;
  Add(ledger, Tile(0, 4, 11));
  Add(ledger, Tile(4, 4, 12));
  EXPECT_TRUE(Fails(ledger.Check(Tile(0, 4, 99)), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
                    {"call 100", "rows 0 to 3"}));
  EXPECT_TRUE(Fails(ledger.Check(Tile(4, 4, 11)), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
                    {"rows 4 to 7"}));
}

TEST(LedgerTest, TheSameCallOfAnotherLayerOrLengthIsRefused) {
  Ledger ledger;
  Add(ledger, Tile(0, 4, 11));
  Contribution other_layer = Tile(0, 4, 11);
  other_layer.layer = 5;
  EXPECT_TRUE(Fails(ledger.Check(other_layer), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
                    {"layer 5", "layer 3"}));
  Contribution other_length = Tile(4, 4, 12);
  other_length.call_row_count = 9;
  EXPECT_TRUE(Fails(ledger.Check(other_length), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
                    {"9 rows", "10 rows"}));
}

TEST(LedgerTest, RowsThatWereCountedInAnotherTileAreRefused) {
  Ledger ledger;
  Add(ledger, Tile(0, 4, 11));
  EXPECT_TRUE(
      Fails(ledger.Check(Tile(0, 3, 11)), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict));
  EXPECT_TRUE(
      Fails(ledger.Check(Tile(2, 6, 11)), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict));
}

TEST(LedgerTest, AGapIsTheServersOwnFault) {
  Ledger ledger;
  EXPECT_TRUE(Fails(ledger.Check(Tile(4, 4, 12)), absl::StatusCode::kInternal, Reason::kInternal, {"row 4"}));
  Add(ledger, Tile(0, 4, 11));
  EXPECT_TRUE(Fails(ledger.Check(Tile(8, 2, 13)), absl::StatusCode::kInternal, Reason::kInternal, {"row 8"}));
}

TEST(LedgerTest, ACallIdBelongsToItsSession) {
  Ledger ledger;
  Add(ledger, Tile(0, 4, 11));
  Contribution others = Tile(0, 4, 99);
  others.session_id = kSession + 1;
  EXPECT_EQ(*ledger.Check(others), LedgerVerdict::kAdd);
}

TEST(LedgerTest, RowsAreCountedForEachSessionAndLayer) {
  Ledger ledger;
  Add(ledger, {1, 1, 0, 6, 0, 4, 11});
  Add(ledger, {1, 1, 0, 6, 4, 2, 12});
  Add(ledger, {1, 2, 0, 5, 0, 4, 13});  // a second micro-batch
  Add(ledger, {1, 3, 2, 3, 0, 3, 14});
  Add(ledger, {2, 1, 2, 8, 0, 4, 15});
  EXPECT_EQ(ledger.RowsOf(1), (LayerRows{{0, 10}, {2, 3}}));
  EXPECT_EQ(ledger.RowsOf(2), (LayerRows{{2, 4}}));
  EXPECT_EQ(ledger.RowsOf(3), LayerRows());
}

// Calls of one tile take the most memory a tile, and a call of many tiles the least.
TEST(LedgerTest, ItTakesNoMoreMemoryThanItSaysAndEndsAtItsBound) {
  const auto allocated = [] {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  };
  for (const int64_t tiles : {1, 3, 1000}) {
    Ledger ledger;
    const int64_t before = allocated();
    int64_t marked = 0;
    Contribution tile{1, 0, 0, tiles, 0, 1, 5};
    absl::StatusOr<LedgerVerdict> verdict = LedgerVerdict::kAdd;
    for (; verdict.ok(); ++marked) {
      ledger.Mark(tile);
      ASSERT_LE(ledger.bytes(), Ledger::kMaxBytes);
      if (marked % 4096 == 0) {
        ASSERT_LE(allocated() - before, ledger.bytes() + 4096) << marked;
      }
      if (++tile.row_begin == tiles) tile = {1, tile.call_id + 1, static_cast<int>(marked % 64), tiles, 0, 1, 5};
      verdict = ledger.Check(tile);
    }
    EXPECT_TRUE(Fails(verdict, absl::StatusCode::kResourceExhausted, Reason::kOverloaded, {"commit or discard"}));
    EXPECT_LE(allocated() - before, ledger.bytes());
    EXPECT_GT(marked, 400'000);
    ledger.Clear();
    EXPECT_EQ(ledger.bytes(), 0);
    EXPECT_LT(allocated() - before, 1 << 20);
  }
}

TEST(LedgerTest, ClearForgetsEverything) {
  Ledger ledger;
  Add(ledger, Tile(0, 4, 11));
  ledger.Clear();
  EXPECT_TRUE(ledger.empty());
  EXPECT_EQ(ledger.RowsOf(kSession), LayerRows());
  EXPECT_EQ(*ledger.Check(Tile(0, 4, 99)), LedgerVerdict::kAdd);
}

}  // namespace
}  // namespace shardmlp::testing
