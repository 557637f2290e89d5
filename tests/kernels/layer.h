// One MLP layer on a backend, and the twin of it: what the tests of MlpForward and MlpBackward run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/backend.h"
#include "kernels/mlp.h"
#include "tests/kernels/dense.h"
#include "tests/kernels/device_matrix.h"
#include "tests/kernels/naive_mlp.h"

namespace shardmlp::testing {

// Random weights for `config`, of a size that keeps activations around 1, rounded to its dtype.
NaiveMlp RandomMlp(Backend& backend, const MlpConfig& config, uint64_t seed);

// The twin's tensors in device memory, and gradients that begin at 0.
class Layer {
 public:
  Layer(Backend& backend, const MlpConfig& config, const NaiveMlp& mlp, int64_t row_padding = 0);

  // Each in tiles of `tile_rows`, over a workspace that just fits one.
  Dense Forward(const Dense& x, int64_t tile_rows);
  struct Outputs {
    bool dx = true;
    bool gradients = true;
  };
  // += the gradients, and returns dx; empty where not asked for.
  Dense Backward(const Dense& x, const Dense& dy, int64_t tile_rows, Outputs outputs);
  Dense Backward(const Dense& x, const Dense& dy, int64_t tile_rows) { return Backward(x, dy, tile_rows, Outputs()); }

  // The same, where each tile's forward leaves its [G | U] to its backward.
  struct Passes {
    Dense y;
    Dense dx;
  };
  Passes ForwardAndBackward(const Dense& x, const Dense& dy, int64_t tile_rows);

  // Where the matrices are, in one tile.
  absl::Status Forward(ConstMatrixView x, MatrixView y);
  absl::Status Backward(ConstMatrixView x, ConstMatrixView dy, MatrixView dx);

  // The gradients so far, with `dx` put beside them.
  NaiveGradients Gradients(const Dense& dx) const;

 private:
  struct Tensors {
    Tensors(Backend& backend, const NaiveMlp& values, DType dtype, int64_t row_padding);
    MlpTensors views() const;
    DeviceMatrix gate_up, gate_up_bias, down, down_bias;
  };
  MlpWorkspace Workspace(int64_t rows, int64_t tile_rows);
  ConstMlpTensors weights() const;

  Backend& backend_;
  MlpConfig config_;
  int64_t row_padding_;
  Tensors weights_, gradients_;
};

// The largest RelativeDifference among the tensors.
double RelativeDifference(const NaiveGradients& got, const NaiveGradients& reference);

}  // namespace shardmlp::testing
