// What the CUDA runtime and cuBLAS say, as statuses.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

// OK; RESOURCE_EXHAUSTED (OUT_OF_MEMORY) where memory is short; else INTERNAL (DEVICE_FAILED). `call` is the code that
// was run, for the message.
absl::Status ToStatus(cudaError_t error, absl::string_view call);
absl::Status ToStatus(cublasStatus_t error, absl::string_view call);

}  // namespace shardmlp

// Runs a call of the runtime, of cuBLAS or of a launcher, and returns from here where it fails.
#define SHARDMLP_RETURN_IF_CUDA_ERROR(call) SHARDMLP_RETURN_IF_ERROR(::shardmlp::ToStatus((call), #call))
