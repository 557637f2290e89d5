// How device code is launched and reads memory: this one compiles with nvcc. The tests' emulation has another, which
// compiles the same .cu files as C++; CMake chooses by include path.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace shardmlp {

template <typename F>
__global__ void RunKernel(const F f, int64_t rows, int64_t units) {
  const int64_t unit_step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; unit < units; unit += unit_step) {
      f(row, unit);
    }
  }
}

inline constexpr int64_t kAnyBlocks = int64_t{1} << 30;

// Enqueues f(row, unit) for each of `rows` rows and `units` units, in no order, on at most `max_blocks` thread blocks.
// F is a struct of plain members and `__device__ void operator()(int64_t row, int64_t unit) const`.
template <typename F>
cudaError_t Launch(cudaStream_t stream, int64_t rows, int64_t units, const F& f, int64_t max_blocks = kAnyBlocks) {
  constexpr int64_t kThreads = 256;
  constexpr int64_t kMaxRows = 65535;
  if (rows == 0 || units == 0) return cudaSuccess;
  const int64_t across = std::min((units + kThreads - 1) / kThreads, max_blocks);
  const dim3 grid(static_cast<unsigned>(across),
                  static_cast<unsigned>(std::min({rows, kMaxRows, max_blocks / across})));
  RunKernel<<<grid, static_cast<unsigned>(kThreads), 0, stream>>>(f, rows, units);
  return cudaGetLastError();
}

// `data`, which must be memory that device code can reach: device memory, or pinned.
template <typename T>
T* DeviceAddress(T* data) {
  return data;
}

// Chunk is a trivial type of 16 bytes; `address` is a multiple of 16.
template <typename Chunk>
__device__ Chunk Load16(const void* address) {
  static_assert(sizeof(Chunk) == sizeof(uint4));
  return std::bit_cast<Chunk>(*static_cast<const uint4*>(address));
}
template <typename Chunk>
__device__ void Store16(const Chunk& chunk, void* address) {
  static_assert(sizeof(Chunk) == sizeof(uint4));
  *static_cast<uint4*>(address) = std::bit_cast<uint4>(chunk);
}

}  // namespace shardmlp
