#include "tests/kernels/naive_mlp.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace shardmlp::testing {
namespace {

double Logistic(double x) { return 1 / (1 + std::exp(-x)); }

// The constant of the tanh approximation.
double TanhConstant(ActivationKind kind) {
  return kind == ActivationKind::kGeluFast ? 0.7978845608 : std::sqrt(2 / std::numbers::pi);
}

double Unary(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kSilu: return x * Logistic(x);
    case ActivationKind::kGelu: return x * (1 + std::erf(x / std::numbers::sqrt2)) / 2;
    case ActivationKind::kGeluTanh:
    case ActivationKind::kGeluFast: return x * (1 + std::tanh(TanhConstant(kind) * (x + 0.044715 * x * x * x))) / 2;
    case ActivationKind::kClampedSwiglu:
    case ActivationKind::kQuickGelu: return x * Logistic(1.702 * x);
    case ActivationKind::kRelu: return std::max(0.0, x);
    case ActivationKind::kRelu2: return std::max(0.0, x) * std::max(0.0, x);
  }
  return NAN;
}

double UnarySlope(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kSilu: return Logistic(x) * (1 + x * (1 - Logistic(x)));
    case ActivationKind::kGelu:
      return (1 + std::erf(x / std::numbers::sqrt2)) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    case ActivationKind::kGeluTanh:
    case ActivationKind::kGeluFast: {
      const double t = std::tanh(TanhConstant(kind) * (x + 0.044715 * x * x * x));
      return (1 + t) / 2 + x * (1 - t * t) * TanhConstant(kind) * (1 + 3 * 0.044715 * x * x) / 2;
    }
    case ActivationKind::kClampedSwiglu:
    case ActivationKind::kQuickGelu: return Logistic(1.702 * x) * (1 + 1.702 * x * (1 - Logistic(1.702 * x)));
    case ActivationKind::kRelu: return x > 0 ? 1 : 0;
    case ActivationKind::kRelu2: return 2 * std::max(0.0, x);
  }
  return NAN;
}

bool Clamped(const Activation& activation) { return activation.kind == ActivationKind::kClampedSwiglu; }

// [G | U] = X Wgu^T + bgu, [T, 2I] or [T, I].
Dense Linear(const Dense& x, const Dense& weight, const Dense& bias) {
  Dense y(x.rows, weight.rows);
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t n = 0; n < weight.rows; ++n) {
      double sum = bias.rows == 0 ? 0 : bias.at(0, n);
      for (int64_t k = 0; k < x.cols; ++k) sum += x.at(t, k) * weight.at(n, k);
      y.at(t, n) = sum;
    }
  }
  return y;
}

// A [T, I] of [G | U].
Dense Inner(const NaiveMlp& mlp, const Dense& gate_up) {
  const int64_t inner = mlp.down.cols;
  Dense a(gate_up.rows, inner);
  for (int64_t t = 0; t < gate_up.rows; ++t) {
    for (int64_t i = 0; i < inner; ++i) {
      const double u = gate_up.at(t, mlp.activation.gated ? inner + i : i);
      a.at(t, i) = NaiveActivation(mlp.activation, gate_up.at(t, i), u);
    }
  }
  return a;
}

// Of y = x W^T + b, given dy: dx, dW and db, the last where there is a bias.
void LinearBackward(const Dense& x, const Dense& weight, const Dense& bias, const Dense& dy, Dense& dx, Dense& dweight,
                    Dense& dbias) {
  dx = Dense(x.rows, x.cols);
  dweight = Dense(weight.rows, weight.cols);
  dbias = Dense(bias.rows, bias.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t n = 0; n < weight.rows; ++n) {
      if (bias.rows != 0) dbias.at(0, n) += dy.at(t, n);
      for (int64_t k = 0; k < x.cols; ++k) {
        dx.at(t, k) += dy.at(t, n) * weight.at(n, k);
        dweight.at(n, k) += dy.at(t, n) * x.at(t, k);
      }
    }
  }
}

}  // namespace

double NaiveActivation(const Activation& activation, double g, double u) {
  if (!activation.gated) return Unary(activation.kind, u);
  if (!Clamped(activation)) return Unary(activation.kind, g) * u;
  const double limit = activation.limit;
  return (std::clamp(u, -limit, limit) + 1) * Unary(activation.kind, std::min(g, limit));
}

double NaiveGateSlope(const Activation& activation, double g, double u) {
  if (!activation.gated) return 0;
  if (!Clamped(activation)) return UnarySlope(activation.kind, g) * u;
  const double limit = activation.limit;
  return g > limit ? 0 : (std::clamp(u, -limit, limit) + 1) * UnarySlope(activation.kind, g);
}

double NaiveUpSlope(const Activation& activation, double g, double u) {
  if (!activation.gated) return UnarySlope(activation.kind, u);
  if (!Clamped(activation)) return Unary(activation.kind, g);
  const double limit = activation.limit;
  return std::abs(u) > limit ? 0 : Unary(activation.kind, std::min(g, limit));
}

Dense NaiveForward(const NaiveMlp& mlp, const Dense& x) {
  return Linear(Inner(mlp, Linear(x, mlp.gate_up, mlp.gate_up_bias)), mlp.down, mlp.down_bias);
}

NaiveGradients NaiveBackward(const NaiveMlp& mlp, const Dense& x, const Dense& dy) {
  NaiveGradients gradients;
  const Dense gate_up = Linear(x, mlp.gate_up, mlp.gate_up_bias);  // [T, 2I]
  const int64_t inner = mlp.down.cols;
  Dense da;  // [T, I]
  LinearBackward(Inner(mlp, gate_up), mlp.down, mlp.down_bias, dy, da, gradients.down, gradients.down_bias);
  Dense dgate_up(gate_up.rows, gate_up.cols);  // [T, 2I]
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t i = 0; i < inner; ++i) {
      const int64_t up = mlp.activation.gated ? inner + i : i;
      const double g = gate_up.at(t, i);
      const double u = gate_up.at(t, up);
      dgate_up.at(t, i) = da.at(t, i) * NaiveGateSlope(mlp.activation, g, u);
      dgate_up.at(t, up) = da.at(t, i) * NaiveUpSlope(mlp.activation, g, u);
    }
  }
  LinearBackward(x, mlp.gate_up, mlp.gate_up_bias, dgate_up, gradients.dx, gradients.gate_up, gradients.gate_up_bias);
  return gradients;
}

}  // namespace shardmlp::testing
