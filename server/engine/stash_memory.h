// The stash's device memory, allocated once and lent in pieces.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"

namespace shardmlp {

// Thread-safe. Keeps the backend alive, since a piece may be given back after the engine is gone.
class StashMemory : public std::enable_shared_from_this<StashMemory> {
 public:
  // Allocates `bytes` (0: none), or fails as the backend does.
  static absl::StatusOr<std::shared_ptr<StashMemory>> Create(std::shared_ptr<Backend> backend, int64_t bytes);
  // Use Create.
  StashMemory(std::shared_ptr<Backend> backend, Buffer buffer);

  // What a piece of `bytes` bytes takes of the memory.
  static int64_t PieceBytes(int64_t bytes);
  // `bytes` bytes (at least 1), 64-byte aligned, that go back when the last owner drops them. Null where no gap is as
  // large as that.
  std::shared_ptr<void> Take(int64_t bytes);

  int64_t bytes() const { return buffer_.bytes(); }

 private:
  void GiveBack(int64_t begin, int64_t bytes);

  const std::shared_ptr<Backend> backend_;
  const Buffer buffer_;
  absl::Mutex mutex_;
  std::map<int64_t, int64_t> gaps_ ABSL_GUARDED_BY(mutex_);  // where each begins, and its bytes; no two touch
};

}  // namespace shardmlp
