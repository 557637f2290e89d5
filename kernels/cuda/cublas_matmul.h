// Matrix products by cuBLAS.
#pragma once

#include <cublas_v2.h>

#include "absl/status/status.h"
#include "kernels/backend.h"

namespace shardmlp {

// Enqueues c = op(a) op(b), or += where `accumulate`, on the handle's stream. Sums are in f32, or f64 for f64; the bias
// is not looked at. `tf32`: whether f32 products may round their operands to 10 bits. Operands are checked by the
// caller (operand_checks.h), and none is empty.
absl::Status CublasMatMul(cublasHandle_t cublas, const Gemm& gemm, bool accumulate, bool tf32);

}  // namespace shardmlp
