// An engine over a tiny model, and sessions that train through it, as clients do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "server/metrics.h"
#include "tests/engine/reply.h"
#include "tests/engine/running_call.h"
#include "tests/engine/tiny_model.h"

namespace shardmlp::testing {

// Options for tiles of exactly `rows` rows on the CPU: 1 to 64, or a multiple of 64.
EngineOptions TilesOf(int64_t rows, const TinyModel& model);

// A CPU backend of one thread, so that sums come out the same every time.
std::unique_ptr<Backend> OneThread();

struct TestEngine {
  explicit TestEngine(const TinyModel& model, const EngineOptions& options = {},
                      std::unique_ptr<Backend> backend = OneThread(),
                      std::unique_ptr<CheckpointStore> checkpoints = nullptr,
                      std::unique_ptr<Replicas> replicas = MakeLocalReplicas());
  Engine* operator->() const { return engine.get(); }
  Engine& operator*() const { return *engine; }

  // A tensor as the file has it.
  Dense Read(const TensorSpec& tensor) const;
  // The weights of all layers.
  std::vector<NaiveMlp> Weights() const;

  Metrics metrics;
  std::unique_ptr<Engine> engine;
};

// before - after of every tensor: what a commit of SGD with learning rate 1 and gradient scale 1 took away.
std::vector<NaiveGradients> Difference(const std::vector<NaiveMlp>& before, const std::vector<NaiveMlp>& after);

// Every tensor in one group.
std::vector<ParameterGroup> OneGroup(const ModelSpec& model, const Hyperparameters& hyperparameters);

// A session, for one thread. What goes wrong fails the test, except where a Status is returned.
class Trainer {
 public:
  explicit Trainer(Engine& engine, int rank = 0, int count = 1, SessionRole role = SessionRole::kTrain);

  // Layer n of those that are served, in `shards` shards.
  Dense Forward(size_t layer, const Dense& x, int64_t shards = 1);
  Dense Backward(size_t layer, const Dense& x, const Dense& dy, int64_t shards = 1);

  // The header of the next call, in the widest dtype, to be altered at will; each has a call id of its own.
  ForwardSpec ForwardHeader(size_t layer, int64_t rows) const;
  BackwardSpec BackwardHeader(size_t layer, int64_t rows);
  std::unique_ptr<RunningCall> Start(const ForwardSpec& spec, const Dense& x);
  // Counts the rows as sent.
  std::unique_ptr<RunningCall> Start(const BackwardSpec& spec, const Dense& x, const Dense& dy);

  // With the rows that were sent.
  Reply<SealResult> StartSeal();
  absl::StatusOr<SealResult> Seal() { return StartSeal().Wait(); }
  CommitSpec CommitOf(const Hyperparameters& hyperparameters, double gradient_scale = 1) const;
  Reply<StepPosition> StartCommit(const CommitSpec& spec);
  Reply<StepPosition> StartDiscard(const std::string& reason = "");
  // Each then goes on at the position that was answered.
  absl::Status Commit(const Hyperparameters& hyperparameters = Sgd{.learning_rate = 1}, double gradient_scale = 1);
  absl::Status Discard();
  // Goes on where the engine stands, with nothing sent.
  void CatchUp();

  Engine& engine() { return engine_; }
  int64_t session() const { return session_; }
  const StepPosition& position() const { return position_; }
  LayerRows& sent() { return sent_; }

 private:
  absl::Status GoOn(const absl::StatusOr<StepPosition>& position);

  Engine& engine_;
  int64_t session_ = 0;
  StepPosition position_;
  LayerRows sent_;
  int64_t calls_ = 0;
};

}  // namespace shardmlp::testing
