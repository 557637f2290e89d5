// Device memory and pinned host memory, counted against a limit each.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/cuda/handles.h"
#include "kernels/gaps.h"

namespace shardmlp {

// Device buffers are parts of one block once that is reserved, and until then allocations of the runtime's own. Pinned
// buffers always are: a server takes its lanes once, when it starts, and what it takes for a tensor that is read or
// written is as large as that tensor and soon gone, which no plan has. Thread-safe. Must outlive its buffers.
class CudaMemory final : public Buffer::Owner {
 public:
  CudaMemory(int device, int64_t device_limit, int64_t staging_limit)
      : device_(device), device_bytes_{device_limit}, staging_bytes_{staging_limit} {}

  // As Backend::Reserve; what is reserved is the limit from then on.
  absl::Status Reserve(int64_t bytes);
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY), with the numbers, above the limit or where the machine has no more.
  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes);
  // Does not wait for work that uses the memory.
  void Free(void* data, int64_t bytes, Memory memory) override;

 private:
  struct Count {
    int64_t limit;
    int64_t used = 0;
  };
  Count& CountOf(Memory memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return memory == Memory::kDevice ? device_bytes_ : staging_bytes_;
  }
  // Counts `bytes` as used, if the limit lets it.
  absl::Status Use(Memory memory, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Buffer> TakeOfBlock(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<void*> TakeOfRuntime(Memory memory, int64_t bytes) const;

  const int device_;
  absl::Mutex mutex_;
  Count device_bytes_ ABSL_GUARDED_BY(mutex_);
  Count staging_bytes_ ABSL_GUARDED_BY(mutex_);
  DeviceBlock block_ ABSL_GUARDED_BY(mutex_);
  std::optional<Gaps> gaps_ ABSL_GUARDED_BY(mutex_);  // of the block; none where nothing is reserved
};

}  // namespace shardmlp
