#include "kernels/cuda/cublas_matmul.h"

#include "kernels/cuda/cuda_status.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

cudaDataType DataType(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CUDA_R_32F;
    case DType::kBF16: return CUDA_R_16BF;
    case DType::kF16: return CUDA_R_16F;
    case DType::kF64: break;
  }
  return CUDA_R_64F;
}

cublasComputeType_t ComputeType(DType dtype, bool tf32) {
  if (dtype == DType::kF64) return CUBLAS_COMPUTE_64F;
  return dtype == DType::kF32 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

int64_t LeadingDimension(const ConstMatrixView& m) { return m.rows > 1 ? m.row_stride : m.cols; }

cublasOperation_t Operation(bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; }

}  // namespace

// A row-major matrix is, column-major, its transpose: C^T = op(B)^T op(A)^T, with the operands as they lie.
absl::Status CublasMatMul(cublasHandle_t cublas, const Gemm& gemm, bool accumulate, bool tf32) {
  const DType dtype = gemm.a.dtype;
  const int64_t k = gemm.transpose_a ? gemm.a.rows : gemm.a.cols;
  // Of the type that sums are in.
  const float one32 = 1, beta32 = accumulate ? 1 : 0;
  const double one64 = 1, beta64 = accumulate ? 1 : 0;
  const bool f64 = dtype == DType::kF64;
  const void* const one = f64 ? static_cast<const void*>(&one64) : &one32;
  const void* const beta = f64 ? static_cast<const void*>(&beta64) : &beta32;
  SHARDMLP_RETURN_IF_CUDA_ERROR(cublasGemmEx_64(
      cublas, Operation(gemm.transpose_b), Operation(gemm.transpose_a), gemm.c.cols, gemm.c.rows, k, one, gemm.b.data,
      DataType(dtype), LeadingDimension(gemm.b), gemm.a.data, DataType(dtype), LeadingDimension(gemm.a), beta,
      gemm.c.data, DataType(gemm.c.dtype), LeadingDimension(gemm.c), ComputeType(dtype, tf32), CUBLAS_GEMM_DEFAULT));
  return absl::OkStatus();
}

}  // namespace shardmlp
