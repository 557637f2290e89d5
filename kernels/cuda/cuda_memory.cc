#include "kernels/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status CheckSize(int64_t bytes) {
  if (bytes >= 0) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
               absl::StrCat("allocation of ", bytes, " bytes"));
}

}  // namespace

absl::Status CudaMemory::Reserve(int64_t bytes) {
  SHARDMLP_RETURN_IF_ERROR(CheckSize(bytes));
  absl::MutexLock lock(&mutex_);
  if (gaps_.has_value() || device_bytes_.used > 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("device memory is reserved once, before any is used: ", device_bytes_.used, " of ",
                              device_bytes_.limit, " bytes are in use"));
  }
  SHARDMLP_RETURN_IF_ERROR(Use(Memory::kDevice, bytes));
  device_bytes_.used = 0;
  if (bytes > 0) {
    SHARDMLP_ASSIGN_OR_RETURN(void* const block, TakeOfRuntime(Memory::kDevice, bytes));
    block_.reset(block);
  }
  gaps_.emplace(bytes);
  device_bytes_.limit = bytes;
  return absl::OkStatus();
}

absl::StatusOr<Buffer> CudaMemory::Allocate(Memory memory, int64_t bytes) {
  SHARDMLP_RETURN_IF_ERROR(CheckSize(bytes));
  if (bytes == 0) return Buffer();
  {
    absl::MutexLock lock(&mutex_);
    if (memory == Memory::kDevice && gaps_.has_value()) return TakeOfBlock(bytes);
    SHARDMLP_RETURN_IF_ERROR(Use(memory, bytes));
  }
  const absl::StatusOr<void*> data = TakeOfRuntime(memory, bytes);
  if (data.ok()) return Buffer(this, *data, bytes, memory);
  absl::MutexLock lock(&mutex_);
  CountOf(memory).used -= bytes;
  return data.status();
}

absl::Status CudaMemory::Use(Memory memory, int64_t bytes) {
  Count& count = CountOf(memory);
  if (bytes <= count.limit - count.used) {
    count.used += bytes;
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
               absl::StrCat("allocation of ", bytes, " bytes of ", memory == Memory::kDevice ? "device" : "staging",
                            " memory: ", count.used, " of ", count.limit, " bytes are in use"),
               {{"requested_bytes", absl::StrCat(bytes)},
                {"used_bytes", absl::StrCat(count.used)},
                {"limit_bytes", absl::StrCat(count.limit)}});
}

absl::StatusOr<Buffer> CudaMemory::TakeOfBlock(int64_t bytes) {
  // One that rounding up would carry past int64 is too large as it is.
  const int64_t taken = bytes > device_bytes_.limit ? bytes : BufferBytes(bytes);
  SHARDMLP_RETURN_IF_ERROR(Use(Memory::kDevice, taken));
  const std::optional<int64_t> begin = gaps_->Take(taken);
  if (begin.has_value()) return Buffer(this, static_cast<char*>(block_.get()) + *begin, bytes, Memory::kDevice);
  device_bytes_.used -= taken;
  return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
               absl::StrCat("allocation of ", bytes, " bytes of device memory: ", device_bytes_.used, " of ",
                            device_bytes_.limit, " bytes are in use, and the largest gap has ", gaps_->largest()));
}

absl::StatusOr<void*> CudaMemory::TakeOfRuntime(Memory memory, int64_t bytes) const {
  void* data = nullptr;
  absl::Status status = ToStatus(cudaSetDevice(device_), "cudaSetDevice");
  if (status.ok()) {
    const auto size = static_cast<size_t>(bytes);
    status = memory == Memory::kDevice ? ToStatus(cudaMalloc(&data, size), "cudaMalloc")
                                       : ToStatus(cudaHostAlloc(&data, size, cudaHostAllocPortable), "cudaHostAlloc");
  }
  if (!status.ok()) return Annotate(status, absl::StrCat("allocation of ", bytes, " bytes"));
  return data;
}

// Errors are another call's, which says so itself.
void CudaMemory::Free(void* data, int64_t bytes, Memory memory) {
  {
    absl::MutexLock lock(&mutex_);
    if (memory == Memory::kDevice && gaps_.has_value()) {
      gaps_->GiveBack(static_cast<char*>(data) - static_cast<char*>(block_.get()), BufferBytes(bytes));
      device_bytes_.used -= BufferBytes(bytes);
      return;
    }
    CountOf(memory).used -= bytes;
  }
  cudaSetDevice(device_);
  memory == Memory::kDevice ? cudaFree(data) : cudaFreeHost(data);
}

}  // namespace shardmlp
