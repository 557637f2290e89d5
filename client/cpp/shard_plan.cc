#include "client/cpp/shard_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// Tags, lengths and row numbers of a shard's message: below this, whatever the numbers.
constexpr int64_t kFramingBytes = 64;

}  // namespace

absl::Status CheckMatrix(absl::string_view name, ConstMatrixView matrix, int64_t rows, int64_t cols, DType dtype) {
  const ConstMatrixView expected(nullptr, rows, cols, dtype);
  const auto refuse = [&](Reason reason, absl::string_view what) {
    return Error(absl::StatusCode::kInvalidArgument, reason,
                 absl::StrCat(name, " is ", matrix.ToString(), what, ", expected ", expected.ToString()));
  };
  if (matrix.dtype != dtype) return refuse(Reason::kInvalidDType, "");
  if (matrix.rows != rows || (matrix.cols != cols && rows > 0)) return refuse(Reason::kInvalidShape, "");
  if (rows > 1 && matrix.row_stride < cols) {
    return refuse(Reason::kInvalidShape, absl::StrCat(" with rows ", matrix.row_stride, " elements apart"));
  }
  if (rows * cols > 0 && matrix.data == nullptr) return refuse(Reason::kInvalidShape, " without memory");
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ShardRowCount(const ServedModel& model, int64_t row_bytes, int64_t shard_bytes) {
  const int64_t most = (model.max_message_bytes - kFramingBytes) / row_bytes;
  if (most < 1) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kMessageTooLarge,
                 absl::StrCat("a row takes ", row_bytes, " bytes, and the server's messages have at most ",
                              model.max_message_bytes));
  }
  const int64_t tile = model.tile_row_count;
  const int64_t wanted = shard_bytes > 0 ? shard_bytes : model.preferred_shard_bytes;
  const int64_t rows = std::clamp<int64_t>(wanted / row_bytes, 1, most);
  if (tile <= 0) return rows;
  if (rows >= tile) return rows - rows % tile;
  // The largest divisor of the tile that isn't far smaller.
  for (int64_t fewer = rows; fewer > rows / 2; --fewer) {
    if (tile % fewer == 0) return fewer;
  }
  return rows;
}

}  // namespace shardmlp
