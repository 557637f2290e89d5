// Whether the operands of a Backend's operations fit each other; the same for every backend.
//
// Each returns INVALID_ARGUMENT (INVALID_SHAPE or INVALID_DTYPE) that says what was got and what was expected.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/activation.h"
#include "kernels/backend.h"
#include "kernels/matrix.h"
#include "kernels/optimizer.h"

namespace shardmlp {

// `m` is [rows, cols] of `dtype`, has data where it has elements, and rows that don't overlap.
absl::Status CheckMatrix(absl::string_view name, const ConstMatrixView& m, int64_t rows, int64_t cols, DType dtype);

absl::Status CheckCopy(const ConstMatrixView& from, const ConstMatrixView& to);
absl::Status CheckGemm(const Gemm& gemm);
// `inner` is A, or dA.
absl::Status CheckActivation(const Activation& activation, const ConstMatrixView& gate_up,
                             const ConstMatrixView& inner);
absl::Status CheckColumnSums(const ConstMatrixView& m, const ConstMatrixView& sum);
// Hyperparameters included.
absl::Status CheckUpdate(const OptimizerUpdate& update);

}  // namespace shardmlp
