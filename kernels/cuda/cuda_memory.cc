#include "kernels/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/status.h"

namespace shardmlp {

absl::StatusOr<Buffer> CudaMemory::Allocate(Memory memory, int64_t bytes) {
  if (bytes == 0) return Buffer();
  if (bytes < 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("allocation of ", bytes, " bytes"));
  }
  Count& count = CountOf(memory);
  int64_t used = count.used.load();
  do {
    if (bytes > count.limit - used) {
      return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                   absl::StrCat("allocation of ", bytes, " bytes of ", memory == Memory::kDevice ? "device" : "staging",
                                " memory: ", used, " of ", count.limit, " bytes are in use"),
                   {{"requested_bytes", absl::StrCat(bytes)},
                    {"used_bytes", absl::StrCat(used)},
                    {"limit_bytes", absl::StrCat(count.limit)}});
    }
  } while (!count.used.compare_exchange_weak(used, used + bytes));
  void* data = nullptr;
  absl::Status status = ToStatus(cudaSetDevice(device_), "cudaSetDevice");
  if (status.ok()) {
    const auto size = static_cast<size_t>(bytes);
    status = memory == Memory::kDevice ? ToStatus(cudaMalloc(&data, size), "cudaMalloc")
                                       : ToStatus(cudaHostAlloc(&data, size, cudaHostAllocPortable), "cudaHostAlloc");
  }
  if (!status.ok()) {
    count.used -= bytes;
    return Annotate(status, absl::StrCat("allocation of ", bytes, " bytes"));
  }
  return Buffer(this, data, bytes, memory);
}

// Errors are another call's, which says so itself.
void CudaMemory::Free(void* data, int64_t bytes, Memory memory) {
  cudaSetDevice(device_);
  memory == Memory::kDevice ? cudaFree(data) : cudaFreeHost(data);
  CountOf(memory).used -= bytes;
}

}  // namespace shardmlp
