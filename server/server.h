// A whole server: a model on a device, the engine over it, and gRPC and metrics in front.
#pragma once

#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "server/engine/engine.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/rpc/rpc_server.h"

namespace shardmlp {

class Server {
 public:
  // Listens, prints the memory plan to `out`, loads the model, restores the checkpoint where one is asked for, and
  // serves. A failure says what to change, in a line.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, std::ostream& out);
  // Use Start.
  explicit Server(const ServerOptions& options) : options_(options) {}
  ~Server();

  const RpcServer& rpc() const { return *rpc_; }

  // Serves until `stop`, or until a client asks for a drain, then drains: not ready, no new calls, open ones and a
  // sealed step go on for drain_timeout; a step that is not sealed is handed back; the drain's checkpoint is saved.
  // Returns why it could not be. Where the device fails, returns at once what broke it.
  absl::Status Run(const absl::Notification& stop);

 private:
  absl::Status Listen(std::ostream& out);
  absl::Status Load(std::ostream& out);
  // With what has to be the same on all of them.
  absl::StatusOr<ReplicasOptions> ReplicasOf(const ModelSpec& model) const;
  absl::Status Drain();
  // Nothing where nothing is to be saved.
  absl::StatusOr<std::optional<CheckpointInfo>> SaveDrained();
  void Shutdown();

  const ServerOptions options_;
  Metrics metrics_;
  std::unique_ptr<Engine> engine_;  // outlives rpc_
  std::unique_ptr<RpcServer> rpc_;
};

}  // namespace shardmlp
