// Host memory for buffers, counted against a limit.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace shardmlp {

// What this process may still allocate: the least of the machine's available memory and its cgroup's limit.
int64_t AvailableMemoryBytes();

// Thread-safe. Must outlive its buffers.
class HostMemory final : public Buffer::Owner {
 public:
  explicit HostMemory(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  int64_t limit_bytes() const { return limit_bytes_; }
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY), with the numbers, above the limit.
  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes);
  void Free(void* data, int64_t bytes, Memory memory) override;

 private:
  const int64_t limit_bytes_;
  std::atomic<int64_t> used_bytes_ = 0;
};

}  // namespace shardmlp
