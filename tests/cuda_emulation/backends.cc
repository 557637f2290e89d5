// The conformance suite's list where the CUDA libraries are the emulation: on the second device, so that a call for the
// first, which is any thread's own, is seen.
#include "tests/kernels/backends.h"

#include "kernels/cuda/cuda_backend.h"
#include "tests/cuda_emulation/emulation.h"

namespace shardmlp::testing {
namespace {

BackendFactory Emulated(const std::string& name, uint64_t seed) {
  return {name, [seed] {
            emulation::SetSeed(seed);
            return MakeCudaBackend({.device = 1}).value();
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

std::vector<BackendFactory> Backends() { return {Emulated("cuda_emulated", 1), Emulated("cuda_emulated_late", 0)}; }

}  // namespace shardmlp::testing
