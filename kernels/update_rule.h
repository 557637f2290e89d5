// AdamW and SGD for one element, as torch.optim computes them; one definition for host and device.
//
// T is the accumulator type. The scalars of a step are worked out once, in f64, and rounded to T as torch does.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/optimizer.h"

namespace shardmlp {

template <typename T>
struct AdamWRule {
  AdamWRule(const AdamW& adamw, int64_t update_count, double gradient_scale)
      : gradient_scale(static_cast<T>(gradient_scale)),
        decay(static_cast<T>(1 - adamw.learning_rate * adamw.weight_decay)),
        beta1(static_cast<T>(adamw.beta1)),
        one_minus_beta1(static_cast<T>(1 - adamw.beta1)),
        beta2(static_cast<T>(adamw.beta2)),
        one_minus_beta2(static_cast<T>(1 - adamw.beta2)),
        step_size(static_cast<T>(adamw.learning_rate / (1 - std::pow(adamw.beta1, static_cast<double>(update_count))))),
        root_correction2(static_cast<T>(std::sqrt(1 - std::pow(adamw.beta2, static_cast<double>(update_count))))),
        epsilon(static_cast<T>(adamw.epsilon)) {}

  // w -= lr * weight_decay * w; m, v; w -= lr * m_hat / (sqrt(v_hat) + epsilon)
  template <typename Sqrt>
  constexpr void Apply(T gradient, T& w, T& m, T& v, Sqrt sqrt) const {
    const T g = gradient * gradient_scale;
    m = one_minus_beta1 < T(0.5) ? m + one_minus_beta1 * (g - m) : g - beta1 * (g - m);  // torch.lerp
    v = v * beta2 + one_minus_beta2 * g * g;
    w = w * decay - step_size * m / (sqrt(v) / root_correction2 + epsilon);
  }

  T gradient_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction2, epsilon;
};

template <typename T>
struct SgdRule {
  SgdRule(const Sgd& sgd, int64_t update_count, double gradient_scale)
      : gradient_scale(static_cast<T>(gradient_scale)),
        learning_rate(static_cast<T>(sgd.learning_rate)),
        weight_decay(static_cast<T>(sgd.weight_decay)),
        momentum(static_cast<T>(sgd.momentum)),
        one_minus_dampening(static_cast<T>(1 - sgd.dampening)),
        first(update_count == 1),
        nesterov(sgd.nesterov) {}

  // g += weight_decay * w; w -= lr * g
  constexpr void Apply(T gradient, T& w) const {
    const T g = gradient * gradient_scale + weight_decay * w;
    w -= learning_rate * g;
  }
  // g += weight_decay * w; b = momentum * b + (1 - dampening) * g; w -= lr * (nesterov ? g + momentum * b : b)
  constexpr void Apply(T gradient, T& w, T& b) const {
    const T g = gradient * gradient_scale + weight_decay * w;
    b = first ? g : momentum * b + one_minus_dampening * g;  // whatever lies in b at first
    w -= learning_rate * (nesterov ? g + momentum * b : b);
  }

  T gradient_scale, learning_rate, weight_decay, momentum, one_minus_dampening;
  bool first, nesterov;
};

}  // namespace shardmlp
