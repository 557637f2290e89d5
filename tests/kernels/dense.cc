#include "tests/kernels/dense.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace shardmlp::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Dense RandomDense(int64_t rows, int64_t cols, uint64_t seed, double scale) {
  std::mt19937_64 random(seed * 7919 + static_cast<uint64_t>(rows) * 31 + static_cast<uint64_t>(cols));
  Dense m(rows, cols);
  // The top 53 bits: the standard's distributions differ from library to library, its generators do not.
  for (double& value : m.values) value = scale * (static_cast<double>(random() >> 11) * 0x1p-52 - 1);
  return m;
}

double LargestMagnitude(const Dense& m) {
  double largest = 0;
  for (const double value : m.values) largest = std::max(largest, std::abs(value));
  return largest;
}

double RelativeDifference(const Dense& got, const Dense& reference) {
  if (got.rows != reference.rows || got.cols != reference.cols) return kInfinity;
  double difference = 0;
  for (size_t i = 0; i < got.values.size(); ++i) {
    const double a = got.values[i];
    const double b = reference.values[i];
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    if (std::isnan(a) || std::isnan(b)) return kInfinity;
    difference = std::max(difference, std::abs(a - b));
  }
  return difference == 0 ? 0 : difference / LargestMagnitude(reference);
}

}  // namespace shardmlp::testing
