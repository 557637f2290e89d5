// Runs device code so that a bad access ends it, and not the process.
#pragma once

#include <functional>
#include <optional>

#include "cuda_runtime_api.h"
#include "tests/cuda_emulation/address_space.h"

namespace shardmlp::emulation {

struct BadAccess {
  cudaError_t error;
  const void* address;
};

// Takes SIGSEGV: from device code it opens the memory or ends that code, from host code that touched one of the two
// spaces it tells so and ends the process. Both must outlive the process's work.
void CatchBadAccesses(AddressSpace* device, AddressSpace* pinned);

// What ended `work` before its end. It must own nothing where it may be ended.
std::optional<BadAccess> RunGuarded(const std::function<void()>& work);

// Ends the work that runs guarded on this thread.
[[noreturn]] void EndWork(BadAccess access);

}  // namespace shardmlp::emulation
