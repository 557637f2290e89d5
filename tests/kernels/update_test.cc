// Every backend's optimizer against torch.optim's own statement of AdamW and SGD, over several steps.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/optimizer.h"
#include "kernels/status.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/dense.h"
#include "tests/kernels/device_matrix.h"

namespace shardmlp::testing {
namespace {

// One element's state, in f64.
struct Element {
  double w, m, v;
};

// Algorithm of the documentation of torch.optim.AdamW, t the step's number.
void Reference(const AdamW& adamw, int64_t t, double g, Element& e) {
  e.w = e.w - adamw.learning_rate * adamw.weight_decay * e.w;
  e.m = adamw.beta1 * e.m + (1 - adamw.beta1) * g;
  e.v = adamw.beta2 * e.v + (1 - adamw.beta2) * g * g;
  const double m_hat = e.m / (1 - std::pow(adamw.beta1, static_cast<double>(t)));
  const double v_hat = e.v / (1 - std::pow(adamw.beta2, static_cast<double>(t)));
  e.w = e.w - adamw.learning_rate * m_hat / (std::sqrt(v_hat) + adamw.epsilon);
}

// Algorithm of the documentation of torch.optim.SGD.
void Reference(const Sgd& sgd, int64_t t, double g, Element& e) {
  if (sgd.weight_decay != 0) g = g + sgd.weight_decay * e.w;
  if (sgd.momentum != 0) {
    e.m = t > 1 ? sgd.momentum * e.m + (1 - sgd.dampening) * g : g;
    g = sgd.nesterov ? g + sgd.momentum * e.m : e.m;
  }
  e.w = e.w - sgd.learning_rate * g;
}

void Reference(const KeepFrozen&, int64_t, double, Element&) {}

std::vector<Hyperparameters> AllHyperparameters() {
  return {AdamW{.learning_rate = 1e-3},
          AdamW{.learning_rate = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1},
          AdamW{.learning_rate = 1e-2, .beta1 = 0.3, .beta2 = 0.5, .epsilon = 1e-3, .weight_decay = 0},
          AdamW{.learning_rate = 1e-2, .beta1 = 0, .beta2 = 0, .weight_decay = 0},
          Sgd{.learning_rate = 1e-2},
          Sgd{.learning_rate = 1e-2, .weight_decay = 0.1},
          Sgd{.learning_rate = 1e-2, .momentum = 0.9},
          Sgd{.learning_rate = 1e-2, .momentum = 0.9, .dampening = 0.4, .weight_decay = 0.01},
          Sgd{.learning_rate = 1e-2, .momentum = 0.9, .dampening = -0.5},
          Sgd{.learning_rate = 1e-2, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
          KeepFrozen{}};
}

class UpdateTest : public BackendTest {
 protected:
  // Five steps on a [rows, cols] tensor whose weights are kept in `weights` beside a master of `dtype`.
  void ExpectTorch(const Hyperparameters& hyperparameters, DType dtype, DType weights_dtype, int64_t rows,
                   int64_t cols) {
    SCOPED_TRACE(absl::StrCat("optimizer ", hyperparameters.index(), " ", Name(dtype), " [", rows, ", ", cols, "]"));
    constexpr double kScale = 0.25;
    const Dense start = Rounded(backend(), RandomDense(rows, cols, 1), dtype);
    const DeviceMatrix master(backend(), start, dtype, 3);
    // A momentum buffer holds anything before the first update of SGD, and zeros before AdamW's.
    const bool adam = std::holds_alternative<AdamW>(hyperparameters);
    const DeviceMatrix moment1(backend(), Dense(rows, cols, adam ? 0 : NAN), dtype, 1);
    const DeviceMatrix moment2(backend(), Dense(rows, cols, 0), dtype);
    const DeviceMatrix weights(backend(), start, weights_dtype, 2);
    std::vector<Element> elements;
    for (const double w : start.values) elements.push_back({w, 0, 0});
    for (int64_t step = 1; step <= 5; ++step) {
      const Dense gradient = Rounded(backend(), RandomDense(rows, cols, 10 + static_cast<uint64_t>(step)), dtype);
      const DeviceMatrix device_gradient(backend(), gradient, dtype, 4);
      const absl::Status status = backend().Update({.hyperparameters = hyperparameters,
                                                    .update_count = step,
                                                    .gradient_scale = kScale,
                                                    .gradient = device_gradient.view(),
                                                    .master = master.view(),
                                                    .moment1 = moment1.view(),
                                                    .moment2 = adam ? moment2.view() : MatrixView(),
                                                    .weights = weights.view()});
      ASSERT_TRUE(status.ok()) << status;
      for (size_t i = 0; i < elements.size(); ++i) {
        std::visit([&](const auto& h) { Reference(h, step, gradient.values[i] * kScale, elements[i]); },
                   hyperparameters);
      }
    }
    Dense expected(rows, cols);
    for (size_t i = 0; i < elements.size(); ++i) expected.values[i] = elements[i].w;
    EXPECT_LE(RelativeDifference(master.Read(), expected), dtype == DType::kF64 ? 1e-14 : 1e-6);
    EXPECT_EQ(weights.Read(), Rounded(backend(), master.Read(), weights_dtype));
  }
};

TEST_P(UpdateTest, FiveStepsAreTorchs) {
  for (const Hyperparameters& hyperparameters : AllHyperparameters()) {
    ExpectTorch(hyperparameters, DType::kF64, DType::kF64, 3, 37);
    ExpectTorch(hyperparameters, DType::kF32, DType::kBF16, 5, 13);
    ExpectTorch(hyperparameters, DType::kF32, DType::kF32, 300, 301);
    ExpectTorch(hyperparameters, DType::kF32, DType::kBF16, 0, 4);
  }
}

TEST_P(UpdateTest, AMasterThatIsTheWeightsNeedsNoOther) {
  const DeviceMatrix master(backend(), Dense(2, 3, 1), DType::kF32);
  const DeviceMatrix gradient(backend(), Dense(2, 3, 0.5), DType::kF32);
  ASSERT_TRUE(backend()
                  .Update({.hyperparameters = Sgd{.learning_rate = 0.5},
                           .gradient = gradient.view(),
                           .master = master.view(),
                           .moment1 = {},
                           .moment2 = {},
                           .weights = {}})
                  .ok());
  EXPECT_EQ(master.Read(), Dense(2, 3, 0.75));
}

TEST_P(UpdateTest, OperandsThatDoNotFitAreRefused) {
  const DeviceMatrix m(backend(), 2, 3, DType::kF32);
  const DeviceMatrix other(backend(), 2, 4, DType::kF32);
  const DeviceMatrix wide(backend(), 2, 3, DType::kF64);
  const OptimizerUpdate good = {.hyperparameters = AdamW{.learning_rate = 1},
                                .gradient = m.view(),
                                .master = m.view(),
                                .moment1 = m.view(),
                                .moment2 = m.view(),
                                .weights = {}};
  const auto refused = [&](const OptimizerUpdate& update) {
    EXPECT_EQ(backend().Update(update).code(), absl::StatusCode::kInvalidArgument);
  };
  EXPECT_TRUE(backend().Update(good).ok());
  OptimizerUpdate bad = good;
  bad.gradient = other.view();
  refused(bad);
  bad = good;
  bad.moment2 = {};
  refused(bad);
  bad = good;
  bad.moment1 = wide.view();
  refused(bad);
  bad = good;
  bad.update_count = 0;
  refused(bad);
  bad = good;
  bad.hyperparameters = AdamW{.learning_rate = -1};
  refused(bad);
}

INSTANTIATE_TEST_SUITE_P(Backends, UpdateTest, ::testing::ValuesIn(Backends()), BackendName);

TEST(ValidateTest, WhatTorchTakesIsTaken) {
  for (const Hyperparameters& hyperparameters : AllHyperparameters()) {
    EXPECT_TRUE(Validate(hyperparameters).ok());
  }
}

TEST(ValidateTest, EachBadHyperparameterIsNamedWithItsValue) {
  const auto refused = [](const Hyperparameters& hyperparameters, const std::string& name, const std::string& value) {
    const absl::Status status = Validate(hyperparameters);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), Reason::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(value));
  };
  refused(AdamW{.learning_rate = -0.5}, "learning_rate", "-0.5");
  refused(AdamW{.learning_rate = NAN}, "learning_rate", "nan");
  refused(AdamW{.beta1 = 1}, "beta1", "1");
  refused(AdamW{.beta2 = -0.1}, "beta2", "-0.1");
  refused(AdamW{.beta2 = NAN}, "beta2", "nan");
  refused(AdamW{.epsilon = -1e-8}, "epsilon", "-1e-08");
  refused(AdamW{.weight_decay = INFINITY}, "weight_decay", "inf");
  refused(Sgd{.learning_rate = -1}, "learning_rate", "-1");
  refused(Sgd{.momentum = -0.9}, "momentum", "-0.9");
  refused(Sgd{.dampening = NAN}, "dampening", "nan");
  refused(Sgd{.weight_decay = -2}, "weight_decay", "-2");
  refused(Sgd{.nesterov = true}, "momentum", "0");
  refused(Sgd{.momentum = 0.9, .dampening = 0.25, .nesterov = true}, "dampening", "0.25");
}

}  // namespace
}  // namespace shardmlp::testing
