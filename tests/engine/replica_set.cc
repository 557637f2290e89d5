#include "tests/engine/replica_set.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/engine/outcome.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {

ReplicaParts LazyParts(int rank, LazyDevice*& device) {
  ReplicaParts parts;
  parts.backend = [rank, &device](int own_rank) {
    auto backend = std::make_unique<LazyDevice>();
    if (own_rank == rank) device = backend.get();
    return backend;
  };
  return parts;
}

ReplicaParts ClockedParts(const HandClock& clock, absl::Duration lease, absl::Duration seal_timeout) {
  ReplicaParts parts;
  parts.options = [=, clock = clock.reader()](int) {
    EngineOptions options;
    options.lease = lease;
    options.seal_timeout = seal_timeout;
    options.clock = clock;
    return options;
  };
  return parts;
}

ReplicaSet::ReplicaSet(const TinyModel& model, int size, OnLoss on_loss, ReplicaParts parts)
    : model_(model), parts_(std::move(parts)), hub_(size, on_loss), engines_(size) {
  std::vector<std::thread> starts;
  for (int rank = 0; rank < size; ++rank) starts.emplace_back([this, rank] { Start(rank); });
  for (std::thread& start : starts) start.join();
}

void ReplicaSet::Start(int rank) {
  EngineOptions options = parts_.options(rank);
  options.first_weights_version = 1 + 1000 * rank;
  engines_[rank] = std::make_unique<TestEngine>(model_, options, parts_.backend(rank), parts_.checkpoints(rank),
                                                parts_.replicas == nullptr ? hub_.Start(rank) : parts_.replicas(rank));
}

void ReplicaSet::Kill(int rank) {
  if (parts_.replicas == nullptr) hub_.Kill(rank);
  engines_[rank] = nullptr;
}

void ReplicaSet::AwaitStep(int rank, int64_t step) {
  while (engines_[rank]->engine->position().step < step) std::this_thread::yield();
}

void ReplicaSet::AwaitAttempt(int rank, int64_t attempt) {
  while (engines_[rank]->engine->position().attempt < attempt) std::this_thread::yield();
}

void ReplicaSet::DeliverUntilStep(int rank, int64_t step) {
  while (engines_[rank]->engine->position().step < step) {
    if (!hub_.Deliver(rank)) std::this_thread::yield();
  }
}

void ReplicaSet::DeliverUntilSumming(int rank, Trainer& trainer) {
  const auto is_summing = [&] {
    const auto commit = trainer.StartCommit(trainer.CommitOf(KeepFrozen{})).Wait();
    return absl::StrContains(commit.status().message(), "being summed");
  };
  while (!is_summing()) {
    if (!hub_.Deliver(rank)) std::this_thread::yield();
  }
}

std::vector<Dense> ReplicaSet::WeightsOf(int rank) {
  std::vector<Dense> weights;
  for (const TensorSpec& tensor : model_.spec().tensors) weights.push_back(engines_[rank]->Read(tensor));
  return weights;
}

void ReplicaSet::ExpectAlike() {
  for (int rank = 1; rank < size(); ++rank) {
    if (engines_[rank] == nullptr) continue;
    AwaitStep(rank, engines_[0]->engine->position().step);
    AwaitAttempt(rank, engines_[0]->engine->position().attempt);
    EXPECT_EQ(engines_[rank]->engine->position(), engines_[0]->engine->position()) << "rank " << rank;
    EXPECT_EQ(WeightsOf(rank), WeightsOf(0)) << "rank " << rank;
  }
}

Batch::Batch(const TinyModel& model, const std::vector<int64_t>& rows, int seed) {
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    x.emplace_back();
    dy.emplace_back();
    for (const LayerSpec& layer : model.spec().layers) {
      const uint64_t own = 1000 * seed + 100 * rank + layer.layer;
      x.back().push_back(RandomDense(rows[rank], layer.mlp.hidden_size, own));
      dy.back().push_back(RandomDense(rows[rank], layer.mlp.output_size, own + 50, 0.01));
    }
  }
}

absl::Status SendPart(Trainer& trainer, const Batch& batch, int rank) {
  for (size_t layer = 0; layer < batch.x[rank].size(); ++layer) {
    const Dense& x = batch.x[rank][layer];
    const BackwardSpec header = trainer.BackwardHeader(layer, x.rows);
    auto call = RunningCall::Backward(trainer.engine(), header, x, batch.dy[rank][layer]);
    if (!call.ok()) return call.status();
    // What ends the call is what it says at its end.
    (*call)->SendAll(2).IgnoreError();
    const absl::StatusOr<CallSummary> summary = (*call)->Wait();
    if (!summary.ok()) return summary.status();
    if (x.rows > 0) trainer.sent()[header.layer] += x.rows;
  }
  return absl::OkStatus();
}

absl::Status SendParts(std::vector<std::unique_ptr<Trainer>>& trainers, const Batch& batch) {
  for (size_t rank = 0; rank < trainers.size(); ++rank) {
    SHARDMLP_RETURN_IF_ERROR(SendPart(*trainers[rank], batch, static_cast<int>(rank)));
  }
  return absl::OkStatus();
}

namespace {

absl::Status TryStep(std::vector<std::unique_ptr<Trainer>>& trainers, const Batch& batch,
                     const Hyperparameters& hyperparameters) {
  // What one replica has heard the others will in a moment.
  const auto catch_up = [&] {
    for (const auto& trainer : trainers) trainer->CatchUp();
    return std::all_of(trainers.begin(), trainers.end(),
                       [&](const auto& trainer) { return trainer->position() == trainers[0]->position(); });
  };
  while (!catch_up()) std::this_thread::yield();
  SHARDMLP_RETURN_IF_ERROR(SendParts(trainers, batch));
  std::vector<Reply<SealResult>> seals;
  for (const auto& trainer : trainers) seals.push_back(trainer->StartSeal());
  for (const auto& seal : seals) SHARDMLP_RETURN_IF_ERROR(seal.Wait().status());
  for (const auto& trainer : trainers) {
    SHARDMLP_RETURN_IF_ERROR(trainer->Commit(hyperparameters));
  }
  return absl::OkStatus();
}

}  // namespace

void TrainStep(std::vector<std::unique_ptr<Trainer>>& trainers, const Batch& batch,
               const Hyperparameters& hyperparameters) {
  while (true) {
    const absl::Status status = TryStep(trainers, batch, hyperparameters);
    if (status.ok()) return;
    ASSERT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    for (const auto& trainer : trainers) ASSERT_TRUE(Succeeds(trainer->Discard()));
  }
}

std::vector<std::unique_ptr<Trainer>> OpenTrainers(ReplicaSet& replicas, int count) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (int rank = 0; rank < count; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(*replicas[rank % replicas.size()], rank, count));
  }
  return trainers;
}

namespace {

// A step of an engine whose only trainer has all of the batch.
void TrainWhole(TestEngine& engine, const Batch& batch, const Hyperparameters& hyperparameters) {
  Trainer trainer(*engine);
  for (size_t rank = 0; rank < batch.x.size(); ++rank) {
    ASSERT_TRUE(Succeeds(SendPart(trainer, batch, static_cast<int>(rank))));
  }
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  ASSERT_TRUE(Succeeds(trainer.Commit(hyperparameters)));
  ASSERT_TRUE(Succeeds(engine->CloseSession(trainer.session())));
}

}  // namespace

void ExpectAsOneEngine(ReplicaSet& replicas, const TinyModel& model, const std::vector<int64_t>& rows, double bound) {
  const Sgd sgd{.learning_rate = 1};
  TestEngine whole(model);
  auto trainers = OpenTrainers(replicas, static_cast<int>(rows.size()));
  for (int step = 0; step < 3; ++step) {
    const Batch batch(model, rows, step);
    TrainStep(trainers, batch, sgd);
    TrainWhole(whole, batch, sgd);
    EXPECT_EQ(replicas[0]->position().step, step + 1);
    replicas.ExpectAlike();
    const std::vector<NaiveMlp> got = replicas[0].Weights(), expected = whole.Weights();
    for (size_t n = 0; n < got.size(); ++n) {
      EXPECT_LE(RelativeDifference(got[n].gate_up, expected[n].gate_up), bound);
      EXPECT_LE(RelativeDifference(got[n].gate_up_bias, expected[n].gate_up_bias), bound);
      EXPECT_LE(RelativeDifference(got[n].down, expected[n].down), bound);
      EXPECT_LE(RelativeDifference(got[n].down_bias, expected[n].down_bias), bound);
    }
  }
}

}  // namespace shardmlp::testing
