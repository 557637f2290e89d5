// What a server serves: layers, their MLPs, and where each Hugging Face tensor lives in them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/matrix.h"
#include "kernels/mlp.h"

namespace shardmlp {

// What a tensor's optimizer state comes from.
struct UpdateHistory {
  int64_t count = 0;
  // Whose moments they are: "adamw" or "sgd", as Name(Hyperparameters) says; "" for no update yet.
  std::string optimizer;
  friend bool operator==(const UpdateHistory&, const UpdateHistory&) = default;
};

// Which of a layer's four tensors (MlpTensors) a Hugging Face tensor is part of.
enum class TensorSlot { kGateUp, kGateUpBias, kDown, kDownBias };

// A tensor of the Hugging Face files, and its place. A layer stores [out, in]; a file may hold [in, out] (Conv1D).
struct TensorSpec {
  std::string name;            // "model.layers.0.mlp.gate_proj.weight"
  int layer = 0;               // index in the model
  std::vector<int64_t> shape;  // as in the file: one or two dimensions
  TensorSlot slot = TensorSlot::kGateUp;
  int64_t output_begin = 0;  // first output feature: a row of a weight slot, a column of a bias slot
  int64_t output_count = 0;
  bool transposed = false;  // the file holds [in, out]

  int64_t element_count() const { return shape.size() == 1 ? shape[0] : shape[0] * shape[1]; }
};

struct LayerSpec {
  int layer = 0;       // index in the model
  std::string module;  // that X is given to: "model.layers.0.mlp"
  MlpConfig mlp;
};

struct ModelSpec {
  std::string model_type;           // "llama"
  DType dtype = DType::kF32;        // that weights are served in
  std::vector<LayerSpec> layers;    // ascending
  std::vector<TensorSpec> tensors;  // layer by layer; every parameter of `layers`, once

  // Null where the layer is not served.
  const LayerSpec* FindLayer(int layer) const;
};

// The part of a layer's tensors that `tensor` names: [output_count, in] of a weight slot, [1, output_count] of a bias.
MatrixView ViewOf(const TensorSpec& tensor, const MlpTensors& layer);
ConstMatrixView ViewOf(const TensorSpec& tensor, const ConstMlpTensors& layer);

}  // namespace shardmlp
