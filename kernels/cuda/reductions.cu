// Every sum is in f64 and of fixed parts in a fixed order, so that it comes out the same every time.
#include <algorithm>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/operand.h"

namespace shardmlp {
namespace {

// parts [P, N] = column sums of each part's rows of m [R, N]; a thread adds a pack of columns.
struct SumRows {
  __device__ void operator()(int64_t part, int64_t pack) const {
    Pack<double> sums = {};
    const int64_t end = (part + 1) * rows_per_part < rows ? (part + 1) * rows_per_part : rows;
    for (int64_t row = part * rows_per_part; row < end; ++row) {
      const Pack<double> values = m.Load(row, pack);
      for (int64_t i = 0; i < kPackSize; ++i) sums.at[i] += values.at[i];
    }
    parts.Store(sums, part, pack);
  }

  WideOperand<const void> m;
  int64_t rows, rows_per_part;
  Operand<double> parts;
};

// sum [1, N] += the column sums of parts [P, N], rounded once
struct AddParts {
  __device__ void operator()(int64_t row, int64_t pack) const {
    Pack<double> totals = {};
    for (int64_t part = 0; part < part_count; ++part) {
      const Pack<double> values = parts.Load(part, pack);
      for (int64_t i = 0; i < kPackSize; ++i) totals.at[i] += values.at[i];
    }
    const Pack<double> before = sum.Load(row, pack);
    for (int64_t i = 0; i < kPackSize; ++i) totals.at[i] += before.at[i];
    sum.Store(totals, row, pack);
  }

  Operand<const double> parts;
  int64_t part_count;
  WideOperand<void> sum;
};

// sums[i] = the squares of every count-th pack of each row of m [R, N], from the i-th on
struct SumSquares {
  __device__ void operator()(int64_t /*row*/, int64_t i) const {
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t pack = i; pack < pack_count; pack += count) {
        const Pack<double> values = m.Load(row, pack);
        for (int64_t j = 0; j < kPackSize; ++j) sum += values.at[j] * values.at[j];
      }
    }
    sums[i] = sum;
  }

  WideOperand<const void> m;
  int64_t rows, pack_count, count;
  double* sums;
};

// to[i] = the sum of every stride-th of from[0, count), from the i-th on
struct SumEvery {
  __device__ void operator()(int64_t /*row*/, int64_t i) const {
    double sum = 0;
    for (int64_t j = i; j < count; j += stride) sum += from[j];
    to[i] = sum;
  }

  const double* from;
  int64_t count, stride;
  double* to;
};

constexpr int64_t kRowsPerPart = 64;      // at least
constexpr int64_t kMaxColumns = 1 << 16;  // that parts are kept of at once
constexpr int64_t kMaxParts = kReductionScratchBytes / (kMaxColumns * static_cast<int64_t>(sizeof(double)));
constexpr int64_t kSumsOfSquares = 1 << 17;  // threads of the first pass
constexpr int64_t kGroups = 256;             // of the second
static_assert((kSumsOfSquares + kGroups) * static_cast<int64_t>(sizeof(double)) <= kReductionScratchBytes);

cudaError_t AddColumns(cudaStream_t stream, ConstMatrixView m, MatrixView sum, double* scratch) {
  // By the shape alone, so that sums are the same wherever they are taken.
  const int64_t rows_per_part = std::max(kRowsPerPart, (m.rows + kMaxParts - 1) / kMaxParts);
  const int64_t part_count = (m.rows + rows_per_part - 1) / rows_per_part;
  const MatrixView parts(scratch, part_count, m.cols, DType::kF64);
  const cudaError_t error = Launch(stream, part_count, PackCount(m.cols),
                                   SumRows{WideOperand(m), m.rows, rows_per_part, Operand<double>(parts)});
  if (error != cudaSuccess) return error;
  return Launch(stream, 1, PackCount(m.cols), AddParts{Operand<const double>(parts), part_count, WideOperand(sum)});
}

}  // namespace

cudaError_t LaunchAddColumnSums(cudaStream_t stream, ConstMatrixView m, MatrixView sum, double* scratch) {
  for (int64_t begin = 0; begin < m.cols && m.rows > 0; begin += kMaxColumns) {
    const int64_t count = std::min(kMaxColumns, m.cols - begin);
    const cudaError_t error = AddColumns(stream, m.Cols(begin, count), sum.Cols(begin, count), scratch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchSumOfSquares(cudaStream_t stream, ConstMatrixView m, double* sum, double* scratch) {
  if (m.contiguous()) m = ConstMatrixView(m.data, m.element_count() > 0 ? 1 : 0, m.element_count(), m.dtype);
  double* const sums = DeviceAddress(scratch);
  double* const groups = sums + kSumsOfSquares;
  cudaError_t error =
      Launch(stream, 1, kSumsOfSquares, SumSquares{WideOperand(m), m.rows, PackCount(m.cols), kSumsOfSquares, sums});
  if (error == cudaSuccess) error = Launch(stream, 1, kGroups, SumEvery{sums, kSumsOfSquares, kGroups, groups});
  if (error == cudaSuccess) error = Launch(stream, 1, 1, SumEvery{groups, kGroups, 1, DeviceAddress(sum)});
  return error;
}

}  // namespace shardmlp
