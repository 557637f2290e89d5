// Every backend's elementwise passes and reductions against plain loops.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/dense.h"
#include "tests/kernels/device_matrix.h"
#include "tests/kernels/naive_mlp.h"

namespace shardmlp::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<Activation> Activations() {
  std::vector<Activation> all = {{.kind = ActivationKind::kClampedSwiglu, .gated = true, .limit = 2.5}};
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh, ActivationKind::kGeluFast,
        ActivationKind::kQuickGelu, ActivationKind::kRelu, ActivationKind::kRelu2}) {
    all.push_back({.kind = kind, .gated = true});
    all.push_back({.kind = kind, .gated = false});
  }
  return all;
}

// One rounding of the result, and that of the arithmetic before it.
double Bound(DType dtype) {
  if (dtype == DType::kF64) return 1e-14;
  return dtype == DType::kF32 ? 2e-6 : std::ldexp(1, -8) + 2e-6;
}

class ElementwiseTest : public BackendTest {
 protected:
  // ActivationForward and ActivationBackward on [rows, inner] are the formulas.
  void ExpectFormulas(const Activation& activation, DType dtype, int64_t rows, int64_t inner, int64_t padding) {
    SCOPED_TRACE(absl::StrCat(Name(activation.kind), " gated ", activation.gated, " ", Name(dtype), " [", rows, ", ",
                              inner, "] padding ", padding));
    const int64_t up = activation.gated ? inner : 0;
    const Dense gate_up = Rounded(backend(), RandomDense(rows, up + inner, 1, 4), dtype);
    const Dense da = Rounded(backend(), RandomDense(rows, inner, 2), dtype);
    Dense a(rows, inner);
    Dense dgate_up(rows, up + inner);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < inner; ++i) {
        const double g = gate_up.at(row, i);
        const double u = gate_up.at(row, up + i);
        a.at(row, i) = NaiveActivation(activation, g, u);
        dgate_up.at(row, i) = da.at(row, i) * NaiveGateSlope(activation, g, u);
        dgate_up.at(row, up + i) = da.at(row, i) * NaiveUpSlope(activation, g, u);
      }
    }
    const DeviceMatrix device_gate_up(backend(), gate_up, dtype, padding);
    DeviceMatrix device_inner(backend(), rows, inner, dtype, padding);
    ASSERT_TRUE(backend().ActivationForward(activation, device_gate_up.view(), device_inner.view()).ok());
    EXPECT_LE(RelativeDifference(device_inner.Read(), a), Bound(dtype));
    EXPECT_EQ(device_gate_up.Read(), gate_up);
    device_inner.Write(da);
    ASSERT_TRUE(backend().ActivationBackward(activation, device_gate_up.view(), device_inner.view()).ok());
    EXPECT_LE(RelativeDifference(device_inner.Read(), a), Bound(dtype));
    EXPECT_LE(RelativeDifference(device_gate_up.Read(), dgate_up), Bound(dtype));
  }

  void ExpectColumnSums(int64_t rows, int64_t cols, DType dtype) {
    SCOPED_TRACE(absl::StrCat(Name(dtype), " [", rows, ", ", cols, "]"));
    const Dense m = Rounded(backend(), RandomDense(rows, cols, 1), dtype);
    const Dense before = Rounded(backend(), RandomDense(1, cols, 2), AccumulatorOf(dtype));
    Dense expected = before;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) expected.at(0, col) += m.at(row, col);
    }
    const DeviceMatrix device_m(backend(), m, dtype, 5);
    const DeviceMatrix sum(backend(), before, AccumulatorOf(dtype));
    ASSERT_TRUE(backend().AddColumnSums(device_m.view(), sum.view()).ok());
    EXPECT_LE(RelativeDifference(sum.Read(), expected), dtype == DType::kF64 ? 1e-14 : 1e-6);
  }

  double SumOfSquares(const DeviceMatrix& m) {
    const Buffer sum = backend().Allocate(Memory::kStaging, sizeof(double)).value();
    EXPECT_TRUE(backend().SumOfSquares(m.view(), static_cast<double*>(sum.data())).ok());
    Finish(backend(), Stream::kCompute);
    return *static_cast<double*>(sum.data());
  }
};

TEST_P(ElementwiseTest, EveryActivationForwardAndBackwardIsItsFormula) {
  for (const Activation& activation : Activations()) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
      if (!backend().Computes(dtype)) continue;
      ExpectFormulas(activation, dtype, 3, 1, 0);
      ExpectFormulas(activation, dtype, 5, 37, 3);
      ExpectFormulas(activation, dtype, 70, 301, 0);
      ExpectFormulas(activation, dtype, 0, 8, 0);
    }
  }
}

TEST_P(ElementwiseTest, NanStaysWhereItIs) {
  for (const Activation& activation : Activations()) {
    const int64_t up = activation.gated ? 40 : 0;
    Dense gate_up = RandomDense(2, up + 40, 1);
    gate_up.at(1, up + 7) = kNan;
    const DeviceMatrix device_gate_up(backend(), gate_up, DType::kF32);
    const DeviceMatrix inner(backend(), 2, 40, DType::kF32);
    ASSERT_TRUE(backend().ActivationForward(activation, device_gate_up.view(), inner.view()).ok());
    const Dense a = inner.Read();
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(a.at(row, i)), row == 1 && i == 7) << Name(activation.kind);
    }
  }
}

TEST_P(ElementwiseTest, AClampWithoutAGateIsRefused) {
  const DeviceMatrix m(backend(), 2, 2, DType::kF32);
  const Activation activation = {.kind = ActivationKind::kClampedSwiglu, .gated = false};
  EXPECT_EQ(backend().ActivationForward(activation, m.view(), m.view()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend().ActivationBackward(activation, m.view(), m.view()).code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(ElementwiseTest, AHalfThatIsNoHalfIsRefused) {
  const DeviceMatrix gate_up(backend(), 2, 5, DType::kF32);
  const DeviceMatrix inner(backend(), 2, 2, DType::kF32);
  const absl::Status status = backend().ActivationForward({}, gate_up.view(), inner.view());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), Reason::kInvalidShape);
}

TEST_P(ElementwiseTest, ColumnSumsAddToWhatIsThere) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    ExpectColumnSums(411, 700, dtype);
    ExpectColumnSums(5000, 9, dtype);
    ExpectColumnSums(3, 70001, dtype);
  }
}

TEST_P(ElementwiseTest, ColumnSumsOfNoRowsAreNothing) {
  const Dense before = RandomDense(1, 4, 2);
  const DeviceMatrix sum(backend(), before, DType::kF64);
  ASSERT_TRUE(backend().AddColumnSums(MatrixView(nullptr, 0, 4, DType::kF64), sum.view()).ok());
  EXPECT_EQ(sum.Read(), before);
  EXPECT_EQ(backend().AddColumnSums(MatrixView(nullptr, 0, 5, DType::kF64), sum.view()).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(ElementwiseTest, SumsOfSquaresAreInF64) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const int64_t rows : {1, 37, 600}) {
      const Dense m = Rounded(backend(), RandomDense(rows, 333, 1, 100), dtype);
      double expected = 0;
      for (const double value : m.values) expected += value * value;
      EXPECT_NEAR(SumOfSquares(DeviceMatrix(backend(), m, dtype, 3)) / expected, 1, 1e-12);
    }
  }
  const Dense large = RandomDense(1, 1'200'003, 2);
  double expected = 0;
  for (const double value : large.values) expected += value * value;
  EXPECT_NEAR(SumOfSquares(DeviceMatrix(backend(), large, DType::kF64)) / expected, 1, 1e-12);
  EXPECT_EQ(SumOfSquares(DeviceMatrix(backend(), 0, 3, DType::kF32)), 0);
  EXPECT_NEAR(SumOfSquares(DeviceMatrix(backend(), Dense(2, 2, 1e38), DType::kF32)) / 4e76, 1, 1e-6);
}

TEST_P(ElementwiseTest, SumsOfSquaresShowWhatIsNotFinite) {
  for (const double bad : {kNan, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    Dense m = RandomDense(50, 70, 1);
    m.at(49, 69) = bad;
    EXPECT_FALSE(std::isfinite(SumOfSquares(DeviceMatrix(backend(), m, DType::kF32))));
    EXPECT_FALSE(std::isfinite(SumOfSquares(DeviceMatrix(backend(), m, DType::kF64))));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ElementwiseTest, ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace shardmlp::testing
