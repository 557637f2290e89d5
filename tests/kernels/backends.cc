#include "tests/kernels/backends.h"

#include "kernels/cpu/cpu_backend.h"

namespace shardmlp::testing {

std::vector<BackendFactory> Backends() {
  return {{"cpu", [] { return MakeCpuBackend().value(); }},
          {"cpu_one_thread", [] { return MakeCpuBackend({.threads = 1}).value(); }}};
}

}  // namespace shardmlp::testing
