// The conformance suite's list where the CUDA libraries are the emulation: on the second device, so that a call for the
// first, which is any thread's own, is seen.
#include "tests/kernels/backends.h"

#include "kernels/cuda/cuda_backend.h"
#include "tests/cuda_emulation/emulation.h"

namespace shardmlp::testing {
namespace {

// `reserved_bytes`: of which buffers are parts; 0: each is an allocation of its own, at whose end a kernel that goes on
// is seen.
BackendFactory Emulated(const std::string& name, uint64_t seed, int64_t reserved_bytes) {
  return {name, [=] {
            emulation::SetSeed(seed);
            auto backend = MakeCudaBackend({.device = 1}).value();
            if (reserved_bytes > 0) {
              EXPECT_TRUE(backend->Reserve(reserved_bytes).ok());
            }
            return backend;
          }};
}

// Nothing that the suite did may have been a fault, or be left over.
class NoFaults : public ::testing::Environment {
 public:
  void TearDown() override {
    EXPECT_TRUE(emulation::TakeFaults().empty());
    EXPECT_EQ(emulation::live_object_count(), 0);
  }
};

[[maybe_unused]] const auto* const no_faults = ::testing::AddGlobalTestEnvironment(new NoFaults());

}  // namespace

std::vector<BackendFactory> Backends() {
  return {Emulated("cuda_emulated", 1, 0), Emulated("cuda_emulated_late", 0, 0),
          Emulated("cuda_emulated_reserved", 2, int64_t{64} << 20)};
}

}  // namespace shardmlp::testing
