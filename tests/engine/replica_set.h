// Engines of one process that are replicas of each other, and trainers that train through them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tests/engine/hand_clock.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/trainer.h"
#include "tests/sync/hub_replicas.h"

namespace shardmlp::testing {

// What a replica is made of, by its rank.
struct ReplicaParts {
  std::function<EngineOptions(int rank)> options = [](int) { return EngineOptions(); };
  std::function<std::unique_ptr<Backend>(int rank)> backend = [](int) { return OneThread(); };
  std::function<std::unique_ptr<CheckpointStore>(int rank)> checkpoints = [](int) { return nullptr; };
  // Null: one of the set's hub.
  std::function<std::unique_ptr<Replicas>(int rank)> replicas = nullptr;
};

// Replicas on lazy devices, that of `rank` noted in `device`, which must outlive them.
ReplicaParts LazyParts(int rank, LazyDevice*& device);
// Replicas by that clock.
ReplicaParts ClockedParts(const HandClock& clock, absl::Duration lease, absl::Duration seal_timeout);

class ReplicaSet {
 public:
  // Starts all of them. Each has another weights version at first.
  ReplicaSet(const TinyModel& model, int size, OnLoss on_loss = OnLoss::kWait, ReplicaParts parts = {});

  TestEngine& operator[](int rank) { return *engines_[rank]; }
  int size() const { return static_cast<int>(engines_.size()); }
  HubReplicas& hub() { return hub_; }

  // As kill -9. Trainers of its must be gone, or not used any more.
  void Kill(int rank);
  // Afresh, from the model's own weights; returns once it is in a generation.
  void Start(int rank);
  // Waits until `rank` stands at `step` or later, or at `attempt` or later.
  void AwaitStep(int rank, int64_t step);
  void AwaitAttempt(int rank, int64_t attempt);
  // Of a set whose hub holds: delivers to `rank` until it stands at `step`, or is in the sums that `trainer` sealed.
  void DeliverUntilStep(int rank, int64_t step);
  void DeliverUntilSumming(int rank, Trainer& trainer);

  // Every tensor, as the file has it.
  std::vector<Dense> WeightsOf(int rank);
  // That all have the same weights, to the bit, and the same position.
  void ExpectAlike();

 private:
  const TinyModel& model_;
  const ReplicaParts parts_;
  HubReplicas hub_;
  std::vector<std::unique_ptr<TestEngine>> engines_;
};

// A batch: rows for each trainer, by its rank, of each layer.
struct Batch {
  Batch(const TinyModel& model, const std::vector<int64_t>& rows, int seed);

  std::vector<std::vector<Dense>> x;   // by trainer, layer
  std::vector<std::vector<Dense>> dy;  // by trainer, layer
};

// Backward of a trainer's part.
absl::Status SendPart(Trainer& trainer, const Batch& batch, int rank);
// Of all trainers; each one's rank is its place.
absl::Status SendParts(std::vector<std::unique_ptr<Trainer>>& trainers, const Batch& batch);
// A step of all trainers, begun again wherever it's aborted; each trainer's rank is its place.
void TrainStep(std::vector<std::unique_ptr<Trainer>>& trainers, const Batch& batch,
               const Hyperparameters& hyperparameters);

// Rank r at replica r % size.
std::vector<std::unique_ptr<Trainer>> OpenTrainers(ReplicaSet& replicas, int count);
// Trains 3 steps of `rows` for each trainer, and one engine on the CPU whose only trainer has all of the batch: expects
// all replicas to be alike, and their weights as that engine's within `bound`.
void ExpectAsOneEngine(ReplicaSet& replicas, const TinyModel& model, const std::vector<int64_t>& rows, double bound);

}  // namespace shardmlp::testing
