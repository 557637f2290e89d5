// Bytes a second of our sum of a model's gradients over those of a bare Gloo all-reduce of as many bytes in one block.
// Ranks are threads of one process over loopback; both ways work on the same memory and take turns.
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "server/sync/gloo_group.h"
#include "tests/bench/small_values.h"
#include "tests/sync/gloo_mesh.h"

ABSL_FLAG(int, replicas, 2, "Ranks");
ABSL_FLAG(int, layers, 2, "Layers of the model");
ABSL_FLAG(int64_t, hidden, 2048, "H");
ABSL_FLAG(int64_t, intermediate, 5632, "I");
ABSL_FLAG(int, rounds, 11, "Pairs of subject and reference");

namespace shardmlp::testing {
namespace {

// One rank's gradients: of each layer, gate and up [2I, H], their bias [1, 2I], down [H, I], its bias [1, H]; f32.
struct Gradients {
  Gradients(int layers, int64_t hidden, int64_t intermediate)
      : block(layers * (3 * hidden * intermediate + 2 * intermediate + hidden)) {
    float* at = block.data();
    const auto add = [&](int64_t rows, int64_t cols) {
      views.emplace_back(at, rows, cols, DType::kF32);
      at += rows * cols;
    };
    for (int layer = 0; layer < layers; ++layer) {
      add(2 * intermediate, hidden);
      add(1, 2 * intermediate);
      add(hidden, intermediate);
      add(1, hidden);
    }
  }

  std::vector<float> block;
  std::vector<MatrixView> views;
};

// Gloo as it comes, on connections of its own.
class BareGloo {
 public:
  explicit BareGloo(int size) : contexts_(size) {
    gloo::transport::tcp::attr attr("127.0.0.1");
    device_ = gloo::transport::tcp::CreateDevice(attr);
    OnRanks(size, [&](int rank) {
      contexts_[rank] = std::make_shared<gloo::rendezvous::Context>(rank, size);
      contexts_[rank]->connectFullMesh(store_, device_);
    });
  }
  void Sum(int rank, std::vector<float>& block) {
    gloo::AllreduceOptions options(contexts_[rank]);
    options.setOutput(block.data(), block.size());
    options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
    gloo::allreduce(options);
  }

 private:
  gloo::rendezvous::HashStore store_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::vector<std::shared_ptr<gloo::rendezvous::Context>> contexts_;
};

int Run() {
  const int size = absl::GetFlag(FLAGS_replicas);
  std::vector<Gradients> gradients;
  for (int rank = 0; rank < size; ++rank) {
    gradients.emplace_back(absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_hidden), absl::GetFlag(FLAGS_intermediate));
  }
  const auto groups = ConnectedMesh(size);
  BareGloo bare(size);
  const auto time = [&](const std::function<void(int)>& run) {
    const auto start = std::chrono::steady_clock::now();
    OnRanks(size, run);
    return SecondsSince(start);
  };
  const auto ours = [&](int rank) { Require(groups[rank]->AllReduceSum(gradients[rank].views)); };
  const auto theirs = [&](int rank) { bare.Sum(rank, gradients[rank].block); };

  for (Gradients& mine : gradients) mine.block.assign(mine.block.size(), 1);
  time(ours);
  time(theirs);
  const auto sum = static_cast<float>(size * size);
  for (const Gradients& mine : gradients) {
    if (mine.block != std::vector<float>(mine.block.size(), sum)) Require(absl::DataLossError("a sum is wrong"));
  }
  for (Gradients& mine : gradients) mine.block.assign(mine.block.size(), 0);  // so that no round overflows

  const double bytes = static_cast<double>(gradients[0].block.size() * sizeof(float));
  std::vector<double> ratios, rates;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    // The machine drifts: the reference before and after stand for the time in between.
    const double before = time(theirs);
    const double seconds = time(ours);
    ratios.push_back((before + time(theirs)) / 2 / seconds);
    rates.push_back(bytes / seconds);
  }
  std::printf("sync_over_gloo %.3f\nsync_bytes_per_second %.0f\n", Median(ratios), Median(rates));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace shardmlp::testing

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return shardmlp::testing::Run();
}
