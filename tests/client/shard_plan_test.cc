// How calls are cut into shards.
#include "client/cpp/shard_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/status.h"

namespace shardmlp {
namespace {

using testing::HasSubstr;

int64_t Rows(int64_t preferred, int64_t most, int64_t tile, int64_t row_bytes) {
  ServedModel model;
  model.preferred_shard_bytes = preferred;
  model.max_message_bytes = most;
  model.tile_row_count = tile;
  const auto rows = ShardRowCount(model, row_bytes);
  EXPECT_TRUE(rows.ok()) << rows.status();
  return rows.value_or(-1);
}

TEST(ShardPlanTest, ShardsAreAboutAsLargeAsTheServerPrefers) {
  EXPECT_EQ(Rows(1 << 20, 4 << 20, 0, 1 << 10), 1024);
  EXPECT_EQ(Rows(1000, 4 << 20, 0, 300), 3);
}

TEST(ShardPlanTest, ShardsDivideTheTileOrAreMultiplesOfIt) {
  EXPECT_EQ(Rows(1000, 4 << 20, 512, 1), 512);   // one tile
  EXPECT_EQ(Rows(1100, 4 << 20, 512, 1), 1024);  // two of them
  EXPECT_EQ(Rows(300, 4 << 20, 512, 1), 256);    // half of one
  EXPECT_EQ(Rows(100, 4 << 20, 192, 1), 96);
  EXPECT_EQ(Rows(100, 4 << 20, 1009, 1), 100);  // a prime has no divisor near: as preferred
}

TEST(ShardPlanTest, TheClientMaySayHowLargeShardsAre) {
  ServedModel model;
  model.preferred_shard_bytes = 1 << 20;
  model.max_message_bytes = 4 << 20;
  EXPECT_EQ(ShardRowCount(model, 1 << 10).value(), 1024);
  EXPECT_EQ(ShardRowCount(model, 1 << 10, 256 << 10).value(), 256);
  EXPECT_EQ(ShardRowCount(model, 1 << 10, 64 << 20).value(), 4095) << "as much as a message may have";
}

TEST(ShardPlanTest, ShardsAreNeverAboveTheLargestMessage) {
  // 64 bytes are kept for framing.
  EXPECT_EQ(Rows(1 << 20, 10064, 0, 1000), 10);
  EXPECT_EQ(Rows(1 << 20, 10063, 0, 1000), 9);
  EXPECT_EQ(Rows(1, 10000, 0, 1000), 1);
  EXPECT_EQ(Rows(0, 1064, 0, 1000), 1);

  ServedModel model;
  model.preferred_shard_bytes = 1 << 20;
  model.max_message_bytes = 1063;
  const auto rows = ShardRowCount(model, 1000);
  EXPECT_EQ(rows.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(rows.status()), Reason::kMessageTooLarge);
  EXPECT_THAT(std::string(rows.status().message()), HasSubstr("a row takes 1000 bytes"));
}

TEST(ShardPlanTest, MatricesAreCheckedByName) {
  float memory[12] = {};
  const ConstMatrixView x(memory, 3, 4, DType::kF32);
  EXPECT_TRUE(CheckMatrix("x", x, 3, 4, DType::kF32).ok());
  EXPECT_TRUE(CheckMatrix("x", ConstMatrixView(), 0, 4, DType::kF32).ok());

  const absl::Status shape = CheckMatrix("dy", x, 3, 5, DType::kF32);
  EXPECT_EQ(ReasonOf(shape), Reason::kInvalidShape);
  EXPECT_EQ(shape.message(), "dy is [3, 4] f32, expected [3, 5] f32");
  EXPECT_EQ(ReasonOf(CheckMatrix("dy", x, 2, 4, DType::kF32)), Reason::kInvalidShape);
  EXPECT_EQ(ReasonOf(CheckMatrix("dy", x, 3, 4, DType::kBF16)), Reason::kInvalidDType);
  EXPECT_EQ(ReasonOf(CheckMatrix("x", ConstMatrixView(memory, 3, 4, 3, DType::kF32), 3, 4, DType::kF32)),
            Reason::kInvalidShape);
  EXPECT_EQ(ReasonOf(CheckMatrix("x", ConstMatrixView(nullptr, 3, 4, DType::kF32), 3, 4, DType::kF32)),
            Reason::kInvalidShape);
}

}  // namespace
}  // namespace shardmlp
