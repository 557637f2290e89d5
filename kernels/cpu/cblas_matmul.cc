#include <cblas.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/matmul.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// CBLAS wants at least 1, whatever the size.
blasint Stride(const ConstMatrixView& m) {
  return static_cast<blasint>(std::max<int64_t>({m.rows > 1 ? m.row_stride : m.cols, m.cols, 1}));
}

}  // namespace

absl::Status CblasMatMul(const Gemm& gemm) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  for (const ConstMatrixView& m : {gemm.a, gemm.b, ConstMatrixView(gemm.c)}) {
    if (std::max(m.rows, m.row_stride) > kMax) {
      return Error(
          absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
          absl::StrCat(m.ToString(), " with a row stride of ", m.row_stride, ", expected at most ", kMax, " of each"));
    }
  }
  const int64_t k = gemm.transpose_a ? gemm.a.rows : gemm.a.cols;
  double beta = gemm.accumulate ? 1 : 0;
  if (!gemm.bias.empty()) {
    for (int64_t row = 0; row < gemm.c.rows; ++row) {
      std::copy_n(gemm.bias.as<double>(), gemm.c.cols, gemm.c.Rows(row, 1).as<double>());
    }
    beta = 1;
  }
  cblas_dgemm(CblasRowMajor, gemm.transpose_a ? CblasTrans : CblasNoTrans, gemm.transpose_b ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(gemm.c.rows), static_cast<blasint>(gemm.c.cols), static_cast<blasint>(k), 1,
              gemm.a.as<double>(), Stride(gemm.a), gemm.b.as<double>(), Stride(gemm.b), beta, gemm.c.as<double>(),
              Stride(gemm.c));
  return absl::OkStatus();
}

void SetCblasThreads(int threads) { openblas_set_num_threads(threads); }

}  // namespace shardmlp
