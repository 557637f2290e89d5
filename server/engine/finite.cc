#include "server/engine/finite.h"

namespace shardmlp {
namespace {

// An element is NaN or infinite exactly where all exponent bits are set.
template <typename Bits>
bool AllFinite(const Bits* values, int64_t count, Bits exponent) {
  Bits worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = values[i] & exponent;
    worst = bits > worst ? bits : worst;
  }
  return worst != exponent;
}

template <typename Bits>
int64_t FirstRow(ConstMatrixView m, Bits exponent) {
  const Bits* values = static_cast<const Bits*>(m.data);
  for (int64_t row = 0; row < m.rows; ++row) {
    if (!AllFinite(values + row * m.row_stride, m.cols, exponent)) return row;
  }
  return -1;
}

}  // namespace

int64_t FirstNonFiniteRow(ConstMatrixView m) {
  switch (m.dtype) {
    case DType::kF32: return FirstRow<uint32_t>(m, 0x7f800000u);
    case DType::kBF16: return FirstRow<uint16_t>(m, 0x7f80u);
    case DType::kF16: return FirstRow<uint16_t>(m, 0x7c00u);
    case DType::kF64: return FirstRow<uint64_t>(m, 0x7ff0000000000000u);
  }
  return -1;
}

}  // namespace shardmlp
