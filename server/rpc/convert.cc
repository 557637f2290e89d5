#include "server/rpc/convert.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/activation.h"
#include "kernels/status.h"
#include "proto/dtype.h"

namespace shardmlp {
namespace {

constexpr int64_t kMaxReasonBytes = 256;

absl::Status Invalid(absl::string_view message, const ErrorMetadata& metadata = {}) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message, metadata);
}

template <typename Header>
absl::StatusOr<Header> Parse(const std::string& body) {
  Header header;
  if (!header.ParseFromString(body)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kMalformedMessage,
                 absl::StrCat("the header's ", body.size(), " bytes are no ", header.GetTypeName()));
  }
  return header;
}

absl::StatusOr<KeepInput> ReadKeepInput(v1::KeepInput keep) {
  switch (keep) {
    case v1::KEEP_INPUT_NO: return KeepInput::kNo;
    case v1::KEEP_INPUT_IF_ROOM: return KeepInput::kIfRoom;
    case v1::KEEP_INPUT_PINNED: return KeepInput::kPinned;
    default: return Invalid(absl::StrCat("keep_input is ", static_cast<int>(keep), "; expected 0 to 2"));
  }
}

absl::StatusOr<CallHeader> ReadForwardHeader(const std::string& body) {
  SHARDMLP_ASSIGN_OR_RETURN(const auto header, Parse<v1::ForwardHeader>(body));
  SHARDMLP_ASSIGN_OR_RETURN(const DType dtype, FromProto(header.dtype()));
  SHARDMLP_ASSIGN_OR_RETURN(const KeepInput keep_input, ReadKeepInput(header.keep_input()));
  const auto& released = header.released_tickets();
  return ForwardSpec{.session_id = header.session_id(),
                     .layer = header.layer(),
                     .row_count = header.row_count(),
                     .dtype = dtype,
                     .call_id = header.call_id(),
                     .keep_input = keep_input,
                     .released_tickets = {released.begin(), released.end()}};
}

absl::StatusOr<CallHeader> ReadBackwardHeader(const std::string& body) {
  SHARDMLP_ASSIGN_OR_RETURN(const auto header, Parse<v1::BackwardHeader>(body));
  SHARDMLP_ASSIGN_OR_RETURN(const DType dtype, FromProto(header.dtype()));
  const auto& released = header.released_tickets();
  return BackwardSpec{.session_id = header.session_id(),
                      .layer = header.layer(),
                      .row_count = header.row_count(),
                      .dtype = dtype,
                      .call_id = header.call_id(),
                      .step = header.step(),
                      .attempt = header.attempt(),
                      .weights_version = header.weights_version(),
                      .input_gradient = header.input_gradient(),
                      .weight_gradient = header.weight_gradient(),
                      .ticket = header.ticket(),
                      .released_tickets = {released.begin(), released.end()}};
}

absl::StatusOr<Hyperparameters> FromProto(const v1::ParameterGroup& group) {
  switch (group.optimizer_case()) {
    case v1::ParameterGroup::kAdamw: {
      const v1::AdamW& adamw = group.adamw();
      return AdamW{.learning_rate = adamw.learning_rate(),
                   .beta1 = adamw.beta1(),
                   .beta2 = adamw.beta2(),
                   .epsilon = adamw.epsilon(),
                   .weight_decay = adamw.weight_decay()};
    }
    case v1::ParameterGroup::kSgd: {
      const v1::Sgd& sgd = group.sgd();
      return Sgd{.learning_rate = sgd.learning_rate(),
                 .momentum = sgd.momentum(),
                 .dampening = sgd.dampening(),
                 .weight_decay = sgd.weight_decay(),
                 .nesterov = sgd.nesterov()};
    }
    case v1::ParameterGroup::kKeepFrozen: return KeepFrozen{};
    default: break;
  }
  return Invalid(absl::StrCat("a parameter group of ", group.tensors_size(),
                              " tensors has no optimizer, expected adamw, sgd or keep_frozen"));
}

void Fill(const LayerRows& rows, google::protobuf::RepeatedPtrField<v1::LayerRows>& to) {
  for (const auto& [layer, row_count] : rows) {
    v1::LayerRows& entry = *to.Add();
    entry.set_layer(layer);
    entry.set_row_count(row_count);
  }
}

void Fill(const ModelSpec& model, v1::ModelInfo& to) {
  to.set_model_type(model.model_type);
  to.set_compute_dtype(ToProto(model.dtype));
  for (const LayerSpec& layer : model.layers) {
    v1::LayerInfo& info = *to.add_layers();
    info.set_layer(layer.layer);
    info.set_module(layer.module);
    info.set_hidden_size(layer.mlp.hidden_size);
    info.set_intermediate_size(layer.mlp.intermediate_size);
    info.set_output_size(layer.mlp.output_size);
    info.set_activation(std::string(Name(layer.mlp.activation.kind)));
    info.set_gated(layer.mlp.activation.gated);
    if (layer.mlp.activation.kind == ActivationKind::kClampedSwiglu) {
      info.set_activation_limit(layer.mlp.activation.limit);
    }
  }
  for (const TensorSpec& tensor : model.tensors) {
    v1::TensorInfo& info = *to.add_tensors();
    info.set_name(tensor.name);
    info.set_layer(tensor.layer);
    info.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    info.set_dtype(ToProto(model.dtype));
  }
}

void Fill(const MemoryPlan& plan, v1::MemoryPlan& to) {
  to.set_weights_bytes(plan.weights_bytes);
  to.set_gradients_bytes(plan.gradients_bytes);
  to.set_master_weights_bytes(plan.master_weights_bytes);
  to.set_optimizer_bytes(plan.optimizer_bytes);
  to.set_workspace_bytes(plan.workspace_bytes);
  to.set_staging_bytes(plan.staging_bytes);
  to.set_ledger_bytes(plan.ledger_bytes);
  to.set_stash_bytes(plan.stash_bytes);
}

void Fill(const TrainerStatus& trainer, v1::TrainerInfo& to) {
  to.set_run_id(trainer.spec.run_id);
  to.set_trainer_rank(trainer.spec.trainer_rank);
  to.set_trainer_count(trainer.spec.trainer_count);
  to.set_sealed(trainer.sealed);
}

void Fill(absl::Duration duration, google::protobuf::Duration& to) {
  to.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  to.set_nanos(static_cast<int32_t>(duration / absl::Nanoseconds(1)));
}

}  // namespace

absl::StatusOr<CallHeader> ReadCallHeader(Pass pass, const std::string& body) {
  return pass == Pass::kForward ? ReadForwardHeader(body) : ReadBackwardHeader(body);
}

std::unique_ptr<google::protobuf::MessageLite> MakeCallEnd(Pass pass, const CallSummary& summary) {
  if (pass == Pass::kForward) {
    auto response = std::make_unique<v1::ForwardResponse>();
    response->mutable_end()->set_row_count(summary.row_count);
    response->mutable_end()->set_weights_version(summary.weights_version);
    response->mutable_end()->set_ticket(summary.ticket);
    response->mutable_end()->set_gate_up_kept(summary.gate_up_kept);
    return response;
  }
  auto response = std::make_unique<v1::BackwardResponse>();
  response->mutable_end()->set_row_count(summary.row_count);
  response->mutable_end()->set_repeated_row_count(summary.repeated_row_count);
  return response;
}

absl::StatusOr<SessionSpec> FromProto(const v1::OpenSessionRequest& request) {
  SessionSpec spec{.run_id = request.run_id(),
                   .trainer_count = request.trainer_count(),
                   .trainer_rank = request.trainer_rank(),
                   .opening_id = request.opening_id()};
  switch (request.role()) {
    case v1::SESSION_ROLE_TRAIN: spec.role = SessionRole::kTrain; return spec;
    case v1::SESSION_ROLE_READ: spec.role = SessionRole::kRead; return spec;
    default: break;
  }
  return Invalid(
      absl::StrCat("role is ", static_cast<int>(request.role()), ", expected SESSION_ROLE_TRAIN or SESSION_ROLE_READ"));
}

absl::StatusOr<SealSpec> FromProto(const v1::SealStepRequest& request) {
  SealSpec spec{.session_id = request.session_id(), .step = request.step(), .attempt = request.attempt(), .rows = {}};
  for (const v1::LayerRows& layer : request.layers()) {
    if (!spec.rows.emplace(layer.layer(), layer.row_count()).second) {
      return Invalid(absl::StrCat("layer ", layer.layer(), " is named twice"),
                     {{"layer", absl::StrCat(layer.layer())}});
    }
  }
  return spec;
}

absl::StatusOr<CommitSpec> FromProto(const v1::CommitStepRequest& request) {
  CommitSpec spec{.session_id = request.session_id(),
                  .step = request.step(),
                  .attempt = request.attempt(),
                  .groups = {},
                  .gradient_scale = request.gradient_scale(),
                  .fresh_optimizer = request.fresh_optimizer()};
  for (const v1::ParameterGroup& group : request.groups()) {
    SHARDMLP_ASSIGN_OR_RETURN(const Hyperparameters hyperparameters, FromProto(group));
    spec.groups.push_back(
        {.tensors = {group.tensors().begin(), group.tensors().end()}, .hyperparameters = hyperparameters});
  }
  return spec;
}

absl::StatusOr<DiscardSpec> FromProto(const v1::DiscardStepRequest& request) {
  if (static_cast<int64_t>(request.reason().size()) > kMaxReasonBytes) {
    return Invalid(absl::StrCat("reason has ", request.reason().size(), " bytes, at most ", kMaxReasonBytes));
  }
  return DiscardSpec{.session_id = request.session_id(),
                     .step = request.step(),
                     .attempt = request.attempt(),
                     .reason = request.reason()};
}

void Fill(const StepPosition& position, v1::StepPosition& to) {
  to.set_step(position.step);
  to.set_attempt(position.attempt);
  to.set_weights_version(position.weights_version);
}

void Fill(const SessionGrant& grant, v1::OpenSessionResponse& to) {
  to.set_session_id(grant.session_id);
  Fill(grant.lease, *to.mutable_lease());
  Fill(grant.position, *to.mutable_position());
  to.set_run_under_way(grant.run_under_way);
}

void Fill(const SealResult& result, v1::SealStepResponse& to) {
  to.mutable_tensor_sums_of_squares()->Add(result.tensor_sums_of_squares.begin(), result.tensor_sums_of_squares.end());
  to.set_finite(result.finite);
  to.set_non_finite_origin(result.non_finite_origin);
  Fill(result.rows, *to.mutable_layers());
}

void Fill(const CheckpointInfo& checkpoint, v1::CheckpointInfo& to) {
  to.set_name(checkpoint.name);
  to.set_step(checkpoint.step);
  to.set_byte_count(checkpoint.byte_count);
}

void Fill(const DrainSummary& summary, v1::DrainResponse& to) {
  Fill(summary.position, *to.mutable_position());
  if (summary.checkpoint.has_value()) Fill(*summary.checkpoint, *to.mutable_checkpoint());
  to.set_cut_off(summary.cut_off);
  to.set_step_undecided(summary.step_undecided);
}

void Fill(const MetricFamily& family, v1::MetricFamily& to) {
  to.set_name(family.name);
  for (const MetricSeries& from : family.series) {
    v1::MetricSeries& series = *to.add_series();
    for (const auto& [name, value] : from.labels) (*series.mutable_labels())[name] = value;
    series.set_value(from.value);
    for (const MetricBucket& bucket : from.buckets) {
      v1::MetricBucket& counted = *series.mutable_histogram()->add_buckets();
      counted.set_upper_bound(bucket.upper_bound);
      counted.set_cumulative_count(bucket.cumulative_count);
    }
    if (!from.buckets.empty()) series.mutable_histogram()->set_sum(from.sum);
  }
}

void Fill(const Engine& engine, v1::GetModelResponse& to) {
  Fill(engine.model(), *to.mutable_model());
  to.mutable_model()->set_frozen(engine.frozen());
  const EngineLimits limits = engine.limits();
  to.mutable_limits()->set_tile_row_count(limits.tile_row_count);
  to.mutable_limits()->set_max_call_count(limits.max_call_count);
  Fill(engine.position(), *to.mutable_position());
  for (const TrainerStatus& trainer : engine.trainers()) Fill(trainer, *to.add_trainers());
  Fill(engine.memory_plan(), *to.mutable_memory());
  const ReplicaPlace replica = engine.replica();
  to.mutable_replica()->set_rank(replica.rank);
  to.mutable_replica()->set_replica_count(replica.count);
  to.mutable_replica()->set_member_count(replica.member_count);
  to.mutable_replica()->set_generation(replica.generation);
  to.mutable_replica()->mutable_member_ranks()->Add(replica.member_ranks.begin(), replica.member_ranks.end());
}

}  // namespace shardmlp
