#include "kernels/operand_checks.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status ShapeError(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape, message);
}

absl::Status DTypeError(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidDType, message);
}

// One of f32, bf16 and f64, in which tiles are computed.
absl::Status CheckComputed(absl::string_view name, DType dtype) {
  if (dtype != DType::kF16) return absl::OkStatus();
  return DTypeError(absl::StrCat(name, " is f16, expected f32, bf16 or f64"));
}

}  // namespace

absl::Status CheckMatrix(absl::string_view name, const ConstMatrixView& m, int64_t rows, int64_t cols, DType dtype) {
  if (m.rows != rows || m.cols != cols) {
    return ShapeError(absl::StrCat(name, " is ", m.ToString(), ", expected [", rows, ", ", cols, "]"));
  }
  if (m.dtype != dtype) return DTypeError(absl::StrCat(name, " is ", m.ToString(), ", expected ", Name(dtype)));
  if (m.empty()) return absl::OkStatus();
  if (m.data == nullptr) return ShapeError(absl::StrCat(name, " ", m.ToString(), " has no data"));
  if (m.rows > 1 && m.row_stride < m.cols) {
    return ShapeError(absl::StrCat(name, " ", m.ToString(), " has a row stride of ", m.row_stride));
  }
  return absl::OkStatus();
}

absl::Status CheckCopy(const ConstMatrixView& from, const ConstMatrixView& to) {
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("from", from, from.rows, from.cols, from.dtype));
  return CheckMatrix("to", to, from.rows, from.cols, to.dtype);
}

absl::Status CheckGemm(const Gemm& gemm) {
  const int64_t m = gemm.c.rows;
  const int64_t n = gemm.c.cols;
  const int64_t k = gemm.transpose_a ? gemm.a.rows : gemm.a.cols;
  const DType dtype = gemm.a.dtype;
  SHARDMLP_RETURN_IF_ERROR(CheckComputed("a", dtype));
  SHARDMLP_RETURN_IF_ERROR(gemm.transpose_a ? CheckMatrix("transposed a", gemm.a, k, m, dtype)
                                            : CheckMatrix("a", gemm.a, m, k, dtype));
  SHARDMLP_RETURN_IF_ERROR(gemm.transpose_b ? CheckMatrix("transposed b", gemm.b, n, k, dtype)
                                            : CheckMatrix("b", gemm.b, k, n, dtype));
  const bool widened = dtype == DType::kBF16 && gemm.c.dtype == DType::kF32;
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("c", gemm.c, m, n, widened ? DType::kF32 : dtype));
  if (gemm.bias.empty()) return absl::OkStatus();
  if (gemm.accumulate) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, "a bias with accumulate");
  }
  return CheckMatrix("bias", gemm.bias, 1, n, gemm.bias.dtype == gemm.c.dtype ? gemm.c.dtype : dtype);
}

absl::Status CheckActivation(const Activation& activation, const ConstMatrixView& gate_up,
                             const ConstMatrixView& inner) {
  SHARDMLP_RETURN_IF_ERROR(CheckComputed("gate_up", gate_up.dtype));
  if (activation.kind == ActivationKind::kClampedSwiglu && !activation.gated) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, "clamped_swiglu without a gate");
  }
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("inner", inner, inner.rows, inner.cols, gate_up.dtype));
  return CheckMatrix("gate_up", gate_up, inner.rows, activation.gated ? 2 * inner.cols : inner.cols, gate_up.dtype);
}

absl::Status CheckColumnSums(const ConstMatrixView& m, const ConstMatrixView& sum) {
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("m", m, m.rows, m.cols, m.dtype));
  return CheckMatrix("sum", sum, 1, m.cols, AccumulatorOf(m.dtype));
}

absl::Status CheckUpdate(const OptimizerUpdate& update) {
  if (std::holds_alternative<KeepFrozen>(update.hyperparameters)) return absl::OkStatus();
  SHARDMLP_RETURN_IF_ERROR(Validate(update.hyperparameters));
  if (update.update_count < 1) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("update count is ", update.update_count, ", expected at least 1"));
  }
  const ConstMatrixView master = update.master;
  const DType dtype = AccumulatorOf(master.dtype);
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("master", master, master.rows, master.cols, dtype));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("gradient", update.gradient, master.rows, master.cols, dtype));
  const bool adam = std::holds_alternative<AdamW>(update.hyperparameters);
  if (adam || std::get<Sgd>(update.hyperparameters).momentum != 0) {
    SHARDMLP_RETURN_IF_ERROR(CheckMatrix("moment1", update.moment1, master.rows, master.cols, dtype));
  }
  if (adam) SHARDMLP_RETURN_IF_ERROR(CheckMatrix("moment2", update.moment2, master.rows, master.cols, dtype));
  if (update.weights.empty()) return absl::OkStatus();
  return CheckMatrix("weights", update.weights, master.rows, master.cols, update.weights.dtype);
}

}  // namespace shardmlp
