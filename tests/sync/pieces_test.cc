// How many matrices become few collectives.
#include "server/sync/pieces.h"

#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardmlp {
namespace {

using ::testing::ElementsAre;

std::vector<std::vector<std::string>> Shapes(absl::Span<const MatrixView> matrices) {
  std::vector<std::vector<std::string>> shapes;
  for (const Piece& piece : CutIntoPieces(matrices)) {
    shapes.emplace_back();
    for (const MatrixView& part : piece) shapes.back().push_back(part.ToString());
  }
  return shapes;
}

TEST(PiecesTest, SmallMatricesGoTogetherAndLargeOnesAlone) {
  const MatrixView bias(nullptr, 1, 4096, DType::kF32);
  const MatrixView weights(nullptr, 4096, 4096, DType::kF32);
  EXPECT_THAT(Shapes({bias, weights, bias, weights}),
              ElementsAre(ElementsAre("[4096, 4096] f32"), ElementsAre("[4096, 4096] f32"),
                          ElementsAre("[1, 4096] f32", "[1, 4096] f32")));
}

TEST(PiecesTest, APieceHasOneDType) {
  const MatrixView f32(nullptr, 1, 8, DType::kF32);
  const MatrixView f64(nullptr, 1, 8, DType::kF64);
  EXPECT_THAT(
      Shapes({f32, f64, f64, f32}),
      ElementsAre(ElementsAre("[1, 8] f32"), ElementsAre("[1, 8] f64", "[1, 8] f64"), ElementsAre("[1, 8] f32")));
}

TEST(PiecesTest, EmptyMatricesAreLeftOut) {
  EXPECT_THAT(Shapes({MatrixView(), MatrixView(nullptr, 3, 0, DType::kF32)}), ElementsAre());
}

TEST(PiecesTest, AHugeMatrixIsCutByRows) {
  // 300 rows of 1 MiB.
  EXPECT_THAT(Shapes({MatrixView(nullptr, 300, 1 << 18, DType::kF32)}),
              ElementsAre(ElementsAre("[256, 262144] f32"), ElementsAre("[44, 262144] f32")));
  // Rows that are above the limit themselves.
  EXPECT_THAT(Shapes({MatrixView(nullptr, 2, int64_t{1} << 27, DType::kF32)}),
              ElementsAre(ElementsAre("[1, 134217728] f32"), ElementsAre("[1, 134217728] f32")));
}

TEST(PiecesTest, ManySmallMatricesMakeBucketsOfAFewMiB) {
  const std::vector<MatrixView> matrices(100, MatrixView(nullptr, 1, 50000, DType::kF32));  // 200 KB each
  const std::vector<Piece> pieces = CutIntoPieces(matrices);
  size_t count = 0;
  for (const Piece& piece : pieces) {
    EXPECT_LE(piece.size(), 22U);
    count += piece.size();
  }
  EXPECT_EQ(count, matrices.size());
  EXPECT_EQ(pieces.size(), 5U);
}

TEST(PiecesTest, CutsDependOnShapesAlone) {
  const MatrixView dense(nullptr, 600, 500, DType::kF32);
  const MatrixView strided(nullptr, 600, 500, 640, DType::kF32);
  EXPECT_EQ(Shapes({dense, dense}), Shapes({strided, dense}));
}

TEST(PieceBlockTest, ADenseMatrixIsItsOwnBlock) {
  std::vector<float> values(6);
  const Piece piece = {MatrixView(values.data(), 2, 3, DType::kF32)};
  const PieceBlock block(piece);
  EXPECT_EQ(block.data(), values.data());
  EXPECT_EQ(block.byte_count(), 24);
}

TEST(PieceBlockTest, OthersAreCopiedAndCopiedBackWithoutWhatLiesBetweenRows) {
  std::vector<float> a = {1, 2, 99, 3, 4, 99};  // [2, 2], row stride 3
  std::vector<float> b = {5, 6};                // [1, 2]
  const Piece piece = {MatrixView(a.data(), 2, 2, 3, DType::kF32), MatrixView(b.data(), 1, 2, DType::kF32)};
  const PieceBlock block(piece);
  ASSERT_EQ(block.byte_count(), 24);
  auto* values = static_cast<float*>(block.data());
  EXPECT_THAT(std::vector<float>(values, values + 6), ElementsAre(1, 2, 3, 4, 5, 6));
  for (int i = 0; i < 6; ++i) values[i] *= 10;
  block.Store();
  EXPECT_THAT(a, ElementsAre(10, 20, 99, 30, 40, 99));
  EXPECT_THAT(b, ElementsAre(50, 60));
}

}  // namespace
}  // namespace shardmlp
