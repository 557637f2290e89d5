#include "client/cli/layer_cost.h"

#include "kernels/mlp_flops.h"

namespace shardmlp {

CallCost CostOf(const ClientLayer& layer, CallKind kind, int64_t rows, DType dtype, const CostOptions& options) {
  MlpConfig mlp;
  mlp.hidden_size = layer.hidden_size;
  mlp.intermediate_size = layer.intermediate_size;
  mlp.output_size = layer.output_size;
  mlp.activation.gated = layer.gated;
  const MlpFlops flops(mlp);
  const auto tokens = static_cast<double>(rows);
  const int64_t x_bytes = rows * layer.hidden_size * SizeOf(dtype);
  const int64_t y_bytes = rows * layer.output_size * SizeOf(dtype);
  if (kind == CallKind::kForward) return {rows, tokens * flops.forward(), x_bytes, y_bytes};
  const double backward =
      flops.Backward(/*input_gradient=*/true, options.weight_gradient) + (options.gate_up_kept ? 0 : flops.recompute());
  return {rows, tokens * backward, y_bytes + (options.x_kept ? 0 : x_bytes), x_bytes};
}

}  // namespace shardmlp
