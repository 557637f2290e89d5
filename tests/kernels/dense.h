// Matrices of the tests: host memory, f64. And the one comparator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardmlp::testing {

struct Dense {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;  // row-major

  Dense() = default;
  Dense(int64_t rows, int64_t cols, double value = 0)
      : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols), value) {}
  double& at(int64_t row, int64_t col) { return values[static_cast<size_t>(row * cols + col)]; }
  double at(int64_t row, int64_t col) const { return values[static_cast<size_t>(row * cols + col)]; }
  bool operator==(const Dense&) const = default;
};

// Uniform in [-scale, scale); the same for the same seed everywhere.
Dense RandomDense(int64_t rows, int64_t cols, uint64_t seed, double scale = 1);

double LargestMagnitude(const Dense& m);

// The largest difference over the largest reference. Infinite where shapes differ or a NaN is on one side alone, and
// where all of the reference is 0 and something else was got.
double RelativeDifference(const Dense& got, const Dense& reference);

}  // namespace shardmlp::testing
