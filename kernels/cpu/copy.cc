#include <cstring>

#include "kernels/cpu/loops.h"
#include "kernels/number.h"

namespace shardmlp {
namespace {

template <typename From, typename To>
void ConvertRow(const From* from, To* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) Store(Load(from[i]), to[i]);
}

}  // namespace

void CopyMatrix(const Team& team, ConstMatrixView from, MatrixView to) {
  if (from.empty()) return;
  team.Split(from.rows, from.cols, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const ConstMatrixView source = from.Rows(row, 1);
      const MatrixView target = to.Rows(row, 1);
      if (from.dtype == to.dtype) {
        std::memcpy(target.data, source.data, static_cast<size_t>(source.byte_count()));
        continue;
      }
      WithDType(from.dtype, [&](auto from_tag) {
        WithDType(to.dtype, [&](auto to_tag) {
          ConvertRow(source.as<typename decltype(from_tag)::Type>(), target.as<typename decltype(to_tag)::Type>(),
                     from.cols);
        });
      });
    }
  });
}

void ZeroMatrix(const Team& team, MatrixView m) {
  if (m.empty()) return;
  team.Split(m.rows, m.cols, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memset(m.Rows(row, 1).data, 0, static_cast<size_t>(m.cols * SizeOf(m.dtype)));
    }
  });
}

}  // namespace shardmlp
