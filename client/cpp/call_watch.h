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
  // There is something for Await's `on_news` to look at.
  void Notify() ABSL_LOCKS_EXCLUDED(mutex_);
  // The call is over; nothing of it touches the watch afterwards.
  void Finish(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  // Blocks until Finish, and returns its status. A call without Progress for `stall_timeout` is cancelled, and answered
  // with DEADLINE_EXCEEDED (STALLED); one that `interrupted` (ClientOptions) ends with CANCELLED (CANCELLED). `on_news`
  // is called, with no lock held, after each Notify or several, and where it fails, so does the call.
  absl::Status Await(grpc::ClientContext& context, Connection& connection, absl::Duration stall_timeout,
                     const std::function<bool()>& interrupted, const std::function<absl::Status()>& on_news = {})
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the call, and waits until it is over.
  void Cancel(grpc::ClientContext& context, Connection& connection) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool AwaitFinished(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  enum class Seen { kFinished, kNews, kNothing };
  Seen AwaitNews(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // OK once it has finished; else why it should not go on.
  absl::Status AwaitFinishedOrCause(absl::Duration stall_timeout, const std::function<bool()>& interrupted,
                                    const std::function<absl::Status()>& on_news) ABSL_LOCKS_EXCLUDED(mutex_);
  bool finished_or_news() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return finished_ || news_; }

  std::atomic<int64_t> progress_ = 0;
  absl::Mutex mutex_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp
