// The devices that the engine's own tests run over, beside the CPU.
#include "tests/engine/lazy_device.h"
#include "tests/kernels/backends.h"

namespace shardmlp::testing {

std::vector<BackendFactory> Backends() {
  return {{"lazy", [] { return std::make_unique<LazyDevice>(); }}};
}

}  // namespace shardmlp::testing
