// The MLP of one layer: forward and recompute-backward of a tile, and the loop over tiles.
//
// Dimensions: T tokens in a call, R rows in a tile, H hidden, I intermediate, O out.
//   gated:    [G | U] = X Wgu^T + bgu,  A = act(G) * U,  Y = A Wd^T + bd
//   ungated:  U = X Wu^T + bu,          A = act(U),      Y = A Wd^T + bd
//   backward: [G | U] again; dA = dY Wd; dG, dU, A by one elementwise pass;
//             dWd += dY^T A; dbd += colsum(dY); dWgu += [dG | dU]^T X; dbgu += colsum([dG | dU]); dX = [dG | dU] Wgu
// 3 GEMMs forward and 8 backward, where gate and up count as one each although they run fused; 6 backward where the
// forward kept [G | U].
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/activation.h"
#include "kernels/backend.h"
#include "kernels/matrix.h"

namespace shardmlp {

struct MlpConfig {
  int64_t hidden_size = 0;        // H, columns of X
  int64_t intermediate_size = 0;  // I
  int64_t output_size = 0;        // O, columns of Y
  Activation activation;          // gated or not
  bool gate_up_bias = false;
  bool down_bias = false;
  DType dtype = DType::kF32;  // of weights and of the tile's arithmetic

  // Rows of the fused gate and up matrix: 2I where gated, else I.
  int64_t gate_up_size() const { return activation.gated ? 2 * intermediate_size : intermediate_size; }
  int64_t parameter_count() const {
    return gate_up_size() * (hidden_size + (gate_up_bias ? 1 : 0)) +
           output_size * (intermediate_size + (down_bias ? 1 : 0));
  }
};

// The tensors of a layer: its weights, or anything else of the same four shapes (gradients, master weights, moments).
template <typename View>
struct BasicMlpTensors {
  View gate_up;       // [2I, H], gate rows first; [I, H] where ungated
  View gate_up_bias;  // [1, 2I] or [1, I]; empty where the layer has none
  View down;          // [O, I]
  View down_bias;     // [1, O]; empty where the layer has none
};
using MlpTensors = BasicMlpTensors<MatrixView>;
using ConstMlpTensors = BasicMlpTensors<ConstMatrixView>;

// Device memory that a tile is computed in; contents mean nothing between calls.
class MlpWorkspace {
 public:
  // Bytes for tiles of up to `rows` rows of a `config` layer.
  static int64_t Bytes(const MlpConfig& config, int64_t rows);
  // Most rows that fit into `bytes`, rounded down to a multiple of 64 where that leaves any; 0 where not even one fits.
  static int64_t Rows(const MlpConfig& config, int64_t bytes);
  // `bytes` as in Bytes(), for the largest layer that it is to serve.
  static absl::StatusOr<MlpWorkspace> Allocate(Backend& backend, int64_t bytes);

  int64_t bytes() const;
  // The first R rows of each part. R must fit.
  MatrixView GateUp(const MlpConfig& config, int64_t rows) const;  // [R, 2I] or [R, I]
  MatrixView Inner(const MlpConfig& config, int64_t rows) const;   // [R, I]: A, and dA before it

 private:
  Buffer buffer_;
};

// y = MLP(x) for one tile. x [R, H], y [R, O], both device memory in config.dtype. Enqueues on Stream::kCompute.
// `kept_gate_up` [R, 2I] or [R, I], device memory in config.dtype, is left with [G | U] (`=`); empty: nothing is kept.
absl::Status MlpForwardTile(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                            const MlpWorkspace& workspace, ConstMatrixView x, MatrixView y,
                            MatrixView kept_gate_up = {});

// dx = the input gradient (`=`) and gradients += the weight gradients, for one tile. x and dx [R, H], dy [R, O], device
// memory in config.dtype; `dx` empty or `gradients` null leaves that half out, and what only it needs. Gradients are in
// AccumulatorOf(config.dtype). Enqueues on Stream::kCompute.
// `kept_gate_up`: [G | U] as MlpForwardTile left it for this x and these weights. It is used up: [dG | dU] is written
// over it (`=`). Empty: [G | U] is recomputed, which comes out the same.
absl::Status MlpBackwardTile(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                             const MlpWorkspace& workspace, ConstMatrixView x, ConstMatrixView dy, MatrixView dx,
                             const MlpTensors* gradients, MatrixView kept_gate_up = {});

// The same over T rows, `tile_rows` (at least 1) at a time and in order, for use in process.
absl::Status MlpForward(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                        const MlpWorkspace& workspace, int64_t tile_rows, ConstMatrixView x, MatrixView y);
absl::Status MlpBackward(Backend& backend, const MlpConfig& config, const ConstMlpTensors& weights,
                         const MlpWorkspace& workspace, int64_t tile_rows, ConstMatrixView x, ConstMatrixView dy,
                         MatrixView dx, const MlpTensors* gradients);

}  // namespace shardmlp
