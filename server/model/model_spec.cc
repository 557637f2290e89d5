#include "server/model/model_spec.h"

#include <algorithm>

namespace shardmlp {
namespace {

template <typename View>
View ViewIn(const TensorSpec& tensor, const BasicMlpTensors<View>& layer) {
  switch (tensor.slot) {
    case TensorSlot::kGateUp: return layer.gate_up.Rows(tensor.output_begin, tensor.output_count);
    case TensorSlot::kGateUpBias: return layer.gate_up_bias.Cols(tensor.output_begin, tensor.output_count);
    case TensorSlot::kDown: return layer.down.Rows(tensor.output_begin, tensor.output_count);
    case TensorSlot::kDownBias: return layer.down_bias.Cols(tensor.output_begin, tensor.output_count);
  }
  return {};
}

}  // namespace

const LayerSpec* ModelSpec::FindLayer(int layer) const {
  const auto found = std::lower_bound(layers.begin(), layers.end(), layer,
                                      [](const LayerSpec& candidate, int wanted) { return candidate.layer < wanted; });
  return found == layers.end() || found->layer != layer ? nullptr : &*found;
}

MatrixView ViewOf(const TensorSpec& tensor, const MlpTensors& layer) { return ViewIn(tensor, layer); }
ConstMatrixView ViewOf(const TensorSpec& tensor, const ConstMlpTensors& layer) { return ViewIn(tensor, layer); }

}  // namespace shardmlp
