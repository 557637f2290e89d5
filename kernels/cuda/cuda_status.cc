#include "kernels/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// The name of the function that `call` calls.
absl::string_view Function(absl::string_view call) { return call.substr(0, call.find('(')); }

}  // namespace

absl::Status ToStatus(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // the thread's next launch is not to be taken for it; a device that failed goes on failing
  const std::string message =
      absl::StrCat(Function(call), ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  if (error == cudaErrorMemoryAllocation) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory, message);
  }
  return Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, message);
}

absl::Status ToStatus(cublasStatus_t error, absl::string_view call) {
  if (error == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(Function(call), ": ", cublasGetStatusString(error));
  if (error == CUBLAS_STATUS_ALLOC_FAILED) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory, message);
  }
  return Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, message);
}

}  // namespace shardmlp
