// The open streams of a server, and the one thread that acts for them where neither gRPC's threads nor the device
// thread may: after a wake-up by the engine, when a client stalls, and at shutdown.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace shardmlp {

class ShardStream;

// A stream, as what ends it from outside sees it. Thread-safe.
class OpenStream {
 public:
  virtual ~OpenStream() = default;
  // Ends the stream with `status`, unless it has ended, as soon as its client takes what it is being sent.
  virtual void Stop(const absl::Status& status) = 0;
  // Ends a stream that has waited for its client for too long.
  virtual void CheckStall(absl::Time now) = 0;
};

// Thread-safe. Calls a stream only while it holds no lock. Must outlive the gRPC server whose streams it keeps.
class OpenStreams {
 public:
  // A stream that waits for its client for longer than `stall_timeout` is ended.
  explicit OpenStreams(absl::Duration stall_timeout);
  ~OpenStreams();
  OpenStreams(const OpenStreams&) = delete;
  OpenStreams& operator=(const OpenStreams&) = delete;

  absl::Duration stall_timeout() const { return stall_timeout_; }

  // Keeps `stream` until Remove.
  void Add(std::shared_ptr<OpenStream> stream);
  void Remove(const std::shared_ptr<OpenStream>& stream);
  // Has the thread call stream->Drive() soon. Does not block.
  void Wake(std::shared_ptr<ShardStream> stream);
  int64_t count() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(streams_.size());
  }
  // Ends every stream, and those that come later, with `status`.
  void EndAll(const absl::Status& status);
  // Waits until no stream is left.
  bool AwaitNone(absl::Time deadline);
  // Waits until gRPC has given back all result memory, once no stream is left. False where some is out at `deadline`.
  bool AwaitLoans(absl::Time deadline);

  // Kept with each piece of result memory that gRPC is given. gRPC may hold one for longer than its stream lives.
  std::shared_ptr<void> loan() const { return loan_; }

 private:
  void Run();

  const absl::Duration stall_timeout_;
  const absl::Duration check_interval_;
  const std::shared_ptr<absl::Notification> loans_returned_ = std::make_shared<absl::Notification>();
  std::shared_ptr<void> loan_;  // notifies when the last copy goes
  mutable absl::Mutex mutex_;
  std::unordered_set<std::shared_ptr<OpenStream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ShardStream>> woken_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> ending_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace shardmlp
