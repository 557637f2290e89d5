// Matrix products on the CPU: oneDNN for f32 and bf16, CBLAS for f64. Operands are checked by the caller (CheckGemm).
//
// Not thread-safe.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/matrix.h"

namespace shardmlp {

// oneDNN's primitives, made once a shape and kept.
class OneDnnMatMul {
 public:
  OneDnnMatMul();
  ~OneDnnMatMul();

  // Whether this machine's oneDNN multiplies in `dtype`.
  bool Supports(DType dtype) const;
  // INTERNAL (DEVICE_FAILED) where oneDNN fails.
  absl::Status Run(const Gemm& gemm);

 private:
  // All that a primitive is specialised to.
  struct Shape {
    int64_t m, n, k;
    int64_t a_stride, b_stride, c_stride;
    DType a_dtype, c_dtype, bias_dtype;
    bool transpose_a, transpose_b, accumulate, bias;
    auto operator<=>(const Shape&) const = default;
  };
  class Library;
  struct Prepared;

  static Shape ShapeOf(const Gemm& gemm);
  Prepared& Prepare(const Shape& shape);

  std::unique_ptr<Library> library_;
  std::map<Shape, std::unique_ptr<Prepared>> prepared_;  // at most kMaxPrepared
};

// f64 alone. INVALID_ARGUMENT for dimensions beyond CBLAS's 32 bits.
absl::Status CblasMatMul(const Gemm& gemm);
// How many threads CblasMatMul uses from now on; a setting of the process.
void SetCblasThreads(int threads);

}  // namespace shardmlp
