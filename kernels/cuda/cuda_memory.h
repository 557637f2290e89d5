// Device memory and pinned host memory, counted against a limit each.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace shardmlp {

// A buffer is an allocation of the runtime's own, with no pool between: a server takes its device memory and its lanes
// once, when it starts, so there is nothing to save and nothing that fragments; what it takes for a tensor that is read
// or written is pinned memory of one at a time. Thread-safe. Must outlive its buffers.
class CudaMemory final : public Buffer::Owner {
 public:
  CudaMemory(int device, int64_t device_limit, int64_t staging_limit)
      : device_(device), device_bytes_{device_limit}, staging_bytes_{staging_limit} {}

  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY), with the numbers, above the limit or where the machine has no more.
  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes);
  // Does not wait for work that uses the memory.
  void Free(void* data, int64_t bytes, Memory memory) override;

 private:
  struct Count {
    const int64_t limit;
    std::atomic<int64_t> used = 0;
  };
  Count& CountOf(Memory memory) { return memory == Memory::kDevice ? device_bytes_ : staging_bytes_; }

  const int device_;
  Count device_bytes_;
  Count staging_bytes_;
};

}  // namespace shardmlp
