// The parameters of the served layers on the device: weights, gradient sums, master weights, optimizer state.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/mlp.h"
#include "kernels/optimizer.h"
#include "server/engine/layer_tensors.h"
#include "server/model/checkpoint.h"
#include "server/model/model_folder.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// For the device thread alone, but for weights(), gradients(), all_gradients() and state(), whose views are constant
// after construction.
// Everything that reads or writes a tensor "as the file has it" is in its Hugging Face shape, row-major.
class Parameters {
 public:
  // Allocates, and loads the weights. `backend` and `model` must outlive this.
  static absl::StatusOr<std::unique_ptr<Parameters>> Create(Backend& backend, const ModelSpec& model, bool frozen,
                                                            const ModelFolder& folder);

  ConstMlpTensors weights(size_t layer) const;
  // Null where frozen.
  const MlpTensors* gradients(size_t layer) const;
  // Every gradient matrix, for the replicas to sum.
  std::vector<MatrixView> all_gradients() const;

  absl::Status ClearGradients();
  // In ModelSpec::tensors' order.
  absl::StatusOr<std::vector<double>> GradientSquares();
  // FAILED_PRECONDITION (OPTIMIZER_MISMATCH) naming a tensor whose moments are another optimizer's than it is to get.
  absl::Status CheckOptimizer(absl::Span<const Hyperparameters> hyperparameters) const;
  // As if no update had been.
  absl::Status ResetOptimizer();
  // `hyperparameters`: one a tensor, in ModelSpec::tensors' order; checked by CheckOptimizer.
  absl::Status Apply(absl::Span<const Hyperparameters> hyperparameters, double gradient_scale);

  // Rows [row_begin, row_begin + row_count) of a tensor's weights as the file has it, into `to`, which they fill.
  absl::Status ReadRows(const TensorSpec& tensor, int64_t row_begin, int64_t row_count, absl::Span<char> to);

  // What a checkpoint holds; its tensors read from here, so it must be written before the next Apply.
  CheckpointState Snapshot(int64_t step);
  // FAILED_PRECONDITION (CHECKPOINT_MISMATCH) unless the checkpoint has all that Restore reads.
  absl::Status CheckRestorable(const Checkpoint& checkpoint);
  // The weights, and the optimizer's state where not frozen. A failure leaves a part of them as they were.
  absl::Status Restore(const Checkpoint& checkpoint);

  // What replicas have in common between steps: every matrix of weights, masters and moments, in one order on all of
  // them, and the update histories.
  std::vector<MatrixView> state() const;
  const std::vector<UpdateHistory>& updates() const { return updates_; }
  void set_updates(std::vector<UpdateHistory> updates) { updates_ = std::move(updates); }
  // XXH3-64 of a layer's weights, or of all that state() has of it. Where memory is unified any thread may ask, as long
  // as none changes them.
  absl::StatusOr<uint64_t> LayerChecksum(size_t layer, bool with_optimizer);

 private:
  struct Layer {
    LayerTensors weights;
    LayerTensors gradients;  // empty where frozen, as the rest
    LayerTensors master;     // empty where the weights are their own
    LayerTensors moment1;
    LayerTensors moment2;
  };

  Parameters(Backend& backend, const ModelSpec& model, bool frozen)
      : backend_(backend), model_(model), frozen_(frozen), updates_(model.tensors.size()) {}

  static std::vector<MatrixView> StateOf(const Layer& layer);
  absl::Status AllocateLayers();
  // Waits for what was enqueued on Stream::kCompute.
  absl::Status Drain();
  Layer& LayerOf(const TensorSpec& tensor);
  // The masters: what the optimizer updates. The weights themselves where they are f32 or f64.
  MlpTensors& MastersOf(Layer& layer);
  // Rounds the masters of `tensor` into its weights; does nothing where they are one.
  absl::Status RoundWeights(const TensorSpec& tensor);

  // Between a device view in storage orientation and host bytes as the file has them. `dtype` of the host bytes.
  absl::Status ReadView(const TensorSpec& tensor, ConstMatrixView view, int64_t row_begin, int64_t row_count,
                        absl::Span<char> to);
  absl::Status WriteView(const TensorSpec& tensor, MatrixView view, absl::Span<const char> from);
  CheckpointTensor Saved(const TensorSpec& tensor, const std::string& suffix, const MlpTensors& tensors);
  // What Restore reads, and where to.
  struct Restored {
    const TensorSpec* tensor;
    std::string name;  // in the checkpoint
    MatrixView view;
  };
  std::vector<Restored> RestoredTensors();

  Backend& backend_;
  const ModelSpec& model_;
  const bool frozen_;
  std::vector<Layer> layers_;           // ModelSpec::layers' order
  std::vector<UpdateHistory> updates_;  // ModelSpec::tensors' order
  Buffer squares_;                      // staging, [tensors] f64
};

}  // namespace shardmlp
