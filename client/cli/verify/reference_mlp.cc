#include "client/cli/verify/reference_mlp.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using Activated = ReferenceMlp::Activated;

// x / (1 + e^-p), where `p` depends on x with slope `p_slope`.
Activated TimesLogistic(double x, double p, double p_slope) {
  const double s = 1 / (1 + std::exp(-p));
  return {x * s, s + x * s * (1 - s) * p_slope};
}

// x (1 + tanh(c (x + 0.044715 x^3))) / 2
Activated TanhGelu(double x, double c) {
  const double t = std::tanh(c * (x + 0.044715 * x * x * x));
  return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x) / 2};
}

Activated Silu(double x) { return TimesLogistic(x, x, 1); }
Activated QuickGelu(double x) { return TimesLogistic(x, 1.702 * x, 1.702); }
Activated GeluTanh(double x) { return TanhGelu(x, std::sqrt(2 / M_PI)); }
Activated GeluFast(double x) { return TanhGelu(x, 0.7978845608); }
Activated Gelu(double x) {
  const double cdf = std::erfc(-x / std::sqrt(2.0)) / 2;
  return {x * cdf, cdf + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI)};
}
Activated Relu(double x) { return {std::max(x, 0.0), x > 0 ? 1.0 : 0.0}; }
Activated Relu2(double x) { return {x > 0 ? x * x : 0.0, 2 * std::max(x, 0.0)}; }

double Dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// to += factor * from
void AddScaled(double factor, const double* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

// One intermediate feature of one token.
struct Inner {
  double a;      // A
  double da_dg;  // 0 where ungated
  double da_du;
};

// A clamp has slope 1 up to its limit, and 0 beyond.
Inner ComputeClamped(const ReferenceMlp& mlp, double g, double u) {
  const double limit = *mlp.limit;
  const double last = limit + mlp.limit_rounding;
  const Activated act = mlp.activation(std::min(g, limit));
  const double up = std::clamp(u, -limit, limit) + 1;
  return {act.value * up, g <= last ? act.slope * up : 0, std::abs(u) <= last ? act.value : 0};
}

Inner ComputeInner(const ReferenceMlp& mlp, const double* x, int64_t i) {
  const int64_t hidden = mlp.hidden_size;
  const double u = mlp.up_bias[i] + Dot(x, &mlp.up[i * hidden], hidden);
  if (!mlp.gated) {
    const Activated act = mlp.activation(u);
    return {act.value, 0, act.slope};
  }
  const double g = mlp.gate_bias[i] + Dot(x, &mlp.gate[i * hidden], hidden);
  if (mlp.limit) return ComputeClamped(mlp, g, u);
  const Activated act = mlp.activation(g);
  return {act.value * u, act.slope * u, act.value};
}

}  // namespace

absl::StatusOr<Activated (*)(double)> FindActivation(absl::string_view name) {
  constexpr std::pair<absl::string_view, Activated (*)(double)> kActivations[] = {{"silu", Silu},
                                                                                  {"gelu", Gelu},
                                                                                  {"gelu_tanh", GeluTanh},
                                                                                  {"gelu_fast", GeluFast},
                                                                                  {"quick_gelu", QuickGelu},
                                                                                  {"relu", Relu},
                                                                                  {"relu2", Relu2},
                                                                                  {"clamped_swiglu", QuickGelu}};
  for (const auto& [known, activation] : kActivations) {
    if (known == name) return activation;
  }
  return Error(absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel,
               absl::StrCat("no reference for the activation ", name));
}

Values ReferenceForward(const ReferenceMlp& mlp, const Values& x) {
  const auto tokens = static_cast<int64_t>(x.size()) / mlp.hidden_size;
  Values y;
  y.reserve(tokens * mlp.output_size);
  Values a(mlp.intermediate_size);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < mlp.intermediate_size; ++i) a[i] = ComputeInner(mlp, &x[t * mlp.hidden_size], i).a;
    for (int64_t o = 0; o < mlp.output_size; ++o) {
      y.push_back(mlp.down_bias[o] + Dot(a.data(), &mlp.down[o * mlp.intermediate_size], mlp.intermediate_size));
    }
  }
  return y;
}

Values ReferenceBackward(const ReferenceMlp& mlp, const Values& x, const Values& dy) {
  const int64_t hidden = mlp.hidden_size;
  const auto tokens = static_cast<int64_t>(x.size()) / hidden;
  Values dx(x.size());
  for (int64_t t = 0; t < tokens; ++t) {
    Values da(mlp.intermediate_size);  // dA = dY Wd
    for (int64_t o = 0; o < mlp.output_size; ++o) {
      AddScaled(dy[t * mlp.output_size + o], &mlp.down[o * mlp.intermediate_size], mlp.intermediate_size, da.data());
    }
    double* const to = &dx[t * hidden];
    for (int64_t i = 0; i < mlp.intermediate_size; ++i) {
      const Inner inner = ComputeInner(mlp, &x[t * hidden], i);
      AddScaled(da[i] * inner.da_du, &mlp.up[i * hidden], hidden, to);
      if (mlp.gated) AddScaled(da[i] * inner.da_dg, &mlp.gate[i * hidden], hidden, to);
    }
  }
  return dx;
}

}  // namespace shardmlp
