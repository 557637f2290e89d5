#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "kernels/cpu/loops.h"
#include "kernels/number.h"

namespace shardmlp {
namespace {

constexpr int64_t kColumnsPerPart = 256;  // columns whose sums stay in the first-level cache
constexpr int64_t kRowsPerPart = 16;      // rows whose squares are added before they join the sum

// sum += the column sums of m, which are added in f64 and rounded once. m [R, N] with N at most kColumnsPerPart.
template <typename T>
void AddPart(ConstMatrixView m, Arithmetic<T>* sum) {
  std::array<double, kColumnsPerPart> totals = {};
  for (int64_t row = 0; row < m.rows; ++row) {
    const T* elements = m.Rows(row, 1).as<T>();
#pragma omp simd
    for (int64_t i = 0; i < m.cols; ++i) totals[i] += Load(elements[i]);
  }
  for (int64_t i = 0; i < m.cols; ++i) sum[i] = static_cast<Arithmetic<T>>(sum[i] + totals[i]);
}

template <typename T>
double RowSumOfSquares(const T* row, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const double x = Load(row[i]);
    sum += x * x;
  }
  return sum;
}

}  // namespace

void AddColumnSums(const Team& team, ConstMatrixView m, MatrixView sum) {
  if (m.empty()) return;
  WithDType(m.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    const int64_t part_count = (m.cols + kColumnsPerPart - 1) / kColumnsPerPart;
    team.Split(part_count, m.rows * kColumnsPerPart, [&](int64_t begin, int64_t end) {
      for (int64_t column = begin * kColumnsPerPart; column < std::min(m.cols, end * kColumnsPerPart);
           column += kColumnsPerPart) {
        const int64_t count = std::min(kColumnsPerPart, m.cols - column);
        AddPart<T>(m.Cols(column, count), sum.as<Arithmetic<T>>() + column);
      }
    });
  });
}

double SumOfSquares(const Team& team, ConstMatrixView m) {
  if (m.empty()) return 0;
  std::vector<double> parts(static_cast<size_t>((m.rows + kRowsPerPart - 1) / kRowsPerPart));
  WithDType(m.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    const auto part_count = static_cast<int64_t>(parts.size());
    team.Split(part_count, m.cols * kRowsPerPart, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t last = std::min(m.rows, (part + 1) * kRowsPerPart);
        double sum = 0;
        for (int64_t row = part * kRowsPerPart; row < last; ++row) {
          sum += RowSumOfSquares(m.Rows(row, 1).template as<T>(), m.cols);
        }
        parts[static_cast<size_t>(part)] = sum;
      }
    });
  });
  return std::accumulate(parts.begin(), parts.end(), 0.0);
}

}  // namespace shardmlp
