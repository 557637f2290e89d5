// All that a machine with a GPU has to show, in one program that needs the driver and CUDA's libraries alone: the
// conformance suite on the GPU, and then lines `name value`. docs/performance.md says what each line means.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/error_bounds.h"
#include "tests/bench/gpu_layer.h"
#include "tests/kernels/backends.h"

ABSL_FLAG(int, gpu, 0, "Which GPU");
ABSL_FLAG(bool, conformance, true, "Run the conformance suite first");
ABSL_FLAG(double, seconds, 2, "That each line is measured for");
ABSL_FLAG(int64_t, tokens, 8192, "Rows of a call, and of its one tile");
ABSL_FLAG(int64_t, hidden, 4096, "H");
ABSL_FLAG(int64_t, intermediate, 14336, "I");
ABSL_FLAG(int64_t, long_tokens, 262144, "Rows of the long call");
ABSL_FLAG(int64_t, square, 8192, "Rows and columns of the largest product that stands for the device's peak");

namespace shardmlp {
namespace {

CudaBackendOptions Options() { return {.device = absl::GetFlag(FLAGS_gpu)}; }

void Print(const char* name, double value) {
  std::printf("%s %.6g\n", name, value);
  std::fflush(stdout);
}

double Seconds(Backend& backend, const std::function<void()>& work) {
  return SecondsOf(backend, absl::GetFlag(FLAGS_seconds), work);
}

// FLOP/s of the best of a few square products in bf16.
double PeakFlops(Backend& backend) {
  double best = 0;
  for (const int64_t n : {absl::GetFlag(FLAGS_square) / 2, absl::GetFlag(FLAGS_square)}) {
    const GpuMatrix a(backend, n, n, DType::kBF16), b(backend, n, n, DType::kBF16), c(backend, n, n, DType::kBF16);
    const double seconds =
        Seconds(backend, [&] { Require(backend.MatMul({.a = a.view(), .b = b.view(), .c = c.view()})); });
    best = std::max(best, 2.0 * std::pow(static_cast<double>(n), 3) / seconds);
  }
  return best;
}

// Bytes a second that a copy within device memory reads and writes.
double Bandwidth(Backend& backend, const GpuLayer& layer) {
  const double seconds = Seconds(backend, [&] { Require(backend.Copy(Stream::kCompute, layer.x(), layer.result())); });
  return 2.0 * static_cast<double>(layer.x().byte_count()) / seconds;
}

void MeasureStep(Backend& backend) {
  GpuLayer layer(backend, absl::GetFlag(FLAGS_tokens), absl::GetFlag(FLAGS_tokens), absl::GetFlag(FLAGS_hidden),
                 absl::GetFlag(FLAGS_intermediate));
  // The products before and after stand for the time between: a GPU's clock drifts.
  const double before = Seconds(backend, [&] { layer.Products(); });
  const double step = Seconds(backend, [&] { layer.Step(); });
  const double after = Seconds(backend, [&] { layer.Products(); });
  const double products = (before + after) / 2;
  const double peak = PeakFlops(backend), bandwidth = Bandwidth(backend, layer);
  const double roofline = std::min(peak, layer.flops() / layer.MovedBytes() * bandwidth);
  Print("gpu_step", products / step);
  Print("gpu_step_flops", layer.flops() / step);
  Print("gpu_products_flops", layer.flops() / products);
  Print("gpu_peak_flops", peak);
  Print("gpu_bandwidth", bandwidth);
  Print("gpu_roofline_flops", roofline);
  Print("gpu_step_of_roofline", layer.flops() / step / roofline);
  // Elements [rows, I] of bf16, each read or written once.
  const double element_bytes = 2.0 * static_cast<double>(layer.tile_rows() * layer.config().intermediate_size);
  Print("gpu_activation_forward", 3 * element_bytes / Seconds(backend, [&] { layer.ActivationForward(); }) / bandwidth);
  Print("gpu_activation_backward",
        6 * element_bytes / Seconds(backend, [&] { layer.ActivationBackward(); }) / bandwidth);
}

// AdamW on the gate and up matrix of a layer: 4 f32 read, 3 written, and the weights in bf16.
void MeasureUpdate(Backend& backend) {
  const int64_t rows = 2 * absl::GetFlag(FLAGS_intermediate), cols = absl::GetFlag(FLAGS_hidden);
  const GpuMatrix gradient(backend, rows, cols, DType::kF32), master(backend, rows, cols, DType::kF32),
      moment1(backend, rows, cols, DType::kF32), moment2(backend, rows, cols, DType::kF32),
      weights(backend, rows, cols, DType::kBF16);
  const double elements = static_cast<double>(rows * cols);
  const double update = Seconds(backend, [&] {
    Require(backend.Update({.hyperparameters = AdamW{.learning_rate = 1e-4},
                            .gradient = gradient.view(),
                            .master = master.view(),
                            .moment1 = moment1.view(),
                            .moment2 = moment2.view(),
                            .weights = weights.view()}));
  });
  Print("gpu_update_bytes", elements * (7 * 4 + 2) / update);
  auto sum = backend.Allocate(Memory::kStaging, sizeof(double));
  Require(sum.status());
  const double squares =
      Seconds(backend, [&] { Require(backend.SumOfSquares(gradient.view(), static_cast<double*>(sum->data()))); });
  Print("gpu_norm_bytes", elements * 4 / squares);
}

// A pipeline of tiles over the three streams, as the server runs it: one is copied in while another is computed.
class Pipeline {
 public:
  Pipeline(Backend& backend, GpuLayer& layer)
      : backend_(backend), layer_(layer), in_(Staging(layer.x())), out_(Staging(layer.result())) {}

  void CopyIn() { Require(backend_.Copy(Stream::kCopyIn, in_.View(rows(), cols(), DType::kBF16), layer_.x())); }
  void CopyOut() { Require(backend_.Copy(Stream::kCopyOut, layer_.result(), out_.View(rows(), cols(), DType::kBF16))); }
  void Compute() { layer_.Forward(); }
  // The three at once. Tiles would be in buffers of their own; it is the time that is looked at, not the values.
  void All() {
    CopyIn();
    Compute();
    CopyOut();
  }
  void Wait() {
    for (const Stream stream : {Stream::kCopyIn, Stream::kCompute, Stream::kCopyOut}) Finish(backend_, stream);
  }
  double SecondsOfMany(void (Pipeline::*work)()) {
    constexpr int kTiles = 16;
    (this->*work)();
    Wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kTiles; ++i) (this->*work)();
    Wait();
    return SecondsSince(start) / kTiles;
  }

 private:
  int64_t rows() const { return layer_.x().rows; }
  int64_t cols() const { return layer_.x().cols; }
  Buffer Staging(const MatrixView& like) {
    auto buffer = backend_.Allocate(Memory::kStaging, like.byte_count());
    Require(buffer.status());
    return *std::move(buffer);
  }

  Backend& backend_;
  GpuLayer& layer_;
  Buffer in_, out_;
};

void MeasureOverlap(Backend& backend) {
  GpuLayer layer(backend, absl::GetFlag(FLAGS_tokens), absl::GetFlag(FLAGS_tokens), absl::GetFlag(FLAGS_hidden),
                 absl::GetFlag(FLAGS_intermediate));
  Pipeline pipeline(backend, layer);
  const double in = pipeline.SecondsOfMany(&Pipeline::CopyIn), out = pipeline.SecondsOfMany(&Pipeline::CopyOut);
  const double compute = pipeline.SecondsOfMany(&Pipeline::Compute), all = pipeline.SecondsOfMany(&Pipeline::All);
  Print("gpu_copy_in_bytes", static_cast<double>(layer.x().byte_count()) / in);
  Print("gpu_copy_out_bytes", static_cast<double>(layer.x().byte_count()) / out);
  Print("gpu_overlap", std::max({in, out, compute}) / all);
}

// Largest difference of the last row of y from f64, over the largest reference.
double LastRowError(Backend& backend, const GpuLayer& layer) {
  const int64_t h = layer.config().hidden_size, inner = layer.config().intermediate_size;
  std::vector<uint16_t> bits(GpuMatrix::kPeriod);
  FillSmall(MatrixView(bits.data(), 1, GpuMatrix::kPeriod, DType::kBF16));
  const auto value = [&](int64_t i) -> double {
    return Load(BFloat16{bits[static_cast<size_t>(i % GpuMatrix::kPeriod)]});
  };
  const int64_t x_begin = (layer.x().rows - 1) * h;
  std::vector<double> a(static_cast<size_t>(inner));
  for (int64_t i = 0; i < inner; ++i) {
    double g = 0, u = 0;
    for (int64_t k = 0; k < h; ++k) {
      g += value(x_begin + k) * value(i * h + k);
      u += value(x_begin + k) * value((inner + i) * h + k);
    }
    a[static_cast<size_t>(i)] = g / (1 + std::exp(-g)) * u;
  }
  auto got = backend.Allocate(Memory::kStaging, h * static_cast<int64_t>(sizeof(double)));
  Require(got.status());
  Require(backend.Copy(Stream::kCompute, layer.result().Rows(layer.x().rows - 1, 1), got->View(1, h, DType::kF64)));
  Finish(backend, Stream::kCompute);
  double difference = 0, largest = 0;
  for (int64_t o = 0; o < h; ++o) {
    double y = 0;
    for (int64_t i = 0; i < inner; ++i) y += a[static_cast<size_t>(i)] * value(o * inner + i);
    difference = std::max(difference, std::abs(static_cast<double*>(got->data())[o] - y));
    largest = std::max(largest, std::abs(y));
  }
  return difference / largest;
}

// A call of many tokens, in tiles. Whether its last row is right.
bool MeasureLongCall(Backend& backend) {
  const int64_t tokens = absl::GetFlag(FLAGS_long_tokens);
  GpuLayer layer(backend, tokens, absl::GetFlag(FLAGS_tokens), absl::GetFlag(FLAGS_hidden),
                 absl::GetFlag(FLAGS_intermediate));
  layer.Forward();
  const double error = LastRowError(backend, layer);
  const double seconds = Seconds(backend, [&] { layer.Step(); });
  Print("gpu_long_flops", layer.flops() / seconds);
  Print("gpu_long_bytes", static_cast<double>(layer.bytes()));
  Print("gpu_long_untiled_bytes", static_cast<double>(layer.bytes() + MlpWorkspace::Bytes(layer.config(), tokens) -
                                                      MlpWorkspace::Bytes(layer.config(), layer.tile_rows())));
  Print("gpu_long_error", error);
  return error <= ErrorBoundsOf(DType::kBF16).y;
}

int Measure() {
  auto made = MakeCudaBackend(Options());
  Require(made.status());
  Backend& backend = **made;
  std::fprintf(stderr, "%s, %.1f GiB\n", backend.device().name.c_str(),
               static_cast<double>(backend.device().memory_bytes) / (1 << 30));
  MeasureStep(backend);
  MeasureUpdate(backend);
  MeasureOverlap(backend);
  return MeasureLongCall(backend) ? 0 : 1;
}

}  // namespace

namespace testing {

std::vector<BackendFactory> Backends() {
  return {{"cuda", [] { return MakeCudaBackend(Options()).value(); }}};
}

}  // namespace testing
}  // namespace shardmlp

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  shardmlp::Require(shardmlp::MakeCudaBackend(shardmlp::Options()).status());
  if (absl::GetFlag(FLAGS_conformance) && RUN_ALL_TESTS() != 0) return 1;
  return shardmlp::Measure();
}
