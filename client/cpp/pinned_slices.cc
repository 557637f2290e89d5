#include "client/cpp/pinned_slices.h"

namespace shardmlp {

grpc::Slice PinnedSlices::Pin(const void* data, int64_t size) {
  {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  // gRPC never writes to a slice that it sends.
  return grpc::Slice(const_cast<void*>(data), static_cast<size_t>(size), &Unpin, this);
}

void PinnedSlices::Unpin(void* slices) {
  auto* self = static_cast<PinnedSlices*>(slices);
  absl::MutexLock lock(&self->mutex_);
  --self->count_;
}

bool PinnedSlices::AwaitReleased(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto released = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return count_ == 0; };
  return mutex_.AwaitWithTimeout(absl::Condition(&released), timeout);
}

}  // namespace shardmlp
