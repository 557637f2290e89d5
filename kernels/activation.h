// Activation functions of MLPs, exactly as transformers computes them: one definition for host and device.
//
// Each is given by its name and, for the clamped kind, a limit. The formulas themselves (A, dA/dg, dA/du from g and u)
// are templates over the element type that both the CPU's and the GPU's elementwise loops instantiate.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

enum class ActivationKind : uint8_t {
  kSilu,        // x s(x), s the logistic function
  kGelu,        // x Phi(x), by erf
  kGeluTanh,    // the tanh approximation, constant sqrt(2/pi)
  kGeluFast,    // the same with the constant rounded to 0.7978845608
  kQuickGelu,   // x s(1.702 x)
  kRelu,        // max(0, x)
  kRelu2,       // max(0, x)^2
  kClampedSwiglu,  // gpt-oss: (clamp(u, -L, L) + 1) * g' s(1.702 g'), g' = min(g, L); always gated
};

struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  bool gated = true;
  double limit = 7.0;  // L of kClampedSwiglu alone
};

// Canonical: "silu", "gelu", "gelu_tanh", "gelu_fast", "quick_gelu", "relu", "relu2", "clamped_swiglu".
absl::string_view Name(ActivationKind kind);
// Takes every value that a Hugging Face config uses ("swish", "gelu_new", "gelu_pytorch_tanh", ...). UNIMPLEMENTED,
// naming the value, for any other.
absl::StatusOr<ActivationKind> ActivationFromConfig(absl::string_view value);

}  // namespace shardmlp
