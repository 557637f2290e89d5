// A matrix in a backend's device memory, filled and read through staging memory as the server does it.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/matrix.h"
#include "tests/kernels/dense.h"

namespace shardmlp::testing {

// `padding` elements follow each row. Elements and padding begin as NaN; the destructor checks that padding still is.
class DeviceMatrix {
 public:
  DeviceMatrix(Backend& backend, int64_t rows, int64_t cols, DType dtype, int64_t padding = 0);
  // Holding `values`, rounded to `dtype`.
  DeviceMatrix(Backend& backend, const Dense& values, DType dtype, int64_t padding = 0);
  ~DeviceMatrix();
  DeviceMatrix(const DeviceMatrix&) = delete;
  DeviceMatrix& operator=(const DeviceMatrix&) = delete;

  MatrixView view() const;
  void Write(const Dense& values);
  Dense Read() const;

 private:
  MatrixView padded() const { return buffer_.View(rows_, stride_, dtype_); }

  Backend& backend_;
  int64_t rows_, cols_, stride_;
  DType dtype_;
  Buffer buffer_;
};

// Blocks until all that was enqueued on `stream` has run.
void Finish(Backend& backend, Stream stream);

// What `dtype` makes of `values`.
Dense Rounded(Backend& backend, const Dense& values, DType dtype);

}  // namespace shardmlp::testing
