// How a call's matrices are checked and cut into shards.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/served_model.h"
#include "kernels/matrix.h"

namespace shardmlp {

// INVALID_ARGUMENT, naming the matrix `name` with what was got and expected, where it isn't [rows, cols] of `dtype` in
// readable memory.
absl::Status CheckMatrix(absl::string_view name, ConstMatrixView matrix, int64_t rows, int64_t cols, DType dtype);

// Rows of a shard where a row takes `row_bytes` over all of the shard's payloads: about `shard_bytes`, or where that is
// 0 preferred_shard_bytes, a divisor or multiple of the server's tile where that is near, and never above
// max_message_bytes. INVALID_ARGUMENT (MESSAGE_TOO_LARGE) where not even one row fits.
absl::StatusOr<int64_t> ShardRowCount(const ServedModel& model, int64_t row_bytes, int64_t shard_bytes = 0);

}  // namespace shardmlp
