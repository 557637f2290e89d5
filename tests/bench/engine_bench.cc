// How near the MLP comes to the machine's matrix product rate: prints lines `name value`.
//
// engine_DTYPE_H is FLOP/s of forward and backward in process, 11 GEMMs counted, over the rate that oneDNN's matmul
// keeps up in DTYPE at the best of a few large sizes; the median over rounds, each of which measures both, one after
// the other. engine_DTYPE_H_elementwise is the share of the time that is spent outside of matrix products.
// engine_DTYPE_H_packing is how many times as fast a step's products with weights would be, had the weights been laid
// out once as oneDNN likes them best.
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

constexpr double kReferenceSeconds = 0.5;

struct Matrix {
  Matrix(Backend& backend, int64_t rows, int64_t cols, DType dtype)
      : buffer(backend.Allocate(Memory::kDevice, rows * cols * SizeOf(dtype)).value()),
        view(buffer.View(rows, cols, dtype)) {
    FillSmall(view);
  }
  Buffer buffer;
  MatrixView view;
};

// FLOP/s that `work`, of `flops` each, keeps up over kReferenceSeconds: a single one can ride on a burst that the
// subject's seconds can't.
template <typename Work>
double RateOf(double flops, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  double seconds = 0;
  int count = 0;
  for (; seconds < kReferenceSeconds; seconds = SecondsSince(start), ++count) work();
  return flops * count / seconds;
}

// One of oneDNN's own products, c [m, n] = a [m, k] b [k, n], all in one dtype.
class Product {
 public:
  // How the primitive is made: for these sizes, for any number of summands (another implementation), or for these with
  // b in the layout that oneDNN likes best.
  enum class Kind { kSized, kAnySummands, kPacked };

  Product(Backend& backend, DType dtype, int64_t m, int64_t n, int64_t k, bool transpose_b, Kind kind)
      : flops_(2.0 * static_cast<double>(m * n * k)),
        a_(backend, m, k, dtype),
        b_(backend, k, n, dtype),
        c_(backend, m, n, dtype) {
    using Dims = dnnl::memory::dims;
    const auto type = dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    const auto matrix = [&](int64_t rows, int64_t cols, bool transposed) {
      return dnnl::memory::desc({rows, cols}, type, transposed ? Dims{1, rows} : Dims{cols, 1});
    };
    constexpr int64_t kAny = DNNL_RUNTIME_DIM_VAL;
    dnnl::memory::desc left = matrix(m, k, false), right = matrix(k, n, transpose_b);
    if (kind == Kind::kPacked) right = dnnl::memory::desc({k, n}, type, dnnl::memory::format_tag::any);
    if (kind == Kind::kAnySummands) {
      left = dnnl::memory::desc({m, kAny}, type, Dims{kAny, 1});
      right = dnnl::memory::desc({kAny, n}, type, transpose_b ? Dims{1, kAny} : Dims{kAny, 1});
    }
    const dnnl::matmul::primitive_desc descriptor({left, right, matrix(m, n, false)}, engine_);
    matmul_ = dnnl::matmul(descriptor);
    dnnl::memory b(matrix(k, n, transpose_b), engine_, b_.view.data);
    if (kind == Kind::kPacked) {
      packed_ = backend.Allocate(Memory::kDevice, static_cast<int64_t>(descriptor.weights_desc().get_size())).value();
      dnnl::memory packed(descriptor.weights_desc(), engine_, packed_.data());
      dnnl::reorder(b, packed).execute(stream_, b, packed);
      stream_.wait();
      b = packed;
    }
    arguments_ = {{DNNL_ARG_SRC, dnnl::memory(matrix(m, k, false), engine_, a_.view.data)},
                  {DNNL_ARG_WEIGHTS, b},
                  {DNNL_ARG_DST, dnnl::memory(matrix(m, n, false), engine_, c_.view.data)}};
  }

  double Rate() {
    return RateOf(flops_, [this] {
      matmul_.execute(stream_, arguments_);
      stream_.wait();
    });
  }

 private:
  double flops_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  Matrix a_, b_, c_;
  Buffer packed_;
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
  int64_t tile_rows() const { return tile_rows_; }
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

// FLOP/s of one of `backend`'s products.
double BackendRate(Backend& backend, DType dtype, int64_t m, int64_t n, int64_t k, bool transpose_b) {
  const Matrix a(backend, m, k, dtype), b(backend, transpose_b ? n : k, transpose_b ? k : n, dtype),
      c(backend, m, n, dtype);
  return RateOf(2.0 * static_cast<double>(m * n * k),
                [&] { Require(backend.MatMul({.a = a.view, .b = b.view, .c = c.view, .transpose_b = transpose_b})); });
}

// The step's products with weights: the seconds that the backend takes over those with packed weights.
double PackingGain(Backend& backend, DType dtype, int64_t rows, int64_t hidden, int64_t intermediate, int rounds) {
  struct Shape {
    int64_t n, k;
    bool transpose_b;
    int times;  // in a step
  };
  double row_major_seconds = 0, packed_seconds = 0;
  for (const Shape& shape : {Shape{2 * intermediate, hidden, true, 2},    // G and U, forward and recomputed
                             Shape{hidden, intermediate, true, 1},        // Y
                             Shape{intermediate, hidden, false, 1},       // dA
                             Shape{hidden, 2 * intermediate, false, 1}})  // dX
  {
    std::vector<double> row_major, packed;
    for (int round = 0; round < rounds; ++round) {
      row_major.push_back(BackendRate(backend, dtype, rows, shape.n, shape.k, shape.transpose_b));
      packed.push_back(
          Product(backend, dtype, rows, shape.n, shape.k, shape.transpose_b, Product::Kind::kPacked).Rate());
    }
    const double flops = shape.times * 2.0 * static_cast<double>(rows * shape.n * shape.k);
    row_major_seconds += flops / Median(row_major);
    packed_seconds += flops / Median(packed);
  }
  return row_major_seconds / packed_seconds;
}

void Measure(const std::string& name, DType dtype, int64_t tokens, int64_t hidden, int64_t intermediate) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend().value();
  const int rounds = absl::GetFlag(FLAGS_rounds);
  MlpConfig config;
  config.hidden_size = config.output_size = hidden;
  config.intermediate_size = intermediate;
  config.dtype = dtype;
  Subject subject(*backend, config, tokens, absl::GetFlag(FLAGS_tile_rows));
  std::vector<std::unique_ptr<Product>> references;
  for (const int64_t n : {2048, 3072, 4096}) {
    for (const auto kind : {Product::Kind::kSized, Product::Kind::kAnySummands}) {
      references.push_back(std::make_unique<Product>(*backend, dtype, n, n, n, false, kind));
    }
  }
  const auto rates_of_all = [&] {
    std::vector<double> rates;
    for (const auto& reference : references) rates.push_back(reference->Rate());
    return rates;
  };
  rates_of_all();  // the first run makes kernels and touches memory
  subject.Rate();
  std::vector<double> rates, elementwise;
  std::vector<std::vector<double>> peaks(references.size());  // by reference, then by round
  for (int round = 0; round < rounds; ++round) {
    // The machine drifts: the references before and after stand for the time in between.
    const std::vector<double> before = rates_of_all();
    rates.push_back(subject.Rate());
    elementwise.push_back(subject.elementwise());
    const std::vector<double> after = rates_of_all();
    for (size_t i = 0; i < peaks.size(); ++i) peaks[i].push_back((before[i] + after[i]) / 2);
  }
  const std::vector<double>& peak =
      *std::max_element(peaks.begin(), peaks.end(), [](auto& a, auto& b) { return Median(a) < Median(b); });
  std::vector<double> ratios;
  for (size_t round = 0; round < rates.size(); ++round) ratios.push_back(rates[round] / peak[round]);
  std::printf("%s %.3f\n%s_elementwise %.4f\n%s_flops %.4g\n%s_peak_flops %.4g\n", name.c_str(), Median(ratios),
              name.c_str(), Median(elementwise), name.c_str(), Median(rates), name.c_str(), Median(peak));
  std::printf("%s_packing %.3f\n", name.c_str(),
              PackingGain(*backend, dtype, subject.tile_rows(), hidden, intermediate, rounds));
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
