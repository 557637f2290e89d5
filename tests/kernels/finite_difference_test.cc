// MlpBackward in f64 against central differences of MlpForward: the gradients are of what forward computes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/layer.h"
#include "tests/kernels/naive_mlp.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kTokens = 4;
constexpr int64_t kTileRows = 3;
constexpr double kStep = 1e-4;

std::vector<MlpConfig> Configs() {
  std::vector<MlpConfig> configs;
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh, ActivationKind::kGeluFast,
        ActivationKind::kQuickGelu, ActivationKind::kRelu, ActivationKind::kRelu2, ActivationKind::kClampedSwiglu}) {
    for (const bool gated : {true, false}) {
      if (kind == ActivationKind::kClampedSwiglu && !gated) continue;
      MlpConfig config;
      config.hidden_size = 5;
      config.intermediate_size = 7;
      config.output_size = 3;
      config.activation = {.kind = kind, .gated = gated, .limit = 0.8};  // so that some are clamped
      config.gate_up_bias = config.down_bias = true;
      config.dtype = DType::kF64;
      configs.push_back(config);
    }
  }
  return configs;
}

// How near a pre-activation comes to where a kind has no derivative.
double KinkDistance(const MlpConfig& config, const NaiveMlp& mlp, const Dense& x) {
  double distance = INFINITY;
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t n = 0; n < mlp.gate_up.rows; ++n) {
      double z = mlp.gate_up_bias.at(0, n);
      for (int64_t k = 0; k < x.cols; ++k) z += x.at(t, k) * mlp.gate_up.at(n, k);
      const double kink = config.activation.kind == ActivationKind::kClampedSwiglu ? config.activation.limit : 0;
      distance = std::min({distance, std::abs(z - kink), std::abs(z + kink)});
    }
  }
  return distance;
}

class FiniteDifferenceTest : public BackendTest {
 protected:
  // sum(dy * y): its gradients are those of the backward pass.
  double Loss(const MlpConfig& config, const NaiveMlp& mlp, const Dense& x, const Dense& dy) {
    const Dense y = Layer(backend(), config, mlp).Forward(x, kTileRows);
    double loss = 0;
    for (size_t i = 0; i < y.values.size(); ++i) loss += y.values[i] * dy.values[i];
    return loss;
  }

  // d loss / d m by central differences; `m` is one of the tensors that `loss` reads.
  template <typename F>
  Dense Differences(Dense& m, const F& loss) {
    Dense slopes(m.rows, m.cols);
    for (size_t i = 0; i < m.values.size(); ++i) {
      const double value = m.values[i];
      m.values[i] = value + kStep;
      const double above = loss();
      m.values[i] = value - kStep;
      slopes.values[i] = (above - loss()) / (2 * kStep);
      m.values[i] = value;
    }
    return slopes;
  }
};

TEST_P(FiniteDifferenceTest, EveryGradientOfEveryActivation) {
  for (const MlpConfig& config : Configs()) {
    SCOPED_TRACE(absl::StrCat(Name(config.activation.kind), " gated ", config.activation.gated));
    uint64_t seed = 1;
    Dense x = RandomDense(kTokens, config.hidden_size, 100);
    NaiveMlp mlp = RandomMlp(backend(), config, seed);
    while (KinkDistance(config, mlp, x) < 10 * kStep) mlp = RandomMlp(backend(), config, ++seed);
    const Dense dy = RandomDense(kTokens, config.output_size, 101);
    Layer layer(backend(), config, mlp);
    const Dense dx = layer.Backward(x, dy, kTileRows);

    const auto loss = [&] { return Loss(config, mlp, x, dy); };
    NaiveGradients differences;
    differences.dx = Differences(x, loss);
    differences.gate_up = Differences(mlp.gate_up, loss);
    differences.gate_up_bias = Differences(mlp.gate_up_bias, loss);
    differences.down = Differences(mlp.down, loss);
    differences.down_bias = Differences(mlp.down_bias, loss);
    EXPECT_LE(RelativeDifference(layer.Gradients(dx), differences), 1e-7);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FiniteDifferenceTest, ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace shardmlp::testing
