
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/sync/replica_group.h"

namespace shardmlp {
namespace {

class LocalGroup final : public ReplicaGroup {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool device_memory() const override { return true; }

  absl::Status AllReduceSum(absl::Span<const MatrixView>) override { return Failure(); }
  absl::Status Broadcast(int root, absl::Span<const MatrixView>) override {
    if (root != 0) return absl::InvalidArgumentError("broadcast from a rank that a group of one does not have");
    return Failure();
  }
  void Abort(absl::Status reason) override {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = std::move(reason);
  }

 private:
  absl::Status Failure() {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

  absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<ReplicaGroup> MakeLocalGroup() { return std::make_unique<LocalGroup>(); }

}  // namespace shardmlp
