// The backend for NVIDIA GPUs: cuBLAS for products, kernels of our own for the rest. Where the program is built without
// a CUDA toolkit, no_cuda.cc stands in, and no device is ever found.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace shardmlp {

struct CudaBackendOptions {
  int device = 0;            // index among the GPUs that the process sees
  int64_t memory_bytes = 0;  // of device memory that Allocate may give out in all; 0: what is free at the start
  int64_t host_bytes = 0;    // of pinned host memory; 0: what the machine, or its cgroup, has
  // Whether f32 products may run on TF32 tensor cores, which round their operands to 10 bits. Off: a model served in
  // f32 is held to 1e-5 of exact arithmetic (error_bounds.h), and TF32 alone is off by 5e-4.
  bool tf32 = false;
};

// 0 where there is no GPU, no driver, or no CUDA in this program.
int CudaDeviceCount();

// Copies and computes on three streams of the GPU. FAILED_PRECONDITION (DEVICE_FAILED) where there is no such GPU or it
// is older than compute capability 8.0. A failure of work on the GPU is INTERNAL (DEVICE_FAILED), as is every call
// after it.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options = {});

}  // namespace shardmlp
