#include "tests/engine/tiny_model.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/engine/bytes.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

template <typename Tensors>
auto& SlotOf(const TensorSpec& tensor, Tensors& layer) {
  switch (tensor.slot) {
    case TensorSlot::kGateUp: return layer.gate_up;
    case TensorSlot::kGateUpBias: return layer.gate_up_bias;
    case TensorSlot::kDown: return layer.down;
    case TensorSlot::kDownBias: break;
  }
  return layer.down_bias;
}

bool IsBias(const TensorSpec& tensor) {
  return tensor.slot == TensorSlot::kGateUpBias || tensor.slot == TensorSlot::kDownBias;
}

// Calls f(element of the file, row and column in the slot) for each element, in the file's order.
template <typename F>
void ForEachElement(const TensorSpec& tensor, const F& f) {
  const int64_t file_rows = tensor.shape.size() == 1 ? 1 : tensor.shape[0];
  const int64_t file_cols = tensor.shape.back();
  for (int64_t r = 0; r < file_rows; ++r) {
    for (int64_t c = 0; c < file_cols; ++c) {
      if (IsBias(tensor)) {
        f(r, c, int64_t{0}, tensor.output_begin + c);
      } else if (tensor.transposed) {
        f(r, c, tensor.output_begin + c, r);
      } else {
        f(r, c, tensor.output_begin + r, c);
      }
    }
  }
}

int LayerOf(const TensorSpec& tensor) { return (tensor.layer - LayerIndex(0)) / 3; }

}  // namespace

MlpConfig OddMlp(DType dtype) {
  MlpConfig mlp;
  mlp.hidden_size = 13;
  mlp.intermediate_size = 37;
  mlp.output_size = 7;
  mlp.gate_up_bias = mlp.down_bias = true;
  mlp.dtype = dtype;
  return mlp;
}

MlpConfig PlainMlp(DType dtype) {
  MlpConfig mlp;
  mlp.hidden_size = mlp.output_size = 16;
  mlp.intermediate_size = 24;
  mlp.dtype = dtype;
  return mlp;
}

MlpConfig UngatedMlp(DType dtype) {
  MlpConfig mlp = OddMlp(dtype);
  mlp.activation = {.kind = ActivationKind::kGeluTanh, .gated = false};
  return mlp;
}

TinyModel::TinyModel(const std::vector<MlpConfig>& layers) {
  const auto cpu = MakeCpuBackend({.threads = 1}).value();
  spec_.model_type = "tiny";
  spec_.dtype = layers.front().dtype;
  for (size_t n = 0; n < layers.size(); ++n) {
    spec_.layers.push_back({LayerIndex(n), absl::StrCat("layers.", LayerIndex(n), ".mlp"), layers[n]});
    layers_.push_back(RandomMlp(*cpu, layers[n], n + 1));
    AddTensors(spec_.layers.back());
  }
}

void TinyModel::AddTensors(const LayerSpec& layer) {
  const MlpConfig& mlp = layer.mlp;
  const bool transposed = !mlp.activation.gated;
  const auto add = [&](absl::string_view name, TensorSlot slot, int64_t begin, int64_t out, int64_t in) {
    TensorSpec tensor{absl::StrCat(layer.module, ".", name), layer.layer, {out}, slot, begin, out, false};
    if (in > 0) {
      tensor.shape = transposed ? std::vector{in, out} : std::vector{out, in};
      tensor.transposed = transposed;
    }
    spec_.tensors.push_back(tensor);
  };
  const auto linear = [&](absl::string_view name, TensorSlot slot, TensorSlot bias_slot, int64_t begin, int64_t out,
                          int64_t in, bool bias) {
    add(absl::StrCat(name, ".weight"), slot, begin, out, in);
    if (bias) add(absl::StrCat(name, ".bias"), bias_slot, begin, out, 0);
  };
  const int64_t inner = mlp.intermediate_size;
  if (mlp.activation.gated) {
    linear("gate", TensorSlot::kGateUp, TensorSlot::kGateUpBias, 0, inner, mlp.hidden_size, mlp.gate_up_bias);
  }
  linear("up", TensorSlot::kGateUp, TensorSlot::kGateUpBias, mlp.activation.gated ? inner : 0, inner, mlp.hidden_size,
         mlp.gate_up_bias);
  linear("down", TensorSlot::kDown, TensorSlot::kDownBias, 0, mlp.output_size, inner, mlp.down_bias);
}

absl::Status TinyModel::Read(const TensorSpec& tensor, MatrixView to) const {
  const Dense& slot = SlotOf(tensor, layers_[LayerOf(tensor)]);
  Dense part(to.rows, to.cols);  // the slot's rows, or columns of a bias
  for (int64_t r = 0; r < part.rows; ++r) {
    for (int64_t c = 0; c < part.cols; ++c) {
      part.at(r, c) = IsBias(tensor) ? slot.at(r, tensor.output_begin + c) : slot.at(tensor.output_begin + r, c);
    }
  }
  EXPECT_TRUE(to.contiguous());
  const std::string bytes = Encode(part, to.dtype);
  std::memcpy(to.data, bytes.data(), bytes.size());
  return absl::OkStatus();
}

template <typename Tensors>
Dense PartOf(const TensorSpec& tensor, const Tensors& layer) {
  const Dense& slot = SlotOf(tensor, layer);
  Dense part(tensor.shape.size() == 1 ? 1 : tensor.shape[0], tensor.shape.back());
  ForEachElement(tensor, [&](int64_t r, int64_t c, int64_t slot_row, int64_t slot_col) {
    part.at(r, c) = slot.at(slot_row, slot_col);
  });
  return part;
}
template Dense PartOf(const TensorSpec&, const NaiveMlp&);
template Dense PartOf(const TensorSpec&, const NaiveGradients&);

void SetPart(const TensorSpec& tensor, const Dense& values, NaiveMlp& layer) {
  Dense& slot = SlotOf(tensor, layer);
  ForEachElement(tensor, [&](int64_t r, int64_t c, int64_t slot_row, int64_t slot_col) {
    slot.at(slot_row, slot_col) = values.at(r, c);
  });
}

std::vector<double> Squares(const ModelSpec& model, const std::vector<NaiveGradients>& layers) {
  std::vector<double> squares;
  for (const TensorSpec& tensor : model.tensors) {
    double sum = 0;
    for (const double value : PartOf(tensor, layers[LayerOf(tensor)]).values) sum += value * value;
    squares.push_back(sum);
  }
  return squares;
}

}  // namespace shardmlp::testing
