// Move-only owners of what the CUDA libraries give handles of.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/status.h"

namespace shardmlp {

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};

using DeviceBlock = std::unique_ptr<void, Destroy<cudaFree>>;
using StreamHandle = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Destroy<cudaStreamDestroy>>;
using EventHandle = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Destroy<cudaEventDestroy>>;
using CublasHandle = std::unique_ptr<std::remove_pointer_t<cublasHandle_t>, Destroy<cublasDestroy>>;

// Of the current device. A stream waits for no other unless an event says so.
inline absl::StatusOr<StreamHandle> MakeStream() {
  cudaStream_t stream = nullptr;
  SHARDMLP_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return StreamHandle(stream);
}

inline absl::StatusOr<EventHandle> MakeEvent(unsigned flags) {
  cudaEvent_t event = nullptr;
  SHARDMLP_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, flags));
  return EventHandle(event);
}

inline absl::StatusOr<CublasHandle> MakeCublas() {
  cublasHandle_t cublas = nullptr;
  SHARDMLP_RETURN_IF_CUDA_ERROR(cublasCreate(&cublas));
  return CublasHandle(cublas);
}

}  // namespace shardmlp
