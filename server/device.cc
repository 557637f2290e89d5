#include "server/device.h"

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace shardmlp {

absl::StatusOr<std::unique_ptr<Backend>> OpenDevice(const DeviceOptions& options) {
  if (options.kind == DeviceKind::kCuda || (options.kind == DeviceKind::kAuto && CudaDeviceCount() > 0)) {
    return MakeCudaBackend({.device = options.gpu, .memory_bytes = options.memory_bytes, .tf32 = options.tf32});
  }
  return MakeCpuBackend({.threads = options.threads, .memory_bytes = options.memory_bytes});
}

}  // namespace shardmlp
