// The stash's device memory, allocated once and lent in pieces.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/gaps.h"

namespace shardmlp {

// Thread-safe. Keeps the backend alive, since a piece may be given back after the engine is gone.
class StashMemory : public std::enable_shared_from_this<StashMemory> {
 public:
  using End = Gaps::End;

  // Allocates `bytes` (0: none), of which readers may have `reader_bytes` at once, or fails as the backend does.
  static absl::StatusOr<std::shared_ptr<StashMemory>> Create(std::shared_ptr<Backend> backend, int64_t bytes,
                                                             int64_t reader_bytes);
  // Use Create.
  StashMemory(std::shared_ptr<Backend> backend, Buffer buffer, int64_t reader_bytes);

  // What a piece of `bytes` bytes takes of the memory.
  static int64_t PieceBytes(int64_t bytes);
  // `bytes` bytes (at least 1), 64-byte aligned, as near to `end` as may be, that go back when the last owner drops
  // them. Null where no gap is as large as that, or a reader would have more than its share.
  std::shared_ptr<void> Take(int64_t bytes, End end = End::kFront, bool reader = false);

  int64_t bytes() const { return buffer_.bytes(); }
  // What a reader, or a trainer, may be lent.
  int64_t ShareBytes(bool reader) const { return reader ? reader_bytes_ : bytes(); }
  // What readers, or all, are lent now.
  int64_t lent_bytes(bool readers) const;

 private:
  void GiveBack(int64_t begin, int64_t bytes, bool reader);

  const std::shared_ptr<Backend> backend_;
  const Buffer buffer_;
  const int64_t reader_bytes_;
  mutable absl::Mutex mutex_;
  Gaps gaps_ ABSL_GUARDED_BY(mutex_);
  int64_t lent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t readers_lent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of those
};

}  // namespace shardmlp
