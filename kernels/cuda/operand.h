// Matrices as kernels read and write them: eight elements of a row at once, a pack, by accesses of 16 bytes where the
// memory is aligned for them and element by element elsewhere. Made on the host from views, passed to kernels by value.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/matrix.h"
#include "kernels/number.h"
#include "launch.h"

namespace shardmlp {

inline constexpr int64_t kPackSize = 8;

// Packs of a row; the last may be a part of one.
constexpr int64_t PackCount(int64_t cols) { return (cols + kPackSize - 1) / kPackSize; }

template <typename T>
struct Pack {
  T at[kPackSize];
};

// Where the elements of a matrix lie, whatever they are.
struct Layout {
  template <typename View>
  explicit Layout(const View& view)
      : row_stride(view.rows > 1 ? view.row_stride : 0),
        cols(view.cols),
        aligned(reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && row_stride * SizeOf(view.dtype) % 16 == 0) {}

  // 16-byte parts of a pack.
  template <typename T>
  struct Chunks {
    struct Chunk {
      uint32_t words[4];
    };
    static constexpr int64_t kCount = sizeof(Pack<T>) / sizeof(Chunk);
    Chunk at[kCount];
  };

  __device__ bool WholeAndAligned(int64_t pack) const { return aligned && (pack + 1) * kPackSize <= cols; }

  // Elements beyond the row's end are 0.
  template <typename T>
  __device__ Pack<T> Load(const T* data, int64_t row, int64_t pack) const {
    const T* const from = data + row * row_stride + pack * kPackSize;
    if (WholeAndAligned(pack)) {
      Chunks<T> chunks;
      for (int64_t i = 0; i < Chunks<T>::kCount; ++i) {
        chunks.at[i] = Load16<typename Chunks<T>::Chunk>(reinterpret_cast<const char*>(from) + 16 * i);
      }
      return std::bit_cast<Pack<T>>(chunks);
    }
    Pack<T> loaded = {};
    for (int64_t i = 0; i < kPackSize; ++i) {
      if (pack * kPackSize + i < cols) loaded.at[i] = from[i];
    }
    return loaded;
  }

  // Elements beyond the row's end are dropped.
  template <typename T>
  __device__ void Store(const Pack<T>& values, T* data, int64_t row, int64_t pack) const {
    T* const to = data + row * row_stride + pack * kPackSize;
    if (WholeAndAligned(pack)) {
      const auto chunks = std::bit_cast<Chunks<T>>(values);
      for (int64_t i = 0; i < Chunks<T>::kCount; ++i) {
        Store16(chunks.at[i], reinterpret_cast<char*>(to) + 16 * i);
      }
      return;
    }
    for (int64_t i = 0; i < kPackSize; ++i) {
      if (pack * kPackSize + i < cols) to[i] = values.at[i];
    }
  }

  int64_t row_stride;  // in elements; 0 for a single row
  int64_t cols;
  bool aligned;
};

// A matrix [R, N] of T; T is const where it is only read.
template <typename T>
class Operand {
 public:
  using Element = std::remove_const_t<T>;

  template <typename View>
  explicit Operand(const View& view) : data_(DeviceAddress(view.template as<Element>())), layout_(view) {}

  __device__ Pack<Element> Load(int64_t row, int64_t pack) const {
    return layout_.template Load<Element>(data_, row, pack);
  }
  __device__ void Store(const Pack<Element>& values, int64_t row, int64_t pack) const {
    layout_.template Store<Element>(values, data_, row, pack);
  }

 private:
  T* data_;
  Layout layout_;
};

// A matrix [R, N] of any dtype, as f64: every element of every dtype is one exactly, and stores round once.
template <typename Void>
class WideOperand {
 public:
  explicit WideOperand(const BasicMatrixView<Void>& view)
      : data_(DeviceAddress(view.data)), layout_(view), dtype_(view.dtype) {}

  __device__ bool empty() const { return data_ == nullptr; }

  __device__ Pack<double> Load(int64_t row, int64_t pack) const {
    Pack<double> wide;
    WithDType(dtype_, [&](auto type) {
      using T = typename decltype(type)::Type;
      const Pack<T> values = layout_.template Load<T>(static_cast<const T*>(data_), row, pack);
      for (int64_t i = 0; i < kPackSize; ++i) wide.at[i] = shardmlp::Load(values.at[i]);
    });
    return wide;
  }
  __device__ void Store(const Pack<double>& wide, int64_t row, int64_t pack) const {
    WithDType(dtype_, [&](auto type) {
      using T = typename decltype(type)::Type;
      Pack<T> values;
      for (int64_t i = 0; i < kPackSize; ++i) shardmlp::Store(wide.at[i], values.at[i]);
      layout_.template Store<T>(values, static_cast<T*>(data_), row, pack);
    });
  }

 private:
  Void* data_;
  Layout layout_;
  DType dtype_;
};

}  // namespace shardmlp
