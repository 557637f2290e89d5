// What the way over gRPC costs: prints lines `name value`.
//
// remote_over_local_DTYPE is tokens a second of forward and backward of one layer ([4096, 2048], I 5632) through a
// server on loopback, over the same in process, both on the same cores; the median over rounds of pairs that alternate.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "client/cpp/client.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/mlp.h"
#include "tests/bench/loopback_server.h"
#include "tests/bench/random_model.h"
#include "tests/bench/small_values.h"

ABSL_FLAG(int, rounds, 5, "Pairs of subject and reference for each line");
ABSL_FLAG(int64_t, tokens, 4096, "Tokens of a call");

namespace shardmlp {
namespace {

constexpr int64_t kHidden = 2048;
constexpr int64_t kIntermediate = 5632;

// Activations of one training step, on the host. All [tokens, H].
struct Activations {
  Activations(int64_t tokens, DType dtype) : bytes(4 * tokens * kHidden * SizeOf(dtype)) {
    const int64_t size = tokens * kHidden * SizeOf(dtype);
    for (MatrixView* m : {&x, &y, &dy, &dx}) {
      *m = MatrixView(bytes.data() + (m - &x) * size, tokens, kHidden, dtype);
      FillSmall(*m);
    }
  }
  std::vector<char> bytes;
  MatrixView x, y, dy, dx;
};

class Local {
 public:
  Local(const RandomModel& model, int64_t tile_rows)
      : mlp_(model.spec().layers[0].mlp), tile_rows_(tile_rows), backend_(MakeCpuBackend().value()) {
    const auto allocate = [&](int64_t rows, int64_t cols, DType dtype) {
      buffers_.push_back(backend_->Allocate(Memory::kDevice, rows * cols * SizeOf(dtype)).value());
      FillSmall(buffers_.back().View(rows, cols, dtype));
      return buffers_.back().View(rows, cols, dtype);
    };
    weights_.gate_up = allocate(mlp_.gate_up_size(), kHidden, mlp_.dtype);
    weights_.down = allocate(kHidden, kIntermediate, mlp_.dtype);
    gradients_.gate_up = allocate(mlp_.gate_up_size(), kHidden, DType::kF32);
    gradients_.down = allocate(kHidden, kIntermediate, DType::kF32);
    workspace_ = MlpWorkspace::Allocate(*backend_, MlpWorkspace::Bytes(mlp_, tile_rows_)).value();
  }

  void Run(const Activations& step) {
    Require(MlpForward(*backend_, mlp_, weights_, workspace_, tile_rows_, step.x, step.y));
    Require(MlpBackward(*backend_, mlp_, weights_, workspace_, tile_rows_, step.x, step.dy, step.dx, &gradients_));
  }

 private:
  const MlpConfig mlp_;
  const int64_t tile_rows_;
  const std::unique_ptr<Backend> backend_;
  std::vector<Buffer> buffers_;
  ConstMlpTensors weights_;
  MlpTensors gradients_;
  MlpWorkspace workspace_;
};

class Remote {
 public:
  explicit Remote(const RandomModel& model)
      : server_(model),
        client_(Client::Connect(server_.address()).value()),
        session_(client_->OpenSession({}).value()) {}

  int64_t tile_rows() const { return server_.tile_rows(); }
  void Run(const Activations& step) {
    const absl::StatusOr<Forwarded> forwarded = session_->Forward(0, step.x, step.y);
    Require(forwarded.status());
    Require(session_->Backward(0, forwarded->weights_version, step.x, step.dy, step.dx));
  }
  // So that the ledger does not grow from round to round.
  void EndStep() { Require(session_->DiscardStep("benchmark").status()); }

 private:
  const LoopbackServer server_;
  const std::unique_ptr<Client> client_;
  const std::unique_ptr<Session> session_;
};

void Measure(DType dtype) {
  const int64_t tokens = absl::GetFlag(FLAGS_tokens);
  const RandomModel model(1, kHidden, kIntermediate, dtype);
  Remote remote(model);
  Local local(model, remote.tile_rows());
  const Activations step(tokens, dtype);
  const auto rate = [&](auto& subject) {
    const auto start = std::chrono::steady_clock::now();
    subject.Run(step);
    return static_cast<double>(tokens) / SecondsSince(start);
  };
  rate(local);
  rate(remote);
  std::vector<double> ratios, remote_rates, local_rates;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    remote.EndStep();
    // The machine drifts: the reference before and after stand for the time in between.
    const double before = rate(local);
    remote_rates.push_back(rate(remote));
    local_rates.push_back((before + rate(local)) / 2);
    ratios.push_back(remote_rates.back() / local_rates.back());
  }
  const std::string name(Name(dtype));
  std::printf("remote_over_local_%s %.3f\nremote_%s_tokens_per_second %.1f\nlocal_%s_tokens_per_second %.1f\n",
              name.c_str(), Median(ratios), name.c_str(), Median(remote_rates), name.c_str(), Median(local_rates));
  std::fflush(stdout);
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  shardmlp::Measure(shardmlp::DType::kF32);
  shardmlp::Measure(shardmlp::DType::kBF16);
  return 0;
}
