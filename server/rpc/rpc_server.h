// The gRPC server: addresses, services, health and reflection, from the first listen to the last stream's end.
#pragma once

#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/tls.h"
#include "server/metrics.h"
#include "server/rpc/drain_request.h"
#include "server/rpc/engine_slot.h"
#include "server/rpc/health_endpoint.h"
#include "server/rpc/message_limits.h"
#include "server/rpc/open_streams.h"
#include "server/rpc/tokens.h"

namespace shardmlp {

struct RpcServerOptions {
  std::vector<std::string> listen = {"127.0.0.1:50051"};  // as CheckListenAddress takes them; port 0 takes a free one
  bool insecure_listen_anywhere = false;                  // addresses that are not loopback, without TLS
  TlsFiles tls = {};  // of all addresses but Unix sockets; no cert: plaintext; a ca: clients need a certificate
  std::string token_file = {};     // who may call; empty: everybody
  std::string replica_ca = {};     // of the rendezvous, which Refresh looks at too; empty: none
  bool allow_drain = false;        // whoever may call may have the server drain
  std::string health_listen = {};  // host:port of a plaintext server of health alone; empty: none
  MessageLimits limits = {};
  absl::Duration stall_timeout = absl::Seconds(60);  // how long a call may wait for its client

  // Whether clients are known, and nobody else can read or change what goes over the network.
  bool secure() const { return !tls.cert.empty() && (!tls.ca.empty() || !token_file.empty()); }
};

// Thread-safe, but for the destructor.
class RpcServer {
 public:
  // Listens. Health answers NOT_SERVING, and everything else UNAVAILABLE, until Serve. INVALID_ARGUMENT for an address
  // that is none or not allowed; UNAVAILABLE for one that is taken. `metrics` must outlive the server.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Listen(const RpcServerOptions& options, Metrics& metrics);
  // Does not listen yet; use Listen.
  RpcServer(const RpcServerOptions& options, Metrics& metrics);
  // Shuts down at once where Shutdown was not called.
  ~RpcServer();

  // As listened on, with the ports that were bound.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Empty where there is no such server.
  std::string health_address() const { return health_ == nullptr ? "" : health_->address(); }
  // Serves `engine`, which must outlive the server.
  void Serve(Engine& engine);
  // Messages under way may take `bytes` of all connections together; no bound until this is called. Beyond it gRPC ends
  // whichever streams and connections it likes, so it is there to keep the process alive and not for daily use.
  void BoundMessages(int64_t bytes) { quota_.Resize(static_cast<size_t>(bytes)); }
  // For about once a second: reads tokens and certificates again, the replicas' CA too, and says how long the
  // certificate is valid, in the metrics too, and whether they are in order. INVALID_ARGUMENT, naming each file with
  // which something is wrong; what was read before stays, but for tokens of which the file has none left.
  absl::Status Refresh();
  // What health answers.
  void SetHealth(bool serving);
  // What clients ask, of which the server makes an end.
  DrainRequest& drain_request() { return drain_request_; }
  // Waits until no stream is open; false where some are at `deadline`.
  bool AwaitIdle(absl::Time deadline) { return streams_.AwaitNone(deadline); }
  // Calls, with a header or without one yet, and reads of tensors.
  int64_t open_stream_count() const { return streams_.count(); }
  // Ends every stream with `status`, those that come later too; other rpcs go on.
  void EndStreams(const absl::Status& status) { streams_.EndAll(status); }
  // Ends every stream with `status`, takes no more, and returns when every rpc is over; those that are not at
  // `deadline` are cut. Rpcs that wait in the engine end when it shuts down, which comes first.
  void Shutdown(const absl::Status& status, absl::Time deadline);

 private:
  absl::Status Start();
  absl::Status RefreshCertificate();

  const RpcServerOptions options_;
  Metrics& metrics_;
  const std::unique_ptr<Tokens> tokens_;  // null: everybody may call
  EngineSlot engine_;
  DrainRequest drain_request_;
  grpc::ResourceQuota quota_{"shardmlp"};
  std::vector<std::unique_ptr<grpc::Service>> services_;
  // Behind the services: its thread may be about to drive a stream of theirs that has ended.
  OpenStreams streams_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<HealthEndpoint> health_;  // null: none
  std::vector<std::string> addresses_;
};

}  // namespace shardmlp
