// Launchers of the CUDA kernels: each enqueues work on `stream` and says whether that could be done. Operands are
// checked by the caller (operand_checks.h) and lie in memory that the device can reach.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/activation.h"
#include "kernels/matrix.h"
#include "kernels/optimizer.h"

namespace shardmlp {

// to = from, converted; `to` [R, N], `from` [R, N], or [1, N] for every row. `over_link`: whether one of them is host
// memory; a few thread blocks keep the link busy, and more would only keep products from the GPU while they wait for
// it.
cudaError_t LaunchConvert(cudaStream_t stream, ConstMatrixView from, MatrixView to, bool over_link);

// As Backend's virtuals of these names.
cudaError_t LaunchActivationForward(cudaStream_t stream, const Activation& activation, ConstMatrixView gate_up,
                                    MatrixView a);
cudaError_t LaunchActivationBackward(cudaStream_t stream, const Activation& activation, MatrixView gate_up,
                                     MatrixView da);
cudaError_t LaunchUpdate(cudaStream_t stream, const OptimizerUpdate& update);

// Device memory that a reduction keeps its parts in; contents mean nothing between launches on one stream.
inline constexpr int64_t kReductionScratchBytes = int64_t{16} << 20;
cudaError_t LaunchAddColumnSums(cudaStream_t stream, ConstMatrixView m, MatrixView sum, double* scratch);
cudaError_t LaunchSumOfSquares(cudaStream_t stream, ConstMatrixView m, double* sum, double* scratch);

}  // namespace shardmlp
