// Trainers and readers on threads of their own, with retries, discards and sessions that come and go: whatever the
// order, what is computed is the naive twin's.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

constexpr int kTrainers = 3;
constexpr int kSteps = 6;
constexpr int kMicroBatches = 2;
constexpr double kLearningRate = 0.5;
constexpr double kBound = 1e-12;

// What the trainer of a rank sends to layer `n` in one micro-batch of a step.
struct Batch {
  Batch(const MlpConfig& mlp, int step, int rank, int micro, size_t n)
      : rows(3 + (5 * step + 3 * rank + 7 * micro) % 17),
        seed(static_cast<uint64_t>(((step * kTrainers + rank) * kMicroBatches + micro) * 2) + n),
        x(RandomDense(rows, mlp.hidden_size, seed)),
        dy(RandomDense(rows, mlp.output_size, seed + 1000, 0.01)) {}
  int64_t rows;
  uint64_t seed;
  Dense x;
  Dense dy;
};

class ThreadsTest : public ::testing::TestWithParam<bool> {
 protected:
  ThreadsTest() {
    weights_.push_back(model_.layers());
    for (int step = 0; step < kSteps; ++step) weights_.push_back(WeightsAfter(step));
    std::unique_ptr<Backend> backend = OneThread();
    if (GetParam()) backend = std::make_unique<LazyDevice>();
    engine_ = std::make_unique<TestEngine>(model_, TilesOf(8, model_), std::move(backend));
  }

  // The twin's, from those before the step.
  std::vector<NaiveMlp> WeightsAfter(int step) const {
    std::vector<NaiveMlp> after = weights_[step];
    for (int rank = 0; rank < kTrainers; ++rank) {
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        for (size_t n = 0; n < after.size(); ++n) {
          const Batch batch(mlp(n), step, rank, micro, n);
          const NaiveGradients gradients = NaiveBackward(weights_[step][n], batch.x, batch.dy);
          for (const TensorSpec& tensor : model_.spec().tensors) {
            if (tensor.layer != LayerIndex(n)) continue;
            Dense part = PartOf(tensor, after[n]);
            const Dense gradient = PartOf(tensor, gradients);
            for (size_t i = 0; i < part.values.size(); ++i) part.values[i] -= kLearningRate * gradient.values[i];
            SetPart(tensor, part, after[n]);
          }
        }
      }
    }
    return after;
  }

  // Forward and backward of one micro-batch of one layer; the backward is cut and sent again now and then.
  absl::Status TryBatch(Trainer& trainer, const Batch& batch, size_t n) {
    const NaiveMlp& weights = weights_[trainer.position().step][n];
    EXPECT_LE(RelativeDifference(trainer.Forward(n, batch.x, 2), NaiveForward(weights, batch.x)), kBound);
    const BackwardSpec header = trainer.BackwardHeader(n, batch.rows);
    if (batch.seed % 3 == 0) {
      SHARDMLP_ASSIGN_OR_RETURN(const auto cut, RunningCall::Backward(**engine_, header, batch.x, batch.dy));
      SHARDMLP_RETURN_IF_ERROR(cut->Send(batch.rows - 1));
      cut->Cancel();
    }
    SHARDMLP_ASSIGN_OR_RETURN(const auto call, RunningCall::Backward(**engine_, header, batch.x, batch.dy));
    SHARDMLP_RETURN_IF_ERROR(call->SendAll(3));
    SHARDMLP_RETURN_IF_ERROR(call->Wait().status());
    EXPECT_LE(RelativeDifference(call->rows(), NaiveBackward(weights, batch.x, batch.dy).dx), kBound);
    trainer.sent()[LayerIndex(n)] += batch.rows;
    return absl::OkStatus();
  }

  absl::Status TryStep(Trainer& trainer, int rank, bool discard) {
    const auto step = static_cast<int>(trainer.position().step);
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      for (size_t n = 0; n < model_.layers().size(); ++n) {
        SHARDMLP_RETURN_IF_ERROR(TryBatch(trainer, Batch(mlp(n), step, rank, micro, n), n));
      }
    }
    if (discard) return trainer.Discard();
    SHARDMLP_RETURN_IF_ERROR(trainer.Seal().status());
    return trainer.Commit(Sgd{.learning_rate = kLearningRate});
  }

  // Each rank discards the first attempt of every third step; they all do it over.
  void Train(int rank) {
    Trainer trainer(**engine_, rank, kTrainers);
    int64_t last_discarded = -1;
    while (trainer.position().step < kSteps) {
      const int64_t step = trainer.position().step;
      const bool discard = step % kTrainers == rank && last_discarded < step;
      if (discard) last_discarded = step;
      const absl::Status status = TryStep(trainer, rank, discard);
      if (status.ok()) continue;
      EXPECT_TRUE(Fails(status, absl::StatusCode::kAborted, Reason::kStepAborted));
      trainer.CatchUp();
    }
    EXPECT_TRUE(Succeeds((*engine_)->CloseSession(trainer.session())));
  }

  // Forwards and tensors of whichever weights are there, each in a session of its own.
  void ReadUntil(const std::atomic<bool>& done, int reader) {
    for (int i = 0; !done; ++i) {
      Trainer session(**engine_, 0, 1, SessionRole::kRead);
      const size_t n = i % 2;
      const Dense x = RandomDense(20, mlp(n).hidden_size, 5000 + reader);
      const auto call = session.Start(session.ForwardHeader(n, x.rows), x);
      EXPECT_TRUE(Succeeds(call->SendAll(2)));
      if (const absl::StatusOr<CallSummary> summary = call->Wait(); summary.ok()) {
        const NaiveMlp& weights = weights_[summary->weights_version - 1][n];
        EXPECT_LE(RelativeDifference(call->rows(), NaiveForward(weights, x)), kBound);
      } else {
        EXPECT_TRUE(Fails(summary, absl::StatusCode::kUnavailable, Reason::kWeightsChanged));
      }
      const size_t index = i % model_.spec().tensors.size();
      const TensorSpec& tensor = model_.spec().tensors[index];
      Reply<TensorRows> reply;
      (*engine_)->ReadTensor(static_cast<int64_t>(index), 0, tensor.shape.size() == 1 ? 1 : tensor.shape[0],
                             reply.done());
      const absl::StatusOr<TensorRows> read = reply.Wait();
      EXPECT_TRUE(Succeeds(read));
      const Dense expected = PartOf(tensor, weights_[read->weights_version - 1][tensor.layer == LayerIndex(0) ? 0 : 1]);
      EXPECT_LE(RelativeDifference(Decode(read->bytes.data(), expected.rows, expected.cols, DType::kF64), expected),
                kBound);
      EXPECT_TRUE(Succeeds((*engine_)->CloseSession(session.session())));
    }
  }

  const MlpConfig& mlp(size_t n) const { return model_.spec().layers[n].mlp; }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  std::vector<std::vector<NaiveMlp>> weights_;  // the twin's, by step
  std::unique_ptr<TestEngine> engine_;
};

TEST_P(ThreadsTest, ARunOfSeveralTrainersIsTheTwins) {
  std::atomic<bool> done = false;
  std::vector<std::thread> trainers, readers;
  for (int rank = 0; rank < kTrainers; ++rank) trainers.emplace_back([&, rank] { Train(rank); });
  for (int reader = 0; reader < 2; ++reader) readers.emplace_back([&, reader] { ReadUntil(done, reader); });
  for (std::thread& thread : trainers) thread.join();
  done = true;
  for (std::thread& thread : readers) thread.join();

  EXPECT_EQ((*engine_)->position(), (StepPosition{kSteps, kSteps, kSteps + 1})) << "each step was discarded once";
  EXPECT_EQ((*engine_)->open_call_count(), 0);
  const std::vector<NaiveMlp> weights = engine_->Weights();
  for (size_t n = 0; n < weights.size(); ++n) {
    for (const TensorSpec& tensor : model_.spec().tensors) {
      if (tensor.layer != LayerIndex(n)) continue;
      EXPECT_LE(RelativeDifference(PartOf(tensor, weights[n]), PartOf(tensor, weights_[kSteps][n])), kBound)
          << tensor.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ThreadsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Lazy" : "Cpu"; });

}  // namespace
}  // namespace shardmlp::testing
