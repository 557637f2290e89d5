// Matrix products on the CPU: oneDNN for f32 and bf16, CBLAS for f64. Operands are checked by the caller (CheckGemm).
//
// Not thread-safe.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/matrix.h"

namespace shardmlp {

// f32 and bf16.
//
// oneDNN has two kinds of matmul: kernels generated for one shape, and a blocked GEMM, which is the faster on products
// with row-major weights, and the one that it takes where the number of summands is not known before it runs. Of a bf16
// result that one needs an f32 copy. The result's shape is therefore given when a primitive is made, so that the copy's
// memory is kept from product to product and not taken from the system for each; and wide results are computed in
// slabs of columns, so that it is small. Primitives are made once and kept.
class OneDnnMatMul {
 public:
  OneDnnMatMul();
  ~OneDnnMatMul();

  // Whether this machine's oneDNN multiplies in `dtype`.
  bool Supports(DType dtype) const;
  // INTERNAL (DEVICE_FAILED) where oneDNN fails.
  absl::Status Run(const Gemm& gemm);

 private:
  class Library;
  // A matrix in a product: what its primitive is specialised to.
  struct Operand {
    int64_t rows, cols, stride;  // DNNL_RUNTIME_DIM_VAL where they are given when it runs
    DType dtype;
    bool transposed;
    auto operator<=>(const Operand&) const = default;
  };
  struct Product {
    Operand a, b, c;
    std::optional<Operand> bias;
    bool accumulate;
    auto operator<=>(const Product&) const = default;
  };

  static Operand Describe(const ConstMatrixView& m, bool transposed);
  static Product Describe(const Gemm& gemm);
  static Product AnySummands(Product product);
  void RunSlab(const Gemm& gemm);

  std::unique_ptr<Library> library_;
};

// f64 alone. INVALID_ARGUMENT for dimensions beyond CBLAS's 32 bits.
absl::Status CblasMatMul(const Gemm& gemm);
// How many threads CblasMatMul uses from now on; a setting of the process.
void SetCblasThreads(int threads);

}  // namespace shardmlp
