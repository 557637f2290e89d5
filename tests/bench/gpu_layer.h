// What gpu_bench measures: a gated MLP layer in bf16 on a GPU, and the products that it is made of.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>

#include "kernels/backend.h"
#include "kernels/mlp.h"
#include "kernels/number.h"
#include "tests/bench/small_values.h"

namespace shardmlp {

inline void Finish(Backend& backend, Stream stream) {
  auto event = backend.Record(stream);
  Require(event.status());
  Require(backend.Synchronize(**event));
}

// Seconds that one `work` takes on the compute stream, over `seconds` of them. Enough are enqueued at a time for the
// host's wait between to be nothing beside them.
template <typename Work>
double SecondsOf(Backend& backend, double seconds, const Work& work) {
  constexpr double kBatchSeconds = 0.05;
  work();  // the first loads kernels
  Finish(backend, Stream::kCompute);
  const auto timed = [&](int64_t count) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) work();
    Finish(backend, Stream::kCompute);
    return SecondsSince(start);
  };
  const auto batch = std::max<int64_t>(1, static_cast<int64_t>(kBatchSeconds / timed(1)));
  double total = 0;
  int64_t runs = 0;
  do {
    total += timed(batch);
    runs += batch;
  } while (total < seconds);
  return total / static_cast<double>(runs);
}

// A matrix in device memory that holds SmallValue(0), SmallValue(1), ...; the values repeat.
class GpuMatrix {
 public:
  static constexpr int64_t kPeriod = 1 << 20;

  GpuMatrix(Backend& backend, int64_t rows, int64_t cols, DType dtype)
      : buffer_(Allocated(backend, rows * cols * SizeOf(dtype))), view_(buffer_.View(rows, cols, dtype)) {
    auto staging = backend.Allocate(Memory::kStaging, kPeriod * SizeOf(DType::kBF16));
    Require(staging.status());
    FillSmall(staging->View(1, kPeriod, DType::kBF16));
    for (int64_t begin = 0; begin < rows * cols; begin += kPeriod) {
      const int64_t count = std::min(kPeriod, rows * cols - begin);
      const MatrixView all(buffer_.data(), 1, rows * cols, dtype);
      Require(backend.Copy(Stream::kCompute, staging->View(1, count, DType::kBF16), all.Cols(begin, count)));
    }
    Finish(backend, Stream::kCompute);
  }

  MatrixView view() const { return view_; }
  int64_t bytes() const { return buffer_.bytes(); }

 private:
  static Buffer Allocated(Backend& backend, int64_t bytes) {
    auto buffer = backend.Allocate(Memory::kDevice, bytes);
    Require(buffer.status());
    return *std::move(buffer);
  }

  Buffer buffer_;
  MatrixView view_;
};

// One layer with all that a training step of it needs on the device; x, dy and the results [tokens, H].
class GpuLayer {
 public:
  GpuLayer(Backend& backend, int64_t tokens, int64_t tile_rows, int64_t hidden, int64_t intermediate)
      : backend_(backend),
        config_(Config(hidden, intermediate)),
        tile_rows_(std::min(tile_rows, tokens)),
        gate_up_(backend, 2 * intermediate, hidden, DType::kBF16),
        down_(backend, hidden, intermediate, DType::kBF16),
        gate_up_gradient_(backend, 2 * intermediate, hidden, DType::kF32),
        down_gradient_(backend, hidden, intermediate, DType::kF32),
        x_(backend, tokens, hidden, DType::kBF16),
        dy_(backend, tokens, hidden, DType::kBF16),
        result_(backend, tokens, hidden, DType::kBF16) {
    auto workspace = MlpWorkspace::Allocate(backend, MlpWorkspace::Bytes(config_, tile_rows_));
    Require(workspace.status());
    workspace_ = *std::move(workspace);
  }

  const MlpConfig& config() const { return config_; }
  MatrixView x() const { return x_.view(); }
  MatrixView dy() const { return dy_.view(); }
  MatrixView result() const { return result_.view(); }
  // Of a step: 11 products of [tokens, H] with [H, I].
  double flops() const {
    return 11 * 2.0 * static_cast<double>(x_.view().rows) *
           static_cast<double>(config_.hidden_size * config_.intermediate_size);
  }
  int64_t bytes() const {
    return gate_up_.bytes() + down_.bytes() + gate_up_gradient_.bytes() + down_gradient_.bytes() + x_.bytes() +
           dy_.bytes() + result_.bytes() + workspace_.bytes();
  }
  // Bytes of device memory that a step reads and writes where each kernel touches each of its operands once: the
  // weights in 5 of the 7 products, the f32 sums in 2, the rest by rows.
  double MovedBytes() const {
    const double h = static_cast<double>(config_.hidden_size), i = static_cast<double>(config_.intermediate_size);
    const double rows = static_cast<double>(x_.view().rows), tiles = rows / static_cast<double>(tile_rows_);
    const double weights = 2 * 8 * h * i, sums = 2 * 4 * 3 * h * i;
    const double products = 2 * (7 * h + 11 * i), activations = 2 * (3 * i + 6 * i);
    return tiles * (weights + sums) + rows * (products + activations);
  }

  void Forward() { Require(MlpForward(backend_, config_, weights(), workspace_, tile_rows_, x(), result())); }
  void Backward() {
    const MlpTensors gradients = {gate_up_gradient_.view(), {}, down_gradient_.view(), {}};
    Require(MlpBackward(backend_, config_, weights(), workspace_, tile_rows_, x(), dy(), result(), &gradients));
  }
  void Step() {
    Forward();
    Backward();
  }
  // A step's products of one tile alone, in bf16 throughout and without sums to add to: what cuBLAS makes of the sizes.
  void Products() {
    const int64_t rows = tile_rows_;
    const MatrixView inner = workspace_.Inner(config_, rows), gate_up = workspace_.GateUp(config_, rows);
    const MatrixView x = x_.view().Rows(0, rows), dy = dy_.view().Rows(0, rows), y = result_.view().Rows(0, rows);
    const auto in_bf16 = [](MatrixView m) { return MatrixView(m.data, m.rows, m.cols, DType::kBF16); };
    const MatrixView gate_up_gradient = in_bf16(gate_up_gradient_.view()),
                     down_gradient = in_bf16(down_gradient_.view());
    Multiply({.a = x, .b = gate_up_.view(), .c = gate_up, .transpose_b = true});
    Multiply({.a = inner, .b = down_.view(), .c = y, .transpose_b = true});
    Multiply({.a = x, .b = gate_up_.view(), .c = gate_up, .transpose_b = true});
    Multiply({.a = dy, .b = down_.view(), .c = inner});
    Multiply({.a = dy, .b = inner, .c = down_gradient, .transpose_a = true});
    Multiply({.a = gate_up, .b = x, .c = gate_up_gradient, .transpose_a = true});
    Multiply({.a = gate_up, .b = gate_up_.view(), .c = y});
  }
  void ActivationForward() {
    Require(backend_.ActivationForward(config_.activation, workspace_.GateUp(config_, tile_rows_),
                                       workspace_.Inner(config_, tile_rows_)));
  }
  void ActivationBackward() {
    Require(backend_.ActivationBackward(config_.activation, workspace_.GateUp(config_, tile_rows_),
                                        workspace_.Inner(config_, tile_rows_)));
  }
  int64_t tile_rows() const { return tile_rows_; }

 private:
  static MlpConfig Config(int64_t hidden, int64_t intermediate) {
    MlpConfig config;
    config.hidden_size = config.output_size = hidden;
    config.intermediate_size = intermediate;
    config.dtype = DType::kBF16;
    return config;
  }
  ConstMlpTensors weights() const { return {gate_up_.view(), {}, down_.view(), {}}; }
  void Multiply(const Gemm& gemm) { Require(backend_.MatMul(gemm)); }

  Backend& backend_;
  MlpConfig config_;
  int64_t tile_rows_;
  GpuMatrix gate_up_, down_, gate_up_gradient_, down_gradient_, x_, dy_, result_;
  MlpWorkspace workspace_;
};

}  // namespace shardmlp
