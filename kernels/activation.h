// Activation functions of MLPs, exactly as transformers computes them: one definition for host and device.
//
// Each is given by its name and, for the clamped kind, a limit. The formulas themselves (A, dA/dg, dA/du from g and u)
// are templates over the element type that both the CPU's and the GPU's elementwise loops instantiate.
#pragma once

#include <cstdint>
#include <type_traits>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/elementary.h"

namespace shardmlp {

enum class ActivationKind : uint8_t {
  kSilu,           // x s(x), s the logistic function
  kGelu,           // x Phi(x), by erf
  kGeluTanh,       // the tanh approximation, constant sqrt(2/pi)
  kGeluFast,       // the same with the constant rounded to 0.7978845608
  kQuickGelu,      // x s(1.702 x)
  kRelu,           // max(0, x)
  kRelu2,          // max(0, x)^2
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

template <typename T>
struct ValueAndSlope {
  T value;
  T slope;
};

// x s(p), where `p` is a polynomial in x and `p_slope` its derivative.
template <typename T>
constexpr ValueAndSlope<T> LogisticUnit(T x, T p, T p_slope) {
  const T s = Logistic(p);
  const T value = x * s;
  return {value, s + value * (T(1) - s) * p_slope};
}

// (1 + tanh z) / 2 = s(2 z), so these are logistic units: z = constant (x + 0.044715 x^3).
template <typename T>
constexpr ValueAndSlope<T> TanhGelu(T x, T constant) {
  const T square = x * x;
  const T twice = T(2) * constant;
  return LogisticUnit(x, twice * x * (T(1) + T(0.044715) * square), twice * (T(1) + T(3 * 0.044715) * square));
}

// act(x) and act'(x). kClampedSwiglu is no function of one variable and has no case here.
template <ActivationKind kind, typename T>
constexpr ValueAndSlope<T> Activate(T x) {
  static_assert(kind != ActivationKind::kClampedSwiglu);
  if constexpr (kind == ActivationKind::kSilu) {
    return LogisticUnit(x, x, T(1));
  } else if constexpr (kind == ActivationKind::kGelu) {
    const NormalValues<T> normal = Normal(x);
    return {x * normal.cdf, normal.cdf + x * normal.density};
  } else if constexpr (kind == ActivationKind::kGeluTanh) {
    return TanhGelu(x, T(0.797884560802865355879892119869));
  } else if constexpr (kind == ActivationKind::kGeluFast) {
    return TanhGelu(x, T(0.7978845608));
  } else if constexpr (kind == ActivationKind::kQuickGelu) {
    return LogisticUnit(x, T(1.702) * x, T(1.702));
  } else {
    const T positive = x < 0 ? T(0) : x;  // NaN passes
    const T step = x <= 0 ? T(0) : T(1);
    if constexpr (kind == ActivationKind::kRelu) {
      return {positive, step};
    } else {
      return {positive * positive, T(2) * positive};
    }
  }
}

// A and its derivatives for one element of G and one of U.
template <typename T>
struct GatedValues {
  T a;
  T da_dg;
  T da_du;
};

// A = act(g) * u, or the clamped kind's own form with L = `limit`.
template <ActivationKind kind, typename T>
constexpr GatedValues<T> ActivateGated(T g, T u, T limit) {
  if constexpr (kind == ActivationKind::kClampedSwiglu) {
    const T gate = g > limit ? limit : g;
    const T lower = u < -limit ? -limit : u;
    const T up = (lower > limit ? limit : lower) + T(1);
    const ValueAndSlope<T> act = Activate<ActivationKind::kQuickGelu>(gate);
    return {up * act.value, g <= limit ? up * act.slope : T(0), u >= -limit && u <= limit ? act.value : T(0)};
  } else {
    const ValueAndSlope<T> act = Activate<kind>(g);
    return {act.value * u, act.slope * u, act.value};
  }
}

template <ActivationKind kind>
using KindTag = std::integral_constant<ActivationKind, kind>;

// f(KindTag<kind>()) for every kind that is a function of one variable.
template <typename F>
constexpr void WithKind(ActivationKind kind, const F& f) {
  switch (kind) {
    case ActivationKind::kSilu: return f(KindTag<ActivationKind::kSilu>());
    case ActivationKind::kGelu: return f(KindTag<ActivationKind::kGelu>());
    case ActivationKind::kGeluTanh: return f(KindTag<ActivationKind::kGeluTanh>());
    case ActivationKind::kGeluFast: return f(KindTag<ActivationKind::kGeluFast>());
    case ActivationKind::kQuickGelu: return f(KindTag<ActivationKind::kQuickGelu>());
    case ActivationKind::kRelu: return f(KindTag<ActivationKind::kRelu>());
    case ActivationKind::kRelu2: return f(KindTag<ActivationKind::kRelu2>());
    case ActivationKind::kClampedSwiglu: break;
  }
}

// The same, and the clamped kind too.
template <typename F>
constexpr void WithGatedKind(ActivationKind kind, const F& f) {
  if (kind == ActivationKind::kClampedSwiglu) return f(KindTag<ActivationKind::kClampedSwiglu>());
  WithKind(kind, f);
}

}  // namespace shardmlp
