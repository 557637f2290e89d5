#include "client/cpp/proto_types.h"

#include <algorithm>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

struct OptimizerWriter {
  v1::ParameterGroup& group;

  void operator()(const AdamW& adamw) const {
    v1::AdamW& to = *group.mutable_adamw();
    to.set_learning_rate(adamw.learning_rate);
    to.set_beta1(adamw.beta1);
    to.set_beta2(adamw.beta2);
    to.set_epsilon(adamw.epsilon);
    to.set_weight_decay(adamw.weight_decay);
  }
  void operator()(const Sgd& sgd) const {
    v1::Sgd& to = *group.mutable_sgd();
    to.set_learning_rate(sgd.learning_rate);
    to.set_momentum(sgd.momentum);
    to.set_dampening(sgd.dampening);
    to.set_weight_decay(sgd.weight_decay);
    to.set_nesterov(sgd.nesterov);
  }
  void operator()(const KeepFrozen&) const { group.mutable_keep_frozen(); }
};

ClientLayer FromProto(const v1::LayerInfo& layer) {
  return {.layer = layer.layer(),
          .module = layer.module(),
          .hidden_size = layer.hidden_size(),
          .intermediate_size = layer.intermediate_size(),
          .output_size = layer.output_size(),
          .activation = layer.activation(),
          .gated = layer.gated(),
          .activation_limit = layer.activation_limit()};
}

ClientMemoryPlan FromProto(const v1::MemoryPlan& memory) {
  return {.weights_bytes = memory.weights_bytes(),
          .gradients_bytes = memory.gradients_bytes(),
          .master_weights_bytes = memory.master_weights_bytes(),
          .optimizer_bytes = memory.optimizer_bytes(),
          .workspace_bytes = memory.workspace_bytes(),
          .staging_bytes = memory.staging_bytes(),
          .ledger_bytes = memory.ledger_bytes(),
          .stash_bytes = memory.stash_bytes()};
}

}  // namespace

v1::CommitStepRequest ToProto(const CommitOptions& options) {
  v1::CommitStepRequest request;
  request.set_gradient_scale(options.gradient_scale);
  request.set_fresh_optimizer(options.fresh_optimizer);
  for (const ClientParameterGroup& group : options.groups) {
    v1::ParameterGroup& to = *request.add_groups();
    to.mutable_tensors()->Assign(group.tensors.begin(), group.tensors.end());
    std::visit(OptimizerWriter{to}, group.hyperparameters);
  }
  return request;
}

ClientPosition FromProto(const v1::StepPosition& position) {
  return {.step = position.step(), .attempt = position.attempt(), .weights_version = position.weights_version()};
}

ClientCheckpoint FromProto(const v1::CheckpointInfo& checkpoint) {
  return {.name = checkpoint.name(), .step = checkpoint.step(), .byte_count = checkpoint.byte_count()};
}

ClientDrain FromProto(const v1::DrainResponse& response) {
  ClientDrain drain = {.position = FromProto(response.position()),
                       .checkpoint = {},
                       .cut_off = response.cut_off(),
                       .step_undecided = response.step_undecided()};
  if (response.has_checkpoint()) drain.checkpoint = FromProto(response.checkpoint());
  return drain;
}

std::vector<ClientSeries> FromProto(const v1::GetMetricsResponse& response) {
  std::vector<ClientSeries> metrics;
  for (const v1::MetricFamily& family : response.families()) {
    for (const v1::MetricSeries& from : family.series()) {
      ClientSeries& series = metrics.emplace_back();
      series.name = family.name();
      series.labels = {from.labels().begin(), from.labels().end()};
      series.value = from.value();
      for (const v1::MetricBucket& bucket : from.histogram().buckets()) {
        series.buckets.push_back({bucket.upper_bound(), bucket.cumulative_count()});
      }
      series.sum = from.histogram().sum();
    }
  }
  return metrics;
}

absl::StatusOr<ServedModel> FromProto(const v1::GetModelResponse& response) {
  ServedModel model;
  model.model_type = response.model().model_type();
  SHARDMLP_ASSIGN_OR_RETURN(model.compute_dtype, FromProto(response.model().compute_dtype()));
  model.frozen = response.model().frozen();
  for (const v1::LayerInfo& layer : response.model().layers()) model.layers.push_back(FromProto(layer));
  for (const v1::TensorInfo& tensor : response.model().tensors()) {
    SHARDMLP_ASSIGN_OR_RETURN(const DType dtype, FromProto(tensor.dtype()));
    model.tensors.push_back({.name = tensor.name(),
                             .layer = tensor.layer(),
                             .shape = {tensor.shape().begin(), tensor.shape().end()},
                             .dtype = dtype,
                             .checksum = static_cast<uint64_t>(tensor.checksum())});
  }
  model.max_message_bytes = response.limits().max_message_bytes();
  model.preferred_shard_bytes = response.limits().preferred_shard_bytes();
  model.tile_row_count = response.limits().tile_row_count();
  model.max_call_count = response.limits().max_call_count();
  if (model.max_message_bytes <= 0) {
    return Error(absl::StatusCode::kInternal, Reason::kMessageTooLarge,
                 absl::StrCat("the server advertises messages of at most ", model.max_message_bytes, " bytes"));
  }
  model.position = FromProto(response.position());
  for (const v1::TrainerInfo& trainer : response.trainers()) {
    model.trainers.push_back({.run_id = trainer.run_id(),
                              .trainer_rank = trainer.trainer_rank(),
                              .trainer_count = trainer.trainer_count(),
                              .sealed = trainer.sealed()});
  }
  model.memory = FromProto(response.memory());
  model.replica = {
      .rank = response.replica().rank(),
      .replica_count = std::max(response.replica().replica_count(), 1),
      .member_count = response.replica().member_count(),
      .generation = response.replica().generation(),
      .member_ranks = {response.replica().member_ranks().begin(), response.replica().member_ranks().end()}};
  return model;
}

}  // namespace shardmlp
