// Slices on memory that is somebody else's, counted until gRPC has let go of each.
//
// gRPC may hold a slice after the write that carried it was done, and after its call was cancelled: in the stream's
// send buffer, or in a write to the socket that is still going on. Only the slice's own destructor tells.
#pragma once

#include <grpcpp/support/slice.h>

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace shardmlp {

// Thread-safe. Must outlive its slices: call AwaitReleased first.
class PinnedSlices {
 public:
  PinnedSlices() = default;
  PinnedSlices(const PinnedSlices&) = delete;
  PinnedSlices& operator=(const PinnedSlices&) = delete;

  // A slice of [data, data + size), which isn't copied.
  grpc::Slice Pin(const void* data, int64_t size) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether all are released, waiting for it up to `timeout`.
  bool AwaitReleased(absl::Duration timeout = absl::InfiniteDuration()) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static void Unpin(void* slices);

  absl::Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardmlp
