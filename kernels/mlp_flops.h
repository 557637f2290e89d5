// Floating-point operations of a layer's matrix products, which are nearly all of its arithmetic.
#pragma once

#include "kernels/mlp.h"

namespace shardmlp {

// Of one row: 2 * in * out for each product. Gated, with O = H and I intermediate, that is 6 H I forward, 12 H I
// backward and 4 H I of recompute: 3, 6 and 2 products of 2 H I.
class MlpFlops {
 public:
  explicit MlpFlops(const MlpConfig& mlp)
      : gate_up_(2.0 * static_cast<double>(mlp.hidden_size) * static_cast<double>(mlp.gate_up_size())),
        down_(2.0 * static_cast<double>(mlp.intermediate_size) * static_cast<double>(mlp.output_size)) {}

  // [G | U], and Y.
  double forward() const { return gate_up_ + down_; }
  // dA always; dX and the weight gradients where they are asked for.
  double Backward(bool input_gradient, bool weight_gradient) const {
    return down_ + (input_gradient ? gate_up_ : 0) + (weight_gradient ? gate_up_ + down_ : 0);
  }
  // [G | U] again, in a backward whose forward did not keep them.
  double recompute() const { return gate_up_; }

 private:
  double gate_up_;
  double down_;
};

}  // namespace shardmlp
