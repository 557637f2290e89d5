#include "kernels/mlp.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/operand_checks.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// A bias is [1, cols] where the layer has one, else an empty view.
absl::Status CheckBias(absl::string_view name, const ConstMatrixView& bias, bool expected, int64_t cols, DType dtype) {
  return expected ? CheckMatrix(name, bias, 1, cols, dtype) : CheckMatrix(name, bias, 0, bias.cols, bias.dtype);
}

template <typename View>
absl::Status CheckTensors(absl::string_view what, const MlpConfig& config, const BasicMlpTensors<View>& tensors,
                          DType dtype) {
  const auto name = [&](absl::string_view tensor) { return absl::StrCat(what, " of ", tensor); };
  SHARDMLP_RETURN_IF_ERROR(
      CheckMatrix(name("gate_up"), tensors.gate_up, config.gate_up_size(), config.hidden_size, dtype));
  SHARDMLP_RETURN_IF_ERROR(
      CheckBias(name("gate_up_bias"), tensors.gate_up_bias, config.gate_up_bias, config.gate_up_size(), dtype));
  SHARDMLP_RETURN_IF_ERROR(
      CheckMatrix(name("down"), tensors.down, config.output_size, config.intermediate_size, dtype));
  return CheckBias(name("down_bias"), tensors.down_bias, config.down_bias, config.output_size, dtype);
}

absl::Status CheckTile(const MlpConfig& config, const ConstMlpTensors& weights, const MlpWorkspace& workspace,
                       int64_t rows) {
  SHARDMLP_RETURN_IF_ERROR(CheckTensors("weights", config, weights, config.dtype));
  const int64_t needed = MlpWorkspace::Bytes(config, rows);
  if (needed <= workspace.bytes()) return absl::OkStatus();
  return Error(
      absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
      absl::StrCat("a tile of ", rows, " rows needs a workspace of ", needed, " bytes, got ", workspace.bytes()));
}

absl::Status CheckTileRows(int64_t tile_rows) {
  if (tile_rows >= 1) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
               absl::StrCat("tiles of ", tile_rows, " rows, expected at least 1"));
}

// `kept`, or the workspace's where nothing is kept.
absl::StatusOr<MatrixView> GateUpOf(const MlpConfig& config, const MlpWorkspace& workspace, int64_t rows,
                                    MatrixView kept) {
  if (kept.data == nullptr) return workspace.GateUp(config, rows);
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("kept_gate_up", kept, rows, config.gate_up_size(), config.dtype));
  return kept;
}

// [G | U] = X Wgu^T + bgu
absl::Status ComputeGateUp(Backend& backend, const ConstMlpTensors& weights, ConstMatrixView x, MatrixView gate_up) {
  return backend.MatMul(
      {.a = x, .b = weights.gate_up, .c = gate_up, .bias = weights.gate_up_bias, .transpose_b = true});
}

// dW += left^T right; db += colsum(left). left [R, N], right [R, K], dW [N, K], db [1, N] or empty.
absl::Status AddWeightGradient(Backend& backend, ConstMatrixView left, ConstMatrixView right, MatrixView weight,
                               MatrixView bias) {
  SHARDMLP_RETURN_IF_ERROR(
      backend.MatMul({.a = left, .b = right, .c = weight, .transpose_a = true, .accumulate = true}));
  return bias.empty() ? absl::OkStatus() : backend.AddColumnSums(left, bias);
}

}  // namespace

absl::Status MlpForwardTile(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                            const MlpWorkspace& workspace, ConstMatrixView x, MatrixView y, MatrixView kept_gate_up) {
  SHARDMLP_RETURN_IF_ERROR(CheckTile(config, weights, workspace, x.rows));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("x", x, x.rows, config.hidden_size, config.dtype));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("y", y, x.rows, config.output_size, config.dtype));
  SHARDMLP_ASSIGN_OR_RETURN(const MatrixView gate_up, GateUpOf(config, workspace, x.rows, kept_gate_up));  // [R, 2I]
  const MatrixView a = workspace.Inner(config, x.rows);                                                    // [R, I]
  SHARDMLP_RETURN_IF_ERROR(ComputeGateUp(backend, weights, x, gate_up));
  SHARDMLP_RETURN_IF_ERROR(backend.ActivationForward(config.activation, gate_up, a));
  return backend.MatMul({.a = a, .b = weights.down, .c = y, .bias = weights.down_bias, .transpose_b = true});
}

absl::Status MlpBackwardTile(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                             const MlpWorkspace& workspace, ConstMatrixView x, ConstMatrixView dy, MatrixView dx,
                             const MlpTensors* gradients, MatrixView kept_gate_up) {
  SHARDMLP_RETURN_IF_ERROR(CheckTile(config, weights, workspace, x.rows));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("x", x, x.rows, config.hidden_size, config.dtype));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("dy", dy, x.rows, config.output_size, config.dtype));
  if (!dx.empty()) SHARDMLP_RETURN_IF_ERROR(CheckMatrix("dx", dx, x.rows, config.hidden_size, config.dtype));
  if (gradients != nullptr) {
    SHARDMLP_RETURN_IF_ERROR(CheckTensors("gradients", config, *gradients, AccumulatorOf(config.dtype)));
  }
  if (dx.empty() && gradients == nullptr) return absl::OkStatus();

  // [R, 2I]: [G | U], then [dG | dU]
  SHARDMLP_ASSIGN_OR_RETURN(const MatrixView gate_up, GateUpOf(config, workspace, x.rows, kept_gate_up));
  const MatrixView inner = workspace.Inner(config, x.rows);  // [R, I]: dA, then A
  if (kept_gate_up.data == nullptr) SHARDMLP_RETURN_IF_ERROR(ComputeGateUp(backend, weights, x, gate_up));
  SHARDMLP_RETURN_IF_ERROR(backend.MatMul({.a = dy, .b = weights.down, .c = inner}));
  SHARDMLP_RETURN_IF_ERROR(backend.ActivationBackward(config.activation, gate_up, inner));
  if (gradients != nullptr) {
    SHARDMLP_RETURN_IF_ERROR(AddWeightGradient(backend, dy, inner, gradients->down, gradients->down_bias));
    SHARDMLP_RETURN_IF_ERROR(AddWeightGradient(backend, gate_up, x, gradients->gate_up, gradients->gate_up_bias));
  }
  if (dx.empty()) return absl::OkStatus();
  return backend.MatMul({.a = gate_up, .b = weights.gate_up, .c = dx});
}

absl::Status MlpForward(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                        const MlpWorkspace& workspace, int64_t tile_rows, ConstMatrixView x, MatrixView y) {
  SHARDMLP_RETURN_IF_ERROR(CheckTileRows(tile_rows));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("y", y, x.rows, config.output_size, config.dtype));
  for (int64_t begin = 0; begin < x.rows; begin += tile_rows) {
    const int64_t rows = std::min(tile_rows, x.rows - begin);
    SHARDMLP_RETURN_IF_ERROR(
        MlpForwardTile(backend, config, weights, workspace, x.Rows(begin, rows), y.Rows(begin, rows)));
  }
  return absl::OkStatus();
}

absl::Status MlpBackward(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                         const MlpWorkspace& workspace, int64_t tile_rows, ConstMatrixView x, ConstMatrixView dy,
                         MatrixView dx, const MlpTensors* gradients) {
  SHARDMLP_RETURN_IF_ERROR(CheckTileRows(tile_rows));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("dy", dy, x.rows, config.output_size, config.dtype));
  if (!dx.empty()) SHARDMLP_RETURN_IF_ERROR(CheckMatrix("dx", dx, x.rows, config.hidden_size, config.dtype));
  for (int64_t begin = 0; begin < x.rows; begin += tile_rows) {
    const int64_t rows = std::min(tile_rows, x.rows - begin);
    SHARDMLP_RETURN_IF_ERROR(MlpBackwardTile(backend, config, weights, workspace, x.Rows(begin, rows),
                                             dy.Rows(begin, rows), dx.empty() ? dx : dx.Rows(begin, rows), gradients));
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
