// Stands in for the CUDA backend in a program that is built without a CUDA toolkit.
#include "kernels/cuda/cuda_backend.h"
#include "kernels/status.h"

namespace shardmlp {

int CudaDeviceCount() { return 0; }

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& /*options*/) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kDeviceFailed,
               "there is no CUDA in this program: it was built where no CUDA toolkit was found");
}

}  // namespace shardmlp
