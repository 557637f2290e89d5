// The coordinator on the wire: streams, heartbeats and time.
#pragma once

#include <grpcpp/server.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/sync/rendezvous/coordinator.h"
#include "server/sync/rendezvous/loop.h"
#include "server/sync/rendezvous/replicas_options.h"
#include "shardmlp/v1/rendezvous.grpc.pb.h"

namespace shardmlp {

// What a replica says of itself first.
v1::Hello HelloOf(const ReplicasOptions& options);

// Thread-safe. When destroyed it ends all streams, so that their replicas have lost rank 0.
class CoordinatorServer final : private Coordinator::Carrier, private v1::Rendezvous::CallbackService {
 public:
  // Listens at `options.coordinator`; UNAVAILABLE where it can't, such as when another does.
  static absl::StatusOr<std::unique_ptr<CoordinatorServer>> Listen(const ReplicasOptions& options);
  ~CoordinatorServer() override;

 private:
  class Stream;

  explicit CoordinatorServer(const ReplicasOptions& options);

  grpc::ServerBidiReactor<v1::MeetRequest, v1::MeetResponse>* Meet(grpc::CallbackServerContext* context) override;

  // On the loop's thread.
  void Send(int64_t connection, const v1::MeetResponse& response) override;
  void End(int64_t connection, const absl::Status& why) override;
  void Tick();
  Stream* Find(int64_t connection);

  // Of streams that gRPC is not done with.
  bool NoneIsOpen() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return open_count_ == 0; }

  const ReplicasOptions options_;
  Coordinator coordinator_;                             // the loop's
  std::map<int64_t, std::unique_ptr<Stream>> streams_;  // the loop's
  absl::Mutex mutex_;
  int open_count_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t last_connection_ ABSL_GUARDED_BY(mutex_) = 0;
  Loop loop_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace shardmlp
