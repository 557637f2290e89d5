// Activation formulas, element by element, against <cmath>; and their names in Hugging Face configs.
#include "kernels/activation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/elementary.h"
#include "kernels/status.h"
#include "tests/kernels/naive_mlp.h"

namespace shardmlp::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// [-40, 40] in small steps, beyond the range where each activation is flat or linear.
std::vector<double> Grid() {
  std::vector<double> grid;
  for (double x = -40; x <= 40; x += 0.00731) grid.push_back(static_cast<float>(x));
  return grid;
}

template <typename T>
double LargestExpError() {
  double largest = 0;
  for (const double x : Grid()) {
    const double reference = std::exp(x);
    largest = std::max(largest, std::abs(static_cast<double>(Exp(static_cast<T>(x))) - reference) / reference);
  }
  return largest;
}

TEST(ElementaryTest, ExpIsWithinTwoUnitsInTheLastPlace) {
  EXPECT_LE(LargestExpError<float>(), 2 * std::numeric_limits<float>::epsilon());
  EXPECT_LE(LargestExpError<double>(), 2 * std::numeric_limits<double>::epsilon());
}

template <typename T>
void ExpectExpAtTheEdges() {
  const T infinity = std::numeric_limits<T>::infinity();
  EXPECT_EQ(Exp(T(0)), T(1));
  EXPECT_EQ(Exp(infinity), infinity);
  EXPECT_EQ(Exp(-infinity), T(0));
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<T>::quiet_NaN())));
  const T largest = std::log(std::numeric_limits<T>::max());
  EXPECT_LT(Exp(std::nextafter(largest, T(0))), infinity);
  EXPECT_EQ(Exp(largest * T(1.01)), infinity);
  const T smallest = std::log(std::numeric_limits<T>::denorm_min());
  EXPECT_GT(Exp(smallest * T(0.99)), T(0));
  EXPECT_EQ(Exp(smallest * T(1.02)), T(0));
}

TEST(ElementaryTest, ExpReachesInfinityAndZeroWhereItShould) {
  ExpectExpAtTheEdges<float>();
  ExpectExpAtTheEdges<double>();
}

template <typename T>
double LargestCdfError() {
  double largest = 0;
  for (const double x : Grid()) {
    const double reference = std::erfc(-x / std::sqrt(2.0)) / 2;
    largest = std::max(largest, std::abs(static_cast<double>(Normal(static_cast<T>(x)).cdf) - reference));
  }
  return largest;
}

TEST(ElementaryTest, NormalCdfIsWithinItsBound) {
  EXPECT_LE(LargestCdfError<float>(), 2e-7);
  EXPECT_LE(LargestCdfError<double>(), 1e-15);
  EXPECT_EQ(Normal(kInfinity).cdf, 1);
  EXPECT_EQ(Normal(-kInfinity).cdf, 0);
  EXPECT_TRUE(std::isnan(Normal(std::nan("")).cdf));
}

// Of the values and both slopes, gated and not, relative to the size of what is multiplied.
template <ActivationKind kind, typename T>
double LargestError() {
  const Activation gated = {.kind = kind, .gated = true};
  double largest = 0;
  const auto add = [&](double got, double reference, double scale) {
    largest = std::max(largest, std::abs(got - reference) / std::max(1.0, scale));
  };
  for (const double g : Grid()) {
    const double u = std::sin(g) * 9;
    const auto values = ActivateGated<kind>(static_cast<T>(g), static_cast<T>(u), static_cast<T>(gated.limit));
    const double u_as_used = static_cast<T>(u);
    add(values.a, NaiveActivation(gated, g, u_as_used), std::abs(g * u_as_used));
    add(values.da_dg, NaiveGateSlope(gated, g, u_as_used), std::abs(g * u_as_used));
    add(values.da_du, NaiveUpSlope(gated, g, u_as_used), std::abs(g));
    if constexpr (kind != ActivationKind::kClampedSwiglu) {
      const Activation ungated = {.kind = kind, .gated = false};
      add(Activate<kind>(static_cast<T>(g)).value, NaiveActivation(ungated, 0, g), std::abs(g));
      add(Activate<kind>(static_cast<T>(g)).slope, NaiveUpSlope(ungated, 0, g), std::abs(g));
    }
  }
  return largest;
}

template <typename T>
std::vector<double> LargestErrors() {
  return {LargestError<ActivationKind::kSilu, T>(),      LargestError<ActivationKind::kGelu, T>(),
          LargestError<ActivationKind::kGeluTanh, T>(),  LargestError<ActivationKind::kGeluFast, T>(),
          LargestError<ActivationKind::kQuickGelu, T>(), LargestError<ActivationKind::kClampedSwiglu, T>()};
}

// relu2 grows as the square, so its error is relative to that.
template <typename T>
void ExpectReluKinds(double bound) {
  EXPECT_EQ((LargestError<ActivationKind::kRelu, double>()), 0);
  EXPECT_LE((LargestError<ActivationKind::kRelu2, T>()), 40 * bound);
}

TEST(ActivationTest, EveryKindAndItsSlopesAreTheFormulas) {
  EXPECT_THAT(LargestErrors<double>(), ::testing::Each(::testing::Le(1e-14)));
  EXPECT_THAT(LargestErrors<float>(), ::testing::Each(::testing::Le(2e-6)));
  ExpectReluKinds<double>(1e-14);
  ExpectReluKinds<float>(1e-6);
}

TEST(ActivationTest, TheRoundedConstantOfGeluFastShows) {
  const double difference =
      Activate<ActivationKind::kGeluFast>(1.0).value - Activate<ActivationKind::kGeluTanh>(1.0).value;
  EXPECT_NE(difference, 0);
  EXPECT_LT(std::abs(difference), 1e-9);
}

TEST(ActivationTest, ClampPassesNoGradientOutsideAndAllOfItAtTheLimit) {
  constexpr auto kind = ActivationKind::kClampedSwiglu;
  EXPECT_EQ((ActivateGated<kind>(7.5, 1.0, 7.0).da_dg), 0);
  EXPECT_NE((ActivateGated<kind>(7.0, 1.0, 7.0).da_dg), 0);
  EXPECT_NE((ActivateGated<kind>(-30.0, 1.0, 7.0).da_du), 0);  // the gate has no lower limit
  EXPECT_EQ((ActivateGated<kind>(1.0, 7.5, 7.0).da_du), 0);
  EXPECT_EQ((ActivateGated<kind>(1.0, -7.5, 7.0).da_du), 0);
  EXPECT_NE((ActivateGated<kind>(1.0, -7.0, 7.0).da_du), 0);
  EXPECT_EQ((ActivateGated<kind>(1.0, -9.0, 7.0).a), (ActivateGated<kind>(1.0, -7.0, 7.0).a));
}

template <ActivationKind kind>
void ExpectNanPasses() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(ActivateGated<kind>(nan, 1.0f, 7.0f).a)) << Name(kind);
  EXPECT_TRUE(std::isnan(ActivateGated<kind>(1.0f, nan, 7.0f).a)) << Name(kind);
}

TEST(ActivationTest, NanPasses) {
  ExpectNanPasses<ActivationKind::kSilu>();
  ExpectNanPasses<ActivationKind::kGelu>();
  ExpectNanPasses<ActivationKind::kGeluTanh>();
  ExpectNanPasses<ActivationKind::kGeluFast>();
  ExpectNanPasses<ActivationKind::kQuickGelu>();
  ExpectNanPasses<ActivationKind::kRelu>();
  ExpectNanPasses<ActivationKind::kRelu2>();
  ExpectNanPasses<ActivationKind::kClampedSwiglu>();
}

TEST(ActivationTest, EveryConfigValueHasItsKind) {
  const std::vector<std::pair<std::string, ActivationKind>> values = {
      {"silu", ActivationKind::kSilu},
      {"swish", ActivationKind::kSilu},
      {"gelu", ActivationKind::kGelu},
      {"gelu_python", ActivationKind::kGelu},
      {"gelu_new", ActivationKind::kGeluTanh},
      {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
      {"gelu_python_tanh", ActivationKind::kGeluTanh},
      {"gelu_accurate", ActivationKind::kGeluTanh},
      {"gelu_fast", ActivationKind::kGeluFast},
      {"quick_gelu", ActivationKind::kQuickGelu},
      {"relu", ActivationKind::kRelu},
      {"relu2", ActivationKind::kRelu2},
  };
  for (const auto& [value, kind] : values) {
    const absl::StatusOr<ActivationKind> got = ActivationFromConfig(value);
    ASSERT_TRUE(got.ok()) << value;
    EXPECT_EQ(*got, kind) << value;
  }
}

TEST(ActivationTest, AnUnknownConfigValueIsRefusedByName) {
  for (const std::string value : {"xielu", "gelu_10", "leaky_relu", "clamped_swiglu", "SiLU", ""}) {
    const absl::Status status = ActivationFromConfig(value).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << value;
    EXPECT_EQ(ReasonOf(status), Reason::kUnsupportedModel) << value;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("\"" + value + "\""));
  }
}

}  // namespace
}  // namespace shardmlp::testing
