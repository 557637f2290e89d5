// Which device a server computes on.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace shardmlp {

enum class DeviceKind {
  kAuto,  // the first GPU where there is one, else the CPU
  kCpu,
  kCuda,
};

struct DeviceOptions {
  DeviceKind kind = DeviceKind::kAuto;
  int gpu = 0;               // of those that the process sees
  int threads = 0;           // of the CPU; 0: as many as the process may run on
  int64_t memory_bytes = 0;  // that the device may give out in all; 0: what it has
  bool tf32 = false;         // see cuda_backend.h
};

// Whether they mean a GPU, on this machine.
bool IsGpu(const DeviceOptions& options);

// As the backend that is asked for fails.
absl::StatusOr<std::unique_ptr<Backend>> OpenDevice(const DeviceOptions& options);

}  // namespace shardmlp
