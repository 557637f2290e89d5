#include "server/engine/parameters.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
absl::StatusOr<std::unique_ptr<Parameters>> Parameters::Create(Backend& backend, const ModelSpec& model, bool frozen,
                                                               const ModelFolder& folder) {
  std::unique_ptr<Parameters> parameters(new Parameters(backend, model, frozen));
  SHARDMLP_RETURN_IF_ERROR(parameters->AllocateLayers());
  for (const TensorSpec& tensor : model.tensors) {
    const MatrixView masters = ViewOf(tensor, parameters->MastersOf(parameters->LayerOf(tensor)));
    SHARDMLP_ASSIGN_OR_RETURN(const Buffer host, backend.Allocate(Memory::kStaging, masters.byte_count()));
    const MatrixView read = host.View(masters.rows, masters.cols, masters.dtype);
    SHARDMLP_RETURN_IF_ERROR(folder.Read(tensor, read));
    SHARDMLP_RETURN_IF_ERROR(backend.Copy(Stream::kCompute, read, masters));
    SHARDMLP_RETURN_IF_ERROR(parameters->RoundWeights(tensor));
    SHARDMLP_RETURN_IF_ERROR(parameters->Drain());
  }
  if (frozen) return parameters;
  SHARDMLP_RETURN_IF_ERROR(parameters->ClearGradients());
  SHARDMLP_RETURN_IF_ERROR(parameters->ResetOptimizer());
  return parameters;
}

absl::Status Parameters::Drain() {
  SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Event> event, backend_.Record(Stream::kCompute));
  return backend_.Synchronize(*event);
}

absl::Status Parameters::AllocateLayers() {
  const DType accumulator = AccumulatorOf(model_.dtype);
  for (const LayerSpec& spec : model_.layers) {
    Layer& layer = layers_.emplace_back();
    SHARDMLP_ASSIGN_OR_RETURN(layer.weights, LayerTensors::Allocate(backend_, spec.mlp, model_.dtype));
    if (frozen_) continue;
    SHARDMLP_ASSIGN_OR_RETURN(layer.gradients, LayerTensors::Allocate(backend_, spec.mlp, accumulator));
    if (accumulator != model_.dtype) {
      SHARDMLP_ASSIGN_OR_RETURN(layer.master, LayerTensors::Allocate(backend_, spec.mlp, accumulator));
    }
    SHARDMLP_ASSIGN_OR_RETURN(layer.moment1, LayerTensors::Allocate(backend_, spec.mlp, accumulator));
    SHARDMLP_ASSIGN_OR_RETURN(layer.moment2, LayerTensors::Allocate(backend_, spec.mlp, accumulator));
  }
  SHARDMLP_ASSIGN_OR_RETURN(squares_, backend_.Allocate(Memory::kStaging, model_.tensors.size() * sizeof(double)));
  return Drain();
}

Parameters::Layer& Parameters::LayerOf(const TensorSpec& tensor) {
  const auto layer = std::find_if(model_.layers.begin(), model_.layers.end(),
                                  [&tensor](const LayerSpec& spec) { return spec.layer == tensor.layer; });
  return layers_[layer - model_.layers.begin()];
}

MlpTensors& Parameters::MastersOf(Layer& layer) {
  return layer.master.buffer.data() == nullptr ? layer.weights.views : layer.master.views;
}

absl::Status Parameters::RoundWeights(const TensorSpec& tensor) {
  Layer& layer = LayerOf(tensor);
  if (layer.master.buffer.data() == nullptr) return absl::OkStatus();
  return backend_.Copy(Stream::kCompute, ViewOf(tensor, layer.master.views), ViewOf(tensor, layer.weights.views));
}

ConstMlpTensors Parameters::weights(size_t layer) const {
  const MlpTensors& views = layers_[layer].weights.views;
  return {views.gate_up, views.gate_up_bias, views.down, views.down_bias};
}

const MlpTensors* Parameters::gradients(size_t layer) const {
  return frozen_ ? nullptr : &layers_[layer].gradients.views;
}

std::vector<MatrixView> Parameters::all_gradients() const {
  std::vector<MatrixView> gradients;
  for (const Layer& layer : layers_) {
    for (const MatrixView& view : layer.gradients.matrices()) gradients.push_back(view);
  }
  return gradients;
}

absl::Status Parameters::ClearGradients() {
  for (const MatrixView& gradient : all_gradients()) {
    SHARDMLP_RETURN_IF_ERROR(backend_.Zero(Stream::kCompute, gradient));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> Parameters::GradientSquares() {
  double* squares = static_cast<double*>(squares_.data());
  for (size_t i = 0; i < model_.tensors.size(); ++i) {
    const TensorSpec& tensor = model_.tensors[i];
    const MatrixView gradient = ViewOf(tensor, LayerOf(tensor).gradients.views);
    SHARDMLP_RETURN_IF_ERROR(backend_.SumOfSquares(gradient, squares + i));
  }
  SHARDMLP_RETURN_IF_ERROR(Drain());
  return std::vector<double>(squares, squares + model_.tensors.size());
}

absl::Status Parameters::CheckOptimizer(absl::Span<const Hyperparameters> hyperparameters) const {
  for (size_t i = 0; i < model_.tensors.size(); ++i) {
    const absl::string_view optimizer = Name(hyperparameters[i]);
    const UpdateHistory& updates = updates_[i];
    if (optimizer.empty() || updates.count == 0 || updates.optimizer == optimizer) continue;
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kOptimizerMismatch,
                 absl::StrCat(model_.tensors[i].name, " has the moments of ", updates.count, " updates by ",
                              updates.optimizer, ", got ", optimizer, ": go on with that one, or start afresh"));
  }
  return absl::OkStatus();
}

absl::Status Parameters::ResetOptimizer() {
  for (const Layer& layer : layers_) {
    for (const LayerTensors* moments : {&layer.moment1, &layer.moment2}) {
      for (const MatrixView& view : moments->matrices()) {
        SHARDMLP_RETURN_IF_ERROR(backend_.Zero(Stream::kCompute, view));
      }
    }
  }
  updates_.assign(model_.tensors.size(), {});
  return Drain();
}

absl::Status Parameters::Apply(absl::Span<const Hyperparameters> hyperparameters, double gradient_scale) {
  for (size_t i = 0; i < model_.tensors.size(); ++i) {
    if (std::holds_alternative<KeepFrozen>(hyperparameters[i])) continue;
    const TensorSpec& tensor = model_.tensors[i];
    Layer& layer = LayerOf(tensor);
    OptimizerUpdate update;
    update.hyperparameters = hyperparameters[i];
    updates_[i] = {updates_[i].count + 1, std::string(Name(hyperparameters[i]))};
    update.update_count = updates_[i].count;
    update.gradient_scale = gradient_scale;
    update.gradient = ViewOf(tensor, layer.gradients.views);
    update.master = ViewOf(tensor, MastersOf(layer));
    update.moment1 = ViewOf(tensor, layer.moment1.views);
    if (std::holds_alternative<AdamW>(hyperparameters[i])) update.moment2 = ViewOf(tensor, layer.moment2.views);
    if (layer.master.buffer.data() != nullptr) update.weights = ViewOf(tensor, layer.weights.views);
    SHARDMLP_RETURN_IF_ERROR(backend_.Update(update));
  }
  SHARDMLP_RETURN_IF_ERROR(ClearGradients());
  return Drain();
}

}  // namespace shardmlp
