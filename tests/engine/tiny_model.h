// Small models in memory, whose weights the naive twin has too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/model/model_folder.h"
#include "tests/kernels/naive_mlp.h"

namespace shardmlp::testing {

// H 13, I 37, O 7, gated, biases.
MlpConfig OddMlp(DType dtype = DType::kF64);
// H = O = 16, I 24, gated, no biases, as Llama's.
MlpConfig PlainMlp(DType dtype = DType::kF64);
// H 13, I 37, O 7, ungated, biases, as GPT-2's; its weights lie in the file as [in, out].
MlpConfig UngatedMlp(DType dtype = DType::kF64);

// The index in the model of the n-th layer that is served: 10, 13, 16, ...
constexpr int LayerIndex(size_t n) { return 10 + 3 * static_cast<int>(n); }

// Random weights, the same for the same layers. Gate and up are tensors of their own where gated.
class TinyModel final : public ModelFolder {
 public:
  explicit TinyModel(const std::vector<MlpConfig>& layers);

  const ModelSpec& spec() const override { return spec_; }
  absl::Status Read(const TensorSpec& tensor, MatrixView to) const override;

  const std::vector<NaiveMlp>& layers() const { return layers_; }

 private:
  void AddTensors(const LayerSpec& layer);
  ModelSpec spec_;
  std::vector<NaiveMlp> layers_;  // by n
};

// The part of a layer's tensors that `tensor` is, as the file has it. `Tensors`: NaiveMlp or NaiveGradients.
template <typename Tensors>
Dense PartOf(const TensorSpec& tensor, const Tensors& layer);
// The same, to be written.
void SetPart(const TensorSpec& tensor, const Dense& values, NaiveMlp& layer);

// Sums of squares of the gradients of all layers, in ModelSpec::tensors' order.
std::vector<double> Squares(const ModelSpec& model, const std::vector<NaiveGradients>& layers);

}  // namespace shardmlp::testing
