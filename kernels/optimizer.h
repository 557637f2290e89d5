// AdamW and SGD, as torch.optim defines them (without amsgrad and foreach's reordering), on fp32 master weights.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/matrix.h"

namespace shardmlp {

// torch.optim.AdamW: w -= lr * weight_decay * w; m, v moments; w -= lr * m_hat / (sqrt(v_hat) + epsilon).
struct AdamW {
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  friend bool operator==(const AdamW&, const AdamW&) = default;
};

// torch.optim.SGD: g += weight_decay * w; b = momentum * b + (1 - dampening) * g (b = g at the first update);
// w -= lr * (nesterov ? g + momentum * b : b). Without momentum b is not used.
struct Sgd {
  double learning_rate = 0;
  double momentum = 0;
  double dampening = 0;  // any finite number
  double weight_decay = 0;
  bool nesterov = false;
  friend bool operator==(const Sgd&, const Sgd&) = default;
};

// No update in this step.
struct KeepFrozen {
  friend bool operator==(const KeepFrozen&, const KeepFrozen&) = default;
};

using Hyperparameters = std::variant<AdamW, Sgd, KeepFrozen>;

// INVALID_ARGUMENT naming the hyperparameter, its value and its range.
absl::Status Validate(const Hyperparameters& hyperparameters);

// "adamw", "sgd", or "" for KeepFrozen.
absl::string_view Name(const Hyperparameters& hyperparameters);

// "adamw(learning_rate 0.001, ...)", for messages.
std::string Describe(const Hyperparameters& hyperparameters);

// One tensor's update. All matrices have one shape. `gradient`, `master`, `moment1` and `moment2` are in the
// accumulator dtype; `weights` is in the model's, and is master rounded to it.
struct OptimizerUpdate {
  Hyperparameters hyperparameters;
  int64_t update_count = 1;   // this update's number for this tensor, from 1: Adam's bias correction, SGD's first b
  double gradient_scale = 1;  // multiplied into the gradient
  ConstMatrixView gradient;
  MatrixView master;   // read and written; the weights themselves where they are f32 or f64
  MatrixView moment1;  // AdamW's m, or SGD's momentum buffer b; read and written
  MatrixView moment2;  // AdamW's v; read and written. Empty for SGD
  MatrixView weights;  // written; empty where master is the weights
};

}  // namespace shardmlp
