// Matrices as everything here passes them: a view of rows in somebody else's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64 };

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 4;
    case DType::kBF16: return 2;
    case DType::kF16: return 2;
    case DType::kF64: return 8;
  }
  return 0;
}

constexpr absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF64: return "f64";
  }
  return "?";
}

// What weight gradients, master weights and optimizer state of a `dtype` model are kept in: f64 for f64, else f32.
constexpr DType AccumulatorOf(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// A non-owning, row-major view [rows, cols]. `row_stride` is in elements and at least `cols`. The memory may be one
// that the host can't touch; whoever reads `data` knows where it lies. An empty view (no data, no rows) stands for an
// absent matrix, such as the bias of a layer without one.
template <typename Void>
struct BasicMatrixView {
  Void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  DType dtype = DType::kF32;

  BasicMatrixView() = default;
  BasicMatrixView(Void* data, int64_t rows, int64_t cols, DType dtype)
      : BasicMatrixView(data, rows, cols, cols, dtype) {}
  BasicMatrixView(Void* data, int64_t rows, int64_t cols, int64_t row_stride, DType dtype)
      : data(data), rows(rows), cols(cols), row_stride(row_stride), dtype(dtype) {}
  // A mutable view reads as a const one.
  template <typename OtherVoid>
  BasicMatrixView(const BasicMatrixView<OtherVoid>& other)  // NOLINT(google-explicit-constructor)
      : BasicMatrixView(other.data, other.rows, other.cols, other.row_stride, other.dtype) {}

  bool empty() const { return rows == 0 || cols == 0; }
  bool contiguous() const { return row_stride == cols || rows <= 1; }
  int64_t element_count() const { return rows * cols; }
  // Of the elements alone, without what lies between rows.
  int64_t byte_count() const { return rows * cols * SizeOf(dtype); }

  // Rows [begin, begin + count).
  BasicMatrixView Rows(int64_t begin, int64_t count) const {
    return {Offset(begin * row_stride), count, cols, row_stride, dtype};
  }
  // Columns [begin, begin + count).
  BasicMatrixView Cols(int64_t begin, int64_t count) const { return {Offset(begin), rows, count, row_stride, dtype}; }
  // T must be the type that `dtype` names.
  template <typename T>
  auto* as() const {
    if constexpr (std::is_const_v<Void>) {
      return static_cast<const T*>(data);
    } else {
      return static_cast<T*>(data);
    }
  }
  // "[4, 128] f32"
  std::string ToString() const { return absl::StrCat("[", rows, ", ", cols, "] ", Name(dtype)); }

 private:
  Void* Offset(int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * SizeOf(dtype);
  }
};

using MatrixView = BasicMatrixView<void>;
using ConstMatrixView = BasicMatrixView<const void>;

}  // namespace shardmlp
