#include "tests/kernels/layer.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"

namespace shardmlp::testing {
namespace {

NaiveMlp Zeros(const NaiveMlp& like) {
  const auto zero = [](const Dense& m) { return Dense(m.rows, m.cols); };
  return {like.activation, zero(like.gate_up), zero(like.gate_up_bias), zero(like.down), zero(like.down_bias)};
}

}  // namespace

NaiveMlp RandomMlp(Backend& backend, const MlpConfig& config, uint64_t seed) {
  const auto random = [&](int64_t rows, int64_t cols, uint64_t salt, double scale) {
    return Rounded(backend, RandomDense(rows, cols, seed * 10 + salt, scale), config.dtype);
  };
  const double gate_up_scale = std::sqrt(3.0 / static_cast<double>(std::max<int64_t>(config.hidden_size, 1)));
  const double down_scale = std::sqrt(3.0 / static_cast<double>(std::max<int64_t>(config.intermediate_size, 1)));
  return {config.activation, random(config.gate_up_size(), config.hidden_size, 1, gate_up_scale),
          random(config.gate_up_bias ? 1 : 0, config.gate_up_size(), 2, 0.5),
          random(config.output_size, config.intermediate_size, 3, down_scale),
          random(config.down_bias ? 1 : 0, config.output_size, 4, 0.5)};
}

Layer::Tensors::Tensors(Backend& backend, const NaiveMlp& values, DType dtype, int64_t row_padding)
    : gate_up(backend, values.gate_up, dtype, row_padding),
      gate_up_bias(backend, values.gate_up_bias, dtype),
      down(backend, values.down, dtype, row_padding),
      down_bias(backend, values.down_bias, dtype) {}

MlpTensors Layer::Tensors::views() const {
  return {gate_up.view(), gate_up_bias.view(), down.view(), down_bias.view()};
}

Layer::Layer(Backend& backend, const MlpConfig& config, const NaiveMlp& mlp, int64_t row_padding)
    : backend_(backend),
      config_(config),
      row_padding_(row_padding),
      weights_(backend, mlp, config.dtype, row_padding),
      gradients_(backend, Zeros(mlp), AccumulatorOf(config.dtype), row_padding) {}

MlpWorkspace Layer::Workspace(int64_t rows, int64_t tile_rows) {
  return MlpWorkspace::Allocate(backend_, MlpWorkspace::Bytes(config_, std::min(rows, tile_rows))).value();
}

ConstMlpTensors Layer::weights() const {
  const MlpTensors views = weights_.views();
  return {views.gate_up, views.gate_up_bias, views.down, views.down_bias};
}

Dense Layer::Forward(const Dense& x, int64_t tile_rows) {
  const MlpWorkspace workspace = Workspace(x.rows, tile_rows);
  const DeviceMatrix input(backend_, x, config_.dtype, row_padding_);
  const DeviceMatrix output(backend_, x.rows, config_.output_size, config_.dtype, row_padding_);
  const absl::Status status =
      MlpForward(backend_, config_, weights(), workspace, tile_rows, input.view(), output.view());
  EXPECT_TRUE(status.ok()) << status;
  return output.Read();
}

Dense Layer::Backward(const Dense& x, const Dense& dy, int64_t tile_rows, Outputs outputs) {
  const MlpTensors gradients = gradients_.views();
  const MlpWorkspace workspace = Workspace(x.rows, tile_rows);
  const DeviceMatrix input(backend_, x, config_.dtype, row_padding_);
  const DeviceMatrix output_gradient(backend_, dy, config_.dtype, row_padding_);
  const DeviceMatrix dx(backend_, outputs.dx ? x.rows : 0, config_.hidden_size, config_.dtype, row_padding_);
  const absl::Status status = MlpBackward(backend_, config_, weights(), workspace, tile_rows, input.view(),
                                          output_gradient.view(), dx.view(), outputs.gradients ? &gradients : nullptr);
  EXPECT_TRUE(status.ok()) << status;
  return dx.Read();
}

Layer::Passes Layer::ForwardAndBackward(const Dense& x, const Dense& dy, int64_t tile_rows) {
  const MlpTensors gradients = gradients_.views();
  const MlpWorkspace workspace = Workspace(x.rows, tile_rows);
  const DeviceMatrix input(backend_, x, config_.dtype), output_gradient(backend_, dy, config_.dtype);
  const DeviceMatrix output(backend_, x.rows, config_.output_size, config_.dtype);
  const DeviceMatrix input_gradient(backend_, x.rows, config_.hidden_size, config_.dtype);
  const DeviceMatrix gate_up(backend_, x.rows, config_.gate_up_size(), config_.dtype);
  for (int64_t row = 0; row < x.rows; row += tile_rows) {
    const int64_t rows = std::min(tile_rows, x.rows - row);
    const absl::Status status = MlpForwardTile(backend_, config_, weights(), workspace, input.view().Rows(row, rows),
                                               output.view().Rows(row, rows), gate_up.view().Rows(row, rows));
    EXPECT_TRUE(status.ok()) << status;
  }
  for (int64_t row = 0; row < x.rows; row += tile_rows) {
    const int64_t rows = std::min(tile_rows, x.rows - row);
    const absl::Status status = MlpBackwardTile(
        backend_, config_, weights(), workspace, input.view().Rows(row, rows), output_gradient.view().Rows(row, rows),
        input_gradient.view().Rows(row, rows), &gradients, gate_up.view().Rows(row, rows));
    EXPECT_TRUE(status.ok()) << status;
  }
  return {output.Read(), input_gradient.Read()};
}

absl::Status Layer::Forward(ConstMatrixView x, MatrixView y) {
  return MlpForward(backend_, config_, weights(), Workspace(x.rows, x.rows), x.rows, x, y);
}

absl::Status Layer::Backward(ConstMatrixView x, ConstMatrixView dy, MatrixView dx) {
  const MlpTensors gradients = gradients_.views();
  return MlpBackward(backend_, config_, weights(), Workspace(x.rows, x.rows), x.rows, x, dy, dx, &gradients);
}

NaiveGradients Layer::Gradients(const Dense& dx) const {
  return {dx, gradients_.gate_up.Read(), gradients_.gate_up_bias.Read(), gradients_.down.Read(),
          gradients_.down_bias.Read()};
}

double RelativeDifference(const NaiveGradients& got, const NaiveGradients& reference) {
  return std::max({RelativeDifference(got.dx, reference.dx), RelativeDifference(got.gate_up, reference.gate_up),
                   RelativeDifference(got.gate_up_bias, reference.gate_up_bias),
                   RelativeDifference(got.down, reference.down),
                   RelativeDifference(got.down_bias, reference.down_bias)});
}

}  // namespace shardmlp::testing
