#include "server/device.h"

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace shardmlp {

bool IsGpu(const DeviceOptions& options) {
  return options.kind == DeviceKind::kCuda || (options.kind == DeviceKind::kAuto && CudaDeviceCount() > 0);
}

absl::StatusOr<std::unique_ptr<Backend>> OpenDevice(const DeviceOptions& options) {
  if (IsGpu(options)) {
    return MakeCudaBackend({.device = options.gpu, .memory_bytes = options.memory_bytes, .tf32 = options.tf32});
  }
  return MakeCpuBackend({.threads = options.threads, .memory_bytes = options.memory_bytes});
}

}  // namespace shardmlp
