// Matrices with known bits, with or without gaps between their rows, and what the fake server makes of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/matrix.h"

namespace shardmlp::fake {

// Owns a [rows, cols] matrix of `dtype` whose rows are `gap` elements apart. Gaps hold 0x77.
class MatrixData {
 public:
  static constexpr char kGap = 0x77;

  MatrixData(int64_t rows, int64_t cols, DType dtype, int64_t gap = 0)
      : rows_(rows), cols_(cols), gap_(gap), dtype_(dtype), bytes_(rows * (cols + gap) * SizeOf(dtype), kGap) {}

  // Fills the elements, not the gaps, with bits that differ from row to row and column to column.
  MatrixData& Fill(uint32_t seed) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t i = 0; i < row_bytes(); ++i) {
        seed = seed * 1664525 + 1013904223;
        at(row, i) = static_cast<char>(seed >> 24);
      }
    }
    return *this;
  }

  MatrixView view() { return {bytes_.data(), rows_, cols_, cols_ + gap_, dtype_}; }
  int64_t rows() const { return rows_; }
  int64_t row_bytes() const { return cols_ * SizeOf(dtype_); }
  char& at(int64_t row, int64_t byte) { return bytes_[row * (cols_ + gap_) * SizeOf(dtype_) + byte]; }

  // Checks that nothing was written between the rows.
  void ExpectGapsIntact() {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t i = row_bytes(); i < row_bytes() + gap_ * SizeOf(dtype_); ++i) ASSERT_EQ(at(row, i), kGap);
    }
  }

 private:
  int64_t rows_;
  int64_t cols_;
  int64_t gap_;
  DType dtype_;
  std::vector<char> bytes_;
};

// y[r, o] = ~x[r, o % H].
inline void ExpectForward(MatrixData& x, MatrixData& y) {
  for (int64_t row = 0; row < y.rows(); ++row) {
    for (int64_t i = 0; i < y.row_bytes(); ++i) {
      ASSERT_EQ(y.at(row, i), static_cast<char>(~x.at(row, i % x.row_bytes()))) << "row " << row << " byte " << i;
    }
  }
  y.ExpectGapsIntact();
}

// dx[r, h] = x[r, h] ^ dy[r, h % O].
inline void ExpectBackward(MatrixData& x, MatrixData& dy, MatrixData& dx) {
  for (int64_t row = 0; row < dx.rows(); ++row) {
    for (int64_t i = 0; i < dx.row_bytes(); ++i) {
      ASSERT_EQ(dx.at(row, i), static_cast<char>(x.at(row, i) ^ dy.at(row, i % dy.row_bytes())))
          << "row " << row << " byte " << i;
    }
  }
  dx.ExpectGapsIntact();
}

}  // namespace shardmlp::fake
