#include "tests/kernels/backends.h"

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace shardmlp::testing {

std::vector<BackendFactory> Backends() {
  std::vector<BackendFactory> backends = {{"cpu", [] { return MakeCpuBackend().value(); }},
                                          {"cpu_one_thread", [] { return MakeCpuBackend({.threads = 1}).value(); }}};
  if (CudaDeviceCount() > 0) backends.push_back({"cuda", [] { return MakeCudaBackend().value(); }});
  return backends;
}

}  // namespace shardmlp::testing
