#include "tests/kernels/device_matrix.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"

namespace shardmlp::testing {
namespace {

Buffer Staging(Backend& backend, int64_t element_count) {
  return backend.Allocate(Memory::kStaging, element_count * SizeOf(DType::kF64)).value();
}

// to = values, by way of f64 staging memory.
void Upload(Backend& backend, const Dense& values, MatrixView to) {
  if (to.empty()) return;
  const Buffer staging = Staging(backend, to.element_count());
  std::copy(values.values.begin(), values.values.end(), static_cast<double*>(staging.data()));
  EXPECT_TRUE(backend.Copy(Stream::kCopyIn, staging.View(to.rows, to.cols, DType::kF64), to).ok());
  Finish(backend, Stream::kCopyIn);
}

Dense Download(Backend& backend, ConstMatrixView from) {
  Dense values(from.rows, from.cols);
  if (from.empty()) return values;
  Finish(backend, Stream::kCompute);
  const Buffer staging = Staging(backend, from.element_count());
  EXPECT_TRUE(backend.Copy(Stream::kCopyOut, from, staging.View(from.rows, from.cols, DType::kF64)).ok());
  Finish(backend, Stream::kCopyOut);
  std::copy_n(static_cast<const double*>(staging.data()), values.values.size(), values.values.begin());
  return values;
}

}  // namespace

DeviceMatrix::DeviceMatrix(Backend& backend, int64_t rows, int64_t cols, DType dtype, int64_t padding)
    : backend_(backend),
      rows_(rows),
      cols_(cols),
      stride_(cols + padding),
      dtype_(dtype),
      buffer_(backend.Allocate(Memory::kDevice, rows * (cols + padding) * SizeOf(dtype)).value()) {
  Upload(backend, Dense(rows, stride_, NAN), padded());
}

DeviceMatrix::DeviceMatrix(Backend& backend, const Dense& values, DType dtype, int64_t padding)
    : DeviceMatrix(backend, values.rows, values.cols, dtype, padding) {
  Write(values);
}

DeviceMatrix::~DeviceMatrix() {
  Finish(backend_, Stream::kCompute);  // what may use the memory still
  if (stride_ == cols_ || rows_ == 0) return;
  const Dense padding = Download(backend_, padded().Cols(cols_, stride_ - cols_));
  EXPECT_TRUE(std::all_of(padding.values.begin(), padding.values.end(), [](double x) { return std::isnan(x); }))
      << "something wrote between the rows of a " << view().ToString();
}

MatrixView DeviceMatrix::view() const { return padded().Cols(0, cols_); }
void DeviceMatrix::Write(const Dense& values) { Upload(backend_, values, view()); }
Dense DeviceMatrix::Read() const { return Download(backend_, view()); }

void Finish(Backend& backend, Stream stream) {
  const absl::StatusOr<std::unique_ptr<Event>> event = backend.Record(stream);
  ASSERT_TRUE(event.ok()) << event.status();
  const absl::Status status = backend.Synchronize(**event);
  ASSERT_TRUE(status.ok()) << status;
}

Dense Rounded(Backend& backend, const Dense& values, DType dtype) {
  return DeviceMatrix(backend, values, dtype).Read();
}

}  // namespace shardmlp::testing
