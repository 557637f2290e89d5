// Waits for a call that runs on gRPC's threads, and ends it where it stalls or is interrupted.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"

namespace shardmlp {

// How long a cancelled call, or memory that it held, may take before its connection is broken.
inline constexpr absl::Duration kCancelGrace = absl::Seconds(1);

// Thread-safe.
class CallWatch {
 public:
  // A message was sent or received.
  void Progress() { progress_.fetch_add(1, std::memory_order_relaxed); }
  // The call is over; nothing of it touches the watch afterwards.
  void Finish(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  // Blocks until Finish, and returns its status. A call without Progress for `stall_timeout` is cancelled, and answered
  // with DEADLINE_EXCEEDED (STALLED); one that `interrupted` (ClientOptions) ends with CANCELLED (CANCELLED).
  absl::Status Await(grpc::ClientContext& context, Connection& connection, absl::Duration stall_timeout,
                     const std::function<bool()>& interrupted) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool AwaitFinished(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // OK once it has finished; else why it should not go on.
  absl::Status AwaitFinishedOrCause(absl::Duration stall_timeout, const std::function<bool()>& interrupted)
      ABSL_LOCKS_EXCLUDED(mutex_);

  std::atomic<int64_t> progress_ = 0;
  absl::Mutex mutex_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp
