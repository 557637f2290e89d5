// The backend for CPUs: oneDNN for f32 and bf16, CBLAS for f64.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace shardmlp {

struct CpuBackendOptions {
  int threads = 0;           // 0: as many as the process may run on
  int64_t memory_bytes = 0;  // that Allocate may give out in all; 0: what the machine, or its cgroup, has
};

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuBackendOptions& options = {});

}  // namespace shardmlp
