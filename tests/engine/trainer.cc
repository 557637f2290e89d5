#include "tests/engine/trainer.h"

#include <utility>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/tile_buffers.h"
#include "tests/engine/bytes.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

Dense Minus(const Dense& a, const Dense& b) {
  Dense difference = a;
  for (size_t i = 0; i < a.values.size(); ++i) difference.values[i] -= b.values[i];
  return difference;
}

}  // namespace

EngineOptions TilesOf(int64_t rows, const TinyModel& model) {
  EngineOptions options;
  options.workspace_bytes = rows * TileBuffers::Bytes(model.spec().layers, 1);
  return options;
}

std::unique_ptr<Backend> OneThread() { return MakeCpuBackend({.threads = 1}).value(); }

namespace {

// For tests to say which version they mean.
EngineOptions FromVersionOne(EngineOptions options) {
  if (options.first_weights_version == 0) options.first_weights_version = 1;
  return options;
}

}  // namespace

TestEngine::TestEngine(const TinyModel& model, const EngineOptions& options, std::unique_ptr<Backend> backend,
                       std::unique_ptr<CheckpointStore> checkpoints, std::unique_ptr<Replicas> replicas)
    : engine(Engine::Create(FromVersionOne(options), std::move(backend), model, std::move(replicas),
                            std::move(checkpoints), metrics)
                 .value()) {}

Dense TestEngine::Read(const TensorSpec& tensor) const {
  const auto& tensors = engine->model().tensors;
  const int64_t rows = tensor.shape.size() == 1 ? 1 : tensor.shape[0];
  size_t index = 0;
  while (tensors[index].name != tensor.name) ++index;
  Reply<TensorRows> reply;
  engine->ReadTensor(static_cast<int64_t>(index), 0, rows, reply.done());
  const absl::StatusOr<TensorRows> read = reply.Wait();
  EXPECT_TRUE(Succeeds(read));
  return Decode(read->bytes.data(), rows, tensor.shape.back(), engine->model().dtype);
}

std::vector<NaiveMlp> TestEngine::Weights() const {
  std::vector<NaiveMlp> weights;
  const ModelSpec& model = engine->model();
  for (const LayerSpec& layer : model.layers) {
    const MlpConfig& mlp = layer.mlp;
    NaiveMlp& naive = weights.emplace_back();
    naive.activation = mlp.activation;
    naive.gate_up = Dense(mlp.gate_up_size(), mlp.hidden_size);
    naive.gate_up_bias = Dense(mlp.gate_up_bias ? 1 : 0, mlp.gate_up_size());
    naive.down = Dense(mlp.output_size, mlp.intermediate_size);
    naive.down_bias = Dense(mlp.down_bias ? 1 : 0, mlp.output_size);
    for (const TensorSpec& tensor : model.tensors) {
      if (tensor.layer == layer.layer) SetPart(tensor, Read(tensor), naive);
    }
  }
  return weights;
}

std::vector<NaiveGradients> Difference(const std::vector<NaiveMlp>& before, const std::vector<NaiveMlp>& after) {
  std::vector<NaiveGradients> differences;
  for (size_t n = 0; n < before.size(); ++n) {
    differences.push_back({Dense(), Minus(before[n].gate_up, after[n].gate_up),
                           Minus(before[n].gate_up_bias, after[n].gate_up_bias), Minus(before[n].down, after[n].down),
                           Minus(before[n].down_bias, after[n].down_bias)});
  }
  return differences;
}

std::vector<ParameterGroup> OneGroup(const ModelSpec& model, const Hyperparameters& hyperparameters) {
  ParameterGroup group;
  group.hyperparameters = hyperparameters;
  for (const TensorSpec& tensor : model.tensors) group.tensors.push_back(tensor.name);
  return {group};
}

Trainer::Trainer(Engine& engine, int rank, int count, SessionRole role) : engine_(engine) {
  const absl::StatusOr<SessionGrant> grant = engine.OpenSession({"run", role, count, rank});
  EXPECT_TRUE(Succeeds(grant));
  session_ = grant->session_id;
  position_ = grant->position;
}

Dense Trainer::Forward(size_t layer, const Dense& x, int64_t shards) {
  const auto call = Start(ForwardHeader(layer, x.rows), x);
  EXPECT_TRUE(Succeeds(call->SendAll(shards)));
  const absl::StatusOr<CallSummary> summary = call->Wait();
  EXPECT_TRUE(Succeeds(summary));
  EXPECT_EQ(summary->row_count, x.rows);
  EXPECT_EQ(summary->weights_version, position_.weights_version);
  return call->rows();
}

Dense Trainer::Backward(size_t layer, const Dense& x, const Dense& dy, int64_t shards) {
  const auto call = Start(BackwardHeader(layer, x.rows), x, dy);
  EXPECT_TRUE(Succeeds(call->SendAll(shards)));
  const absl::StatusOr<CallSummary> summary = call->Wait();
  EXPECT_TRUE(Succeeds(summary));
  EXPECT_EQ(summary->row_count, x.rows);
  EXPECT_EQ(summary->repeated_row_count, 0);
  return call->rows();
}

ForwardSpec Trainer::ForwardHeader(size_t layer, int64_t rows) const {
  return {session_, LayerIndex(layer), rows, WidestWireDType(engine_.model().dtype)};
}

BackwardSpec Trainer::BackwardHeader(size_t layer, int64_t rows) {
  BackwardSpec spec;
  spec.session_id = session_;
  spec.layer = LayerIndex(layer);
  spec.row_count = rows;
  spec.dtype = WidestWireDType(engine_.model().dtype);
  spec.call_id = ++calls_;
  spec.step = position_.step;
  spec.attempt = position_.attempt;
  spec.weights_version = position_.weights_version;
  return spec;
}

std::unique_ptr<RunningCall> Trainer::Start(const ForwardSpec& spec, const Dense& x) {
  return RunningCall::Forward(engine_, spec, x).value();
}

std::unique_ptr<RunningCall> Trainer::Start(const BackwardSpec& spec, const Dense& x, const Dense& dy) {
  if (spec.weight_gradient && spec.row_count > 0) sent_[spec.layer] += spec.row_count;
  return RunningCall::Backward(engine_, spec, x, dy).value();
}

Reply<SealResult> Trainer::StartSeal() {
  Reply<SealResult> reply;
  engine_.SealStep({session_, position_.step, position_.attempt, sent_}, reply.done());
  return reply;
}

CommitSpec Trainer::CommitOf(const Hyperparameters& hyperparameters, double gradient_scale) const {
  return {session_, position_.step, position_.attempt, OneGroup(engine_.model(), hyperparameters), gradient_scale};
}

Reply<StepPosition> Trainer::StartCommit(const CommitSpec& spec) {
  Reply<StepPosition> reply;
  engine_.CommitStep(spec, reply.done());
  return reply;
}

Reply<StepPosition> Trainer::StartDiscard(const std::string& reason) {
  Reply<StepPosition> reply;
  engine_.DiscardStep({session_, position_.step, position_.attempt, reason}, reply.done());
  return reply;
}

absl::Status Trainer::Commit(const Hyperparameters& hyperparameters, double gradient_scale) {
  return GoOn(StartCommit(CommitOf(hyperparameters, gradient_scale)).Wait());
}

absl::Status Trainer::Discard() { return GoOn(StartDiscard().Wait()); }

absl::Status Trainer::GoOn(const absl::StatusOr<StepPosition>& position) {
  if (!position.ok()) return position.status();
  position_ = *position;
  sent_.clear();
  return absl::OkStatus();
}

void Trainer::CatchUp() { EXPECT_TRUE(Succeeds(GoOn(engine_.position()))); }

}  // namespace shardmlp::testing
