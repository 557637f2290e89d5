// kernels/cuda/nvcc/launch.h for the emulation: kernels are C++ functions that run when the emulated stream gets there.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__

namespace shardmlp {
namespace emulation {

// Enqueues a kernel; `run` gets whether to go through its indices backwards, which no kernel may notice.
cudaError_t EnqueueKernel(cudaStream_t stream, std::function<void(bool backwards)> run);
// Reports an address that device code can't reach.
void CheckDeviceAddress(const void* data);
// Ends the running kernel, as the hardware does, where the address is no multiple of 16.
void CheckAligned(const void* address);

// f(i) for each i below `count`.
template <typename F>
void ForEach(int64_t count, bool backwards, const F& f) {
  for (int64_t i = 0; i < count; ++i) f(backwards ? count - 1 - i : i);
}

}  // namespace emulation

inline constexpr int64_t kAnyBlocks = int64_t{1} << 30;

template <typename F>
cudaError_t Launch(cudaStream_t stream, int64_t rows, int64_t units, const F& f, int64_t /*max_blocks*/ = kAnyBlocks) {
  if (rows == 0 || units == 0) return cudaSuccess;
  return emulation::EnqueueKernel(stream, [=](bool backwards) {
    emulation::ForEach(rows, backwards,
                       [&](int64_t row) { emulation::ForEach(units, backwards, [&](int64_t unit) { f(row, unit); }); });
  });
}

template <typename T>
T* DeviceAddress(T* data) {
  emulation::CheckDeviceAddress(data);
  return data;
}

template <typename Chunk>
Chunk Load16(const void* address) {
  emulation::CheckAligned(address);
  Chunk chunk;
  std::memcpy(&chunk, address, sizeof(chunk));
  return chunk;
}
template <typename Chunk>
void Store16(const Chunk& chunk, void* address) {
  emulation::CheckAligned(address);
  std::memcpy(address, &chunk, sizeof(chunk));
}

}  // namespace shardmlp
