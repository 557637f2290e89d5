// What one collective of the transport works on, out of many matrices of any size.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kernels/matrix.h"

namespace shardmlp {

// Rows of one matrix, or several whole small ones; all of one dtype.
using Piece = std::vector<MatrixView>;
int64_t ByteCount(const Piece& piece);  // of its elements

// By shapes alone, so that all ranks cut alike, however each one's memory lies. No piece is above kMaxPieceBytes, but
// for one row that is. Empty matrices are left out.
inline constexpr int64_t kMaxPieceBytes = 256 << 20;
std::vector<Piece> CutIntoPieces(absl::Span<const MatrixView> matrices);

// A piece as one block of memory: its own where that is dense, else a copy.
class PieceBlock {
 public:
  // `piece` must live as long.
  explicit PieceBlock(const Piece& piece);
  PieceBlock(const PieceBlock&) = delete;
  PieceBlock& operator=(const PieceBlock&) = delete;

  void* data() const { return data_; }
  int64_t byte_count() const { return byte_count_; }
  // Copies back to the piece.
  void Store() const;

 private:
  const Piece& piece_;
  const int64_t byte_count_;
  const std::unique_ptr<std::byte[]> copy_;  // null where the piece is dense
  void* const data_;
};

}  // namespace shardmlp
