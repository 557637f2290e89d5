// How far results may be from exact arithmetic on the same inputs: the largest difference over the largest reference of
// each tensor. docs/numerics.md derives them; tests and `shardmlpctl verify` hold to them.
#pragma once

#include "kernels/matrix.h"

namespace shardmlp {

struct ErrorBounds {
  double y;
  double dx;
  double gate_up;  // and its bias
  double down;
  double down_bias;
};

// Of a layer whose dtype is `dtype`.
constexpr ErrorBounds ErrorBoundsOf(DType dtype) {
  // A tensor of 16 bits: the roundings on its way, each of at most the unit roundoff u.
  const auto roundings = [](double u) { return ErrorBounds{4 * u, 5 * u, 4 * u, 3 * u, 1e-6}; };
  switch (dtype) {
    case DType::kF64: return {1e-12, 1e-12, 1e-12, 1e-12, 1e-12};
    case DType::kF32: return {1e-5, 1e-5, 1e-5, 1e-5, 1e-5};
    case DType::kBF16: return roundings(0x1p-8);
    case DType::kF16: return roundings(0x1p-11);
  }
  return {};
}

}  // namespace shardmlp
