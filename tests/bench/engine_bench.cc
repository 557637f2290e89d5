// How near the MLP comes to the machine's matrix product rate: prints lines `name value`.
//
// engine_DTYPE_H is FLOP/s of forward and backward in process, 11 GEMMs counted, over the best rate that oneDNN's
// matmul reaches in DTYPE over a few large sizes; the median over rounds, each of which measures both, one after the
// other. engine_DTYPE_H_elementwise is the share of the time that is spent outside of matrix products.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dnnl.hpp>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/mlp.h"
#include "tests/bench/matmul_clock.h"
#include "tests/bench/small_values.h"

ABSL_FLAG(int, rounds, 5, "Pairs of subject and reference for each line");
ABSL_FLAG(int64_t, tile_rows, 2048, "Rows of a tile");
ABSL_FLAG(std::string, only, "", "Run the lines whose name contains this");

namespace shardmlp {
namespace {

struct Matrix {
  Matrix(Backend& backend, int64_t rows, int64_t cols, DType dtype)
      : buffer(backend.Allocate(Memory::kDevice, rows * cols * SizeOf(dtype)).value()),
        view(buffer.View(rows, cols, dtype)) {
    FillSmall(view);
  }
  Buffer buffer;
  MatrixView view;
};

// oneDNN's own matmul of [n, n] matrices, all in one dtype: by a primitive made for n, or by one for any size, which is
// another implementation.
class Reference {
 public:
  Reference(Backend& backend, DType dtype, int64_t n, bool any_size)
      : n_(n), a_(backend, n, n, dtype), b_(backend, n, n, dtype), c_(backend, n, n, dtype) {
    const auto type = dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    const int64_t size = any_size ? DNNL_RUNTIME_DIM_VAL : n;
    const dnnl::memory::desc made_for({size, size}, type, dnnl::memory::dims{size, 1});
    const dnnl::memory::desc square({n, n}, type, dnnl::memory::dims{n, 1});
    const dnnl::matmul::desc matmul(made_for, made_for, made_for);
    matmul_ = dnnl::matmul(dnnl::matmul::primitive_desc(matmul, engine_));
    arguments_ = {{DNNL_ARG_SRC, dnnl::memory(square, engine_, a_.view.data)},
                  {DNNL_ARG_WEIGHTS, dnnl::memory(square, engine_, b_.view.data)},
                  {DNNL_ARG_DST, dnnl::memory(square, engine_, c_.view.data)}};
  }

  // FLOP/s of one product.
  double Rate() {
    const auto start = std::chrono::steady_clock::now();
    matmul_.execute(stream_, arguments_);
    stream_.wait();
    return 2.0 * static_cast<double>(n_ * n_ * n_) / SecondsSince(start);
  }

 private:
  int64_t n_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  Matrix a_, b_, c_;
  dnnl::matmul matmul_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

// One layer with everything that a training step of it needs.
class Subject {
 public:
  Subject(Backend& backend, const MlpConfig& config, int64_t tokens, int64_t tile_rows)
      : clock_(backend),
        config_(config),
        tile_rows_(std::min(tile_rows, tokens)),
        gate_up_(backend, config.gate_up_size(), config.hidden_size, config.dtype),
        down_(backend, config.output_size, config.intermediate_size, config.dtype),
        gate_up_gradient_(backend, config.gate_up_size(), config.hidden_size, DType::kF32),
        down_gradient_(backend, config.output_size, config.intermediate_size, DType::kF32),
        x_(backend, tokens, config.hidden_size, config.dtype),
        y_(backend, tokens, config.output_size, config.dtype),
        dx_(backend, tokens, config.hidden_size, config.dtype),
        workspace_(MlpWorkspace::Allocate(backend, MlpWorkspace::Bytes(config, tile_rows_)).value()) {}

  // FLOP/s of forward and backward.
  double Rate() {
    const ConstMlpTensors weights = {gate_up_.view, {}, down_.view, {}};
    const MlpTensors gradients = {gate_up_gradient_.view, {}, down_gradient_.view, {}};
    const auto start = std::chrono::steady_clock::now();
    Require(MlpForward(clock_, config_, weights, workspace_, tile_rows_, x_.view, y_.view));
    Require(MlpBackward(clock_, config_, weights, workspace_, tile_rows_, x_.view, y_.view, dx_.view, &gradients));
    const double seconds = SecondsSince(start);
    elementwise_ = 1 - clock_.TakeSeconds() / seconds;
    return 11 * 2.0 * static_cast<double>(x_.view.rows * config_.hidden_size * config_.intermediate_size) / seconds;
  }
  // Of the last Rate().
  double elementwise() const { return elementwise_; }

 private:
  MatMulClock clock_;
  MlpConfig config_;
  int64_t tile_rows_;
  Matrix gate_up_, down_, gate_up_gradient_, down_gradient_, x_, y_, dx_;
  MlpWorkspace workspace_;
  double elementwise_ = 0;
};

void Measure(const std::string& name, DType dtype, int64_t tokens, int64_t hidden, int64_t intermediate) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend().value();
  MlpConfig config;
  config.hidden_size = config.output_size = hidden;
  config.intermediate_size = intermediate;
  config.dtype = dtype;
  Subject subject(*backend, config, tokens, absl::GetFlag(FLAGS_tile_rows));
  std::vector<std::unique_ptr<Reference>> references;
  for (const int64_t n : {2048, 3072, 4096}) {
    for (const bool any_size : {false, true}) {
      references.push_back(std::make_unique<Reference>(*backend, dtype, n, any_size));
    }
  }
  const auto best = [&] {
    double rate = 0;
    for (const auto& reference : references) rate = std::max(rate, reference->Rate());
    return rate;
  };
  best();  // the first run makes kernels and touches memory
  subject.Rate();
  std::vector<double> ratios, elementwise, rates, peaks;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    // The machine drifts: the reference before and after stand for the time in between.
    const double before = best();
    rates.push_back(subject.Rate());
    elementwise.push_back(subject.elementwise());
    peaks.push_back(std::max(before, best()));
    ratios.push_back(rates.back() / peaks.back());
  }
  std::printf("%s %.3f\n%s_elementwise %.4f\n%s_flops %.4g\n%s_peak_flops %.4g\n", name.c_str(), Median(ratios),
              name.c_str(), Median(elementwise), name.c_str(), Median(rates), name.c_str(), Median(peaks));
  std::fflush(stdout);
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  for (const auto dtype : {shardmlp::DType::kF32, shardmlp::DType::kBF16}) {
    const auto measure = [&](int64_t tokens, int64_t hidden, int64_t intermediate) {
      const std::string name = absl::StrCat("engine_", Name(dtype), "_", hidden);
      if (name.find(absl::GetFlag(FLAGS_only)) == std::string::npos) return;
      shardmlp::Measure(name, dtype, tokens, hidden, intermediate);
    };
    measure(4096, 2048, 5632);
    measure(2048, 4096, 14336);
  }
  return 0;
}
