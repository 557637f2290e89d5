#include "server/sync/pieces.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace shardmlp {
namespace {

// Smaller matrices are sent together, up to so much at once: each collective costs round trips.
constexpr int64_t kSmallBytes = 256 << 10;
constexpr int64_t kBucketBytes = 4 << 20;

// Null where the piece is dense.
std::unique_ptr<std::byte[]> MemoryFor(const Piece& piece) {
  if (piece.size() == 1 && piece.front().contiguous()) return nullptr;
  return std::make_unique_for_overwrite<std::byte[]>(ByteCount(piece));
}

// Calls `copy` with each dense run of the piece and where it is in the block.
template <typename Copy>
void ForRuns(const Piece& piece, void* block, Copy copy) {
  auto* at = static_cast<std::byte*>(block);
  for (const MatrixView& part : piece) {
    const int64_t rows = part.contiguous() ? part.rows : 1;
    for (int64_t row = 0; row < part.rows; row += rows) {
      const MatrixView run = part.Rows(row, rows);
      copy(run.data, at, run.byte_count());
      at += run.byte_count();
    }
  }
}

}  // namespace

int64_t ByteCount(const Piece& piece) {
  int64_t bytes = 0;
  for (const MatrixView& part : piece) bytes += part.byte_count();
  return bytes;
}

std::vector<Piece> CutIntoPieces(absl::Span<const MatrixView> matrices) {
  std::vector<Piece> pieces;
  Piece bucket;
  int64_t bucket_bytes = 0;
  const auto flush = [&] {
    if (!bucket.empty()) pieces.push_back(std::exchange(bucket, {}));
    bucket_bytes = 0;
  };
  for (const MatrixView& matrix : matrices) {
    if (matrix.empty()) continue;
    if (matrix.byte_count() < kSmallBytes) {
      if (!bucket.empty() && (bucket.front().dtype != matrix.dtype || bucket_bytes >= kBucketBytes)) flush();
      bucket.push_back(matrix);
      bucket_bytes += matrix.byte_count();
      continue;
    }
    const int64_t step = std::max<int64_t>(1, kMaxPieceBytes / (matrix.cols * SizeOf(matrix.dtype)));
    for (int64_t row = 0; row < matrix.rows; row += step) {
      pieces.push_back({matrix.Rows(row, std::min(step, matrix.rows - row))});
    }
  }
  flush();
  return pieces;
}

PieceBlock::PieceBlock(const Piece& piece)
    : piece_(piece),
      byte_count_(ByteCount(piece)),
      copy_(MemoryFor(piece)),
      data_(copy_ == nullptr ? piece.front().data : copy_.get()) {
  if (copy_ == nullptr) return;
  ForRuns(piece_, data_, [](void* run, void* block, int64_t bytes) { std::memcpy(block, run, bytes); });
}

void PieceBlock::Store() const {
  if (copy_ == nullptr) return;
  ForRuns(piece_, data_, [](void* run, void* block, int64_t bytes) { std::memcpy(run, block, bytes); });
}

}  // namespace shardmlp
