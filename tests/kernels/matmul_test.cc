// Every backend's matrix product against plain loops.
#include <cmath>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/dense.h"
#include "tests/kernels/device_matrix.h"

namespace shardmlp::testing {
namespace {

struct Form {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  bool bias = false;
};

struct Types {
  DType ab, c, bias;
};

constexpr Types kTypes[] = {{DType::kF64, DType::kF64, DType::kF64},
                            {DType::kF32, DType::kF32, DType::kF32},
                            {DType::kBF16, DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32, DType::kF32},
                            {DType::kBF16, DType::kF32, DType::kBF16}};

// Sums are of at most 130 products of numbers below 1.
double Bound(DType c) {
  if (c == DType::kF64) return 1e-14;
  return c == DType::kF32 ? 1e-6 : std::ldexp(1, -8);
}

Dense Transposed(const Dense& m) {
  Dense transposed(m.cols, m.rows);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) transposed.at(j, i) = m.at(i, j);
  }
  return transposed;
}

// start + a b, start [M, N].
Dense PlainProduct(const Dense& a, const Dense& b, const Dense& start) {
  Dense c = start;
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      for (int64_t k = 0; k < a.cols; ++k) c.at(i, j) += a.at(i, k) * b.at(k, j);
    }
  }
  return c;
}

class MatMulTest : public BackendTest {
 protected:
  void ExpectProduct(const Types& types, const Form& form, int64_t m, int64_t n, int64_t k, int64_t padding) {
    SCOPED_TRACE(absl::StrCat("[", m, ", ", n, ", ", k, "] ", Name(types.ab), " to ", Name(types.c), " padding ",
                              padding, " transposed ", form.transpose_a, form.transpose_b, " accumulate ",
                              form.accumulate, " bias ", form.bias));
    const Dense a = Rounded(backend(), RandomDense(m, k, 1), types.ab);
    const Dense b = Rounded(backend(), RandomDense(k, n, 2), types.ab);
    const Dense bias = Rounded(backend(), RandomDense(1, n, 3), types.bias);
    const Dense before = Rounded(backend(), RandomDense(m, n, 4), types.c);
    Dense start(m, n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j)
        start.at(i, j) = form.accumulate ? before.at(i, j) : form.bias ? bias.at(0, j) : 0;
    }
    const DeviceMatrix device_a(backend(), form.transpose_a ? Transposed(a) : a, types.ab, padding);
    const DeviceMatrix device_b(backend(), form.transpose_b ? Transposed(b) : b, types.ab, padding);
    const DeviceMatrix device_bias(backend(), bias, types.bias);
    DeviceMatrix c(backend(), m, n, types.c, padding);
    if (form.accumulate) c.Write(before);
    const absl::Status status = backend().MatMul({.a = device_a.view(),
                                                  .b = device_b.view(),
                                                  .c = c.view(),
                                                  .bias = form.bias ? device_bias.view() : MatrixView(),
                                                  .transpose_a = form.transpose_a,
                                                  .transpose_b = form.transpose_b,
                                                  .accumulate = form.accumulate});
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_LE(RelativeDifference(c.Read(), PlainProduct(a, b, start)), Bound(types.c));
  }
};

// Below 2^-126 a number may count as 0, and costs at most that times what it is multiplied by.
TEST_P(MatMulTest, SubnormalNumbersAreOffByNoMoreThanThemselves) {
  const double least = std::ldexp(1, -126);
  constexpr int64_t kTerms = 32;
  for (const Types& types : kTypes) {
    if (types.ab == DType::kF64) continue;
    SCOPED_TRACE(absl::StrCat(Name(types.ab), " to ", Name(types.c)));
    for (const double factor : {1.0, 0.75, 0.25, 0x1p-6}) {
      Dense a(16, kTerms);
      Dense b(kTerms, 16);
      for (int64_t i = 0; i < a.rows; ++i) {
        for (int64_t k = 0; k < kTerms; ++k) a.at(i, k) = least * factor * (1 + (i + k) % 2);
      }
      for (int64_t k = 0; k < kTerms; ++k) {
        for (int64_t j = 0; j < b.cols; ++j) b.at(k, j) = j % 2 == 0 ? 8 : 0.5;
      }
      DeviceMatrix c(backend(), 16, 16, types.c);
      const DeviceMatrix on_a(backend(), a, types.ab), on_b(backend(), b, types.ab);
      ASSERT_TRUE(backend().MatMul({.a = on_a.view(), .b = on_b.view(), .c = c.view()}).ok());
      const Dense got = c.Read();
      const Dense exact = PlainProduct(a, b, Dense(16, 16));
      for (int64_t i = 0; i < 16; ++i) {
        for (int64_t j = 0; j < 16; ++j) {
          // Where all numbers are normal there is no such error; 0.5 * 2^-126 is a product that is not.
          const double lost = factor == 1 && j % 2 == 0 ? 0 : kTerms * least * (8 + 1 + 1);
          EXPECT_LE(std::abs(got.at(i, j) - exact.at(i, j)), Bound(types.c) * exact.at(i, j) + lost) << i << ", " << j;
        }
      }
    }
  }
}

TEST_P(MatMulTest, EveryFormIsThePlainProduct) {
  struct Size {
    int64_t m, n, k;
  };
  for (const Types& types : kTypes) {
    if (!backend().Computes(types.ab)) continue;
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const Size size : {Size{1, 1, 1}, {1, 7, 5}, {7, 1, 5}, {7, 5, 1}, {33, 17, 65}, {130, 70, 128}}) {
          for (const int64_t padding : {0, 3}) {
            Form form = {.transpose_a = transpose_a, .transpose_b = transpose_b};
            ExpectProduct(types, form, size.m, size.n, size.k, padding);
            form.bias = true;
            ExpectProduct(types, form, size.m, size.n, size.k, padding);
            form = {.transpose_a = transpose_a, .transpose_b = transpose_b, .accumulate = true};
            ExpectProduct(types, form, size.m, size.n, size.k, padding);
          }
        }
      }
    }
  }
}

TEST_P(MatMulTest, LargeProductsUseEveryThreadAndAreTheSameEveryTime) {
  for (const Types& types : kTypes) {
    if (!backend().Computes(types.ab)) continue;
    const Dense a = Rounded(backend(), RandomDense(311, 400, 1), types.ab);
    const Dense b = Rounded(backend(), RandomDense(400, 203, 2), types.ab);
    const DeviceMatrix device_a(backend(), a, types.ab);
    const DeviceMatrix device_b(backend(), b, types.ab);
    const DeviceMatrix c(backend(), 311, 203, types.c);
    Dense first;
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(backend().MatMul({.a = device_a.view(), .b = device_b.view(), .c = c.view()}).ok());
      if (i == 0) first = c.Read();
      ASSERT_EQ(c.Read(), first);
    }
    EXPECT_LE(RelativeDifference(first, PlainProduct(a, b, Dense(311, 203))), 2 * Bound(types.c));
  }
}

TEST_P(MatMulTest, AnEmptySumIsTheBiasOrZeroOrNothing) {
  for (const Types& types : kTypes) {
    if (!backend().Computes(types.ab)) continue;
    ExpectProduct(types, {}, 3, 4, 0, 0);
    ExpectProduct(types, {.bias = true}, 3, 4, 0, 2);
    ExpectProduct(types, {.accumulate = true}, 3, 4, 0, 2);
    ExpectProduct(types, {.transpose_a = true, .transpose_b = true}, 3, 4, 0, 0);
    ExpectProduct(types, {}, 0, 4, 5, 0);
    ExpectProduct(types, {.transpose_a = true, .accumulate = true}, 3, 0, 5, 0);
  }
}

TEST_P(MatMulTest, NanAndInfinityReachTheResult) {
  for (const Types& types : kTypes) {
    if (!backend().Computes(types.ab)) continue;
    Dense a(2, 2, 1);
    a.at(0, 0) = NAN;
    a.at(1, 1) = INFINITY;
    const DeviceMatrix device_a(backend(), a, types.ab);
    const DeviceMatrix device_b(backend(), Dense(2, 1, 1), types.ab);
    const DeviceMatrix c(backend(), 2, 1, types.c);
    ASSERT_TRUE(backend().MatMul({.a = device_a.view(), .b = device_b.view(), .c = c.view()}).ok());
    EXPECT_TRUE(std::isnan(c.Read().at(0, 0)));
    EXPECT_EQ(c.Read().at(1, 0), INFINITY);
  }
}

TEST_P(MatMulTest, OperandsThatDoNotFitAreRefused) {
  const auto refused = [&](const Gemm& gemm, Reason reason) {
    const absl::Status status = backend().MatMul(gemm);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
  };
  const DeviceMatrix a(backend(), 2, 3, DType::kF32);
  const DeviceMatrix b(backend(), 3, 4, DType::kF32);
  const DeviceMatrix c(backend(), 2, 4, DType::kF32);
  const DeviceMatrix wide(backend(), 2, 4, DType::kF64);
  const DeviceMatrix half(backend(), 2, 3, DType::kF16);
  const DeviceMatrix bias(backend(), 1, 4, DType::kF32);
  refused({.a = a.view(), .b = b.view(), .c = c.view(), .transpose_a = true}, Reason::kInvalidShape);
  refused({.a = a.view(), .b = b.view(), .c = c.view(), .transpose_b = true}, Reason::kInvalidShape);
  refused({.a = a.view(), .b = b.view(), .c = c.view(), .bias = a.view()}, Reason::kInvalidShape);
  refused({.a = a.view(), .b = b.view(), .c = wide.view()}, Reason::kInvalidDType);
  refused({.a = half.view(), .b = b.view(), .c = c.view()}, Reason::kInvalidDType);
  refused({.a = a.view(), .b = b.view(), .c = c.view(), .bias = bias.view(), .accumulate = true},
          Reason::kInvalidArgument);
  refused({.a = a.view(), .b = b.view(), .c = MatrixView(c.view().data, 2, 4, 3, DType::kF32)}, Reason::kInvalidShape);
}

INSTANTIATE_TEST_SUITE_P(Backends, MatMulTest, ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace shardmlp::testing
