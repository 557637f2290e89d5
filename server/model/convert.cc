#include "server/model/convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/number.h"

namespace shardmlp {
namespace {

template <typename From, typename To>
void Convert(const char* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    To converted;
    std::memcpy(&value, from + i * sizeof(From), sizeof(From));
    Store(Load(value), converted);
    std::memcpy(to + i * sizeof(To), &converted, sizeof(To));
  }
}

// Whether element `i` of `from` is finite as a `To`.
template <typename From, typename To>
bool IsFiniteAs(const char* from, int64_t i) {
  From value;
  To converted;
  std::memcpy(&value, from + i * sizeof(From), sizeof(From));
  Store(Load(value), converted);
  return std::abs(Load(converted)) <= std::numeric_limits<Arithmetic<To>>::max();
}

// Elements that are looked at before one of them is looked for.
constexpr int64_t kFiniteBlock = 4096;

template <typename From, typename To>
int64_t FirstNonFinite(const char* from, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kFiniteBlock) {
    const int64_t end = std::min(count, begin + kFiniteBlock);
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) finite &= IsFiniteAs<From, To>(from, i);
    if (finite) continue;
    int64_t i = begin;
    while (IsFiniteAs<From, To>(from, i)) ++i;
    return i;
  }
  return -1;
}

// Columns that are taken at once, so that each line of `from` is read once.
constexpr int64_t kBlockCols = 16;

// block[c][r] = from[r][first + c], for `count` columns.
template <typename T>
void GatherColumns(const char* from, int64_t rows, int64_t cols, int64_t first, int64_t count, char* block) {
  for (int64_t row = 0; row < rows; ++row) {
    const char* source = from + (row * cols + first) * sizeof(T);
    for (int64_t col = 0; col < count; ++col) {
      std::memcpy(block + (col * rows + row) * sizeof(T), source + col * sizeof(T), sizeof(T));
    }
  }
}

}  // namespace

void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  if (from_dtype == to_dtype) {
    std::memcpy(target, source, count * SizeOf(to_dtype));
    return;
  }
  WithDType(from_dtype, [&](auto from_tag) {
    WithDType(to_dtype, [&](auto to_tag) {
      Convert<typename decltype(from_tag)::Type, typename decltype(to_tag)::Type>(source, target, count);
    });
  });
}

int64_t FirstNonFinite(const void* from, DType from_dtype, DType to_dtype, int64_t count) {
  return WithDType(from_dtype, [&](auto from_tag) {
    return WithDType(to_dtype, [&](auto to_tag) {
      return FirstNonFinite<typename decltype(from_tag)::Type, typename decltype(to_tag)::Type>(
          static_cast<const char*>(from), count);
    });
  });
}

double ElementAt(const void* from, DType dtype, int64_t index) {
  double element = 0;
  ConvertElements(static_cast<const char*>(from) + index * SizeOf(dtype), dtype, &element, DType::kF64, 1);
  return element;
}

void ConvertTransposed(const void* from, DType from_dtype, MatrixView to) {
  const int64_t rows = to.cols;
  const int64_t cols = to.rows;
  std::vector<char> block(kBlockCols * rows * SizeOf(from_dtype));
  for (int64_t first = 0; first < cols; first += kBlockCols) {
    const int64_t count = std::min(kBlockCols, cols - first);
    WithDType(from_dtype, [&](auto tag) {
      GatherColumns<typename decltype(tag)::Type>(static_cast<const char*>(from), rows, cols, first, count,
                                                  block.data());
    });
    for (int64_t col = 0; col < count; ++col) {
      ConvertElements(block.data() + col * rows * SizeOf(from_dtype), from_dtype, to.Rows(first + col, 1).data,
                      to.dtype, rows);
    }
  }
}

}  // namespace shardmlp
