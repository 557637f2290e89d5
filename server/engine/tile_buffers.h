// Device memory that one tile is computed in: its rows in the compute dtype, and the MLP's workspace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/mlp.h"
#include "kernels/status.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// Contents mean nothing between tiles. For the device thread.
class TileBuffers {
 public:
  // Bytes for tiles of up to `rows` rows of any of `layers`.
  static int64_t Bytes(const std::vector<LayerSpec>& layers, int64_t rows) {
    return WorkspaceBytes(layers, rows) + RowsBytes(layers, rows);
  }
  // What they take of the memory that is reserved.
  static int64_t ReservedBytes(const std::vector<LayerSpec>& layers, int64_t rows) {
    return BufferBytes(WorkspaceBytes(layers, rows)) + BufferBytes(RowsBytes(layers, rows));
  }
  // Most rows that `bytes` hold, rounded down to a multiple of 64 where that leaves any.
  static int64_t Rows(const std::vector<LayerSpec>& layers, int64_t bytes) {
    const int64_t rows = bytes / Bytes(layers, 1);
    return rows > 64 ? rows / 64 * 64 : rows;
  }
  static absl::StatusOr<TileBuffers> Allocate(Backend& backend, const std::vector<LayerSpec>& layers, int64_t rows) {
    TileBuffers buffers;
    SHARDMLP_ASSIGN_OR_RETURN(buffers.workspace, MlpWorkspace::Allocate(backend, WorkspaceBytes(layers, rows)));
    SHARDMLP_ASSIGN_OR_RETURN(buffers.rows_, backend.Allocate(Memory::kDevice, RowsBytes(layers, rows)));
    return buffers;
  }

  // x [R, H], dy [R, O] and the result (y [R, O], or dx [R, H]) of a tile of R rows.
  MatrixView X(const MlpConfig& mlp, int64_t rows) const { return At(0, rows, mlp.hidden_size, mlp.dtype); }
  MatrixView Dy(const MlpConfig& mlp, int64_t rows) const {
    return At(rows * mlp.hidden_size, rows, mlp.output_size, mlp.dtype);
  }
  MatrixView Result(const MlpConfig& mlp, int64_t rows, int64_t cols) const {
    return At(rows * (mlp.hidden_size + mlp.output_size), rows, cols, mlp.dtype);
  }

  MlpWorkspace workspace;

 private:
  static int64_t WorkspaceBytes(const std::vector<LayerSpec>& layers, int64_t rows) {
    int64_t bytes = 0;
    for (const LayerSpec& layer : layers) bytes = std::max(bytes, MlpWorkspace::Bytes(layer.mlp, rows));
    return bytes;
  }
  static int64_t RowsBytes(const std::vector<LayerSpec>& layers, int64_t rows) {
    int64_t bytes = 0;
    for (const LayerSpec& layer : layers) {
      const int64_t widest = std::max(layer.mlp.hidden_size, layer.mlp.output_size);
      const int64_t cols = layer.mlp.hidden_size + layer.mlp.output_size + widest;
      bytes = std::max(bytes, rows * cols * SizeOf(layer.mlp.dtype));
    }
    return bytes;
  }
  MatrixView At(int64_t element, int64_t rows, int64_t cols, DType dtype) const {
    return {static_cast<char*>(rows_.data()) + element * SizeOf(dtype), rows, cols, dtype};
  }

  Buffer rows_;
};

}  // namespace shardmlp
