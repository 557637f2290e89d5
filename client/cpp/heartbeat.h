// Renews a session's lease from a thread of its own.
#pragma once

#include <grpcpp/client_context.h>

#include <cstdint>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"

namespace shardmlp {

class Heartbeat {
 public:
  // Renews three times a lease, until destroyed or until the server no longer knows the session, which the session's
  // next call will tell. `connections` must outlive it.
  Heartbeat(Connections& connections, int64_t session_id, absl::Duration lease);
  // Stops at once, a renewal on its way included.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  void Run();
  // Whether it should stop, after up to `timeout`.
  bool AwaitStop(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Renew() ABSL_LOCKS_EXCLUDED(mutex_);

  Connections& connections_;
  const int64_t session_id_;
  const absl::Duration interval_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* renewal_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the renewal on its way
  std::thread thread_;
};

}  // namespace shardmlp
