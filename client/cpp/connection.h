// Connections to one server.
//
// Thread-safe. A connection lives as long as somebody holds it; calls on one that was dropped go on.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/options.h"
#include "client/cpp/token.h"
#include "shardmlp/v1/model.grpc.pb.h"
#include "shardmlp/v1/operation.grpc.pb.h"
#include "shardmlp/v1/training.grpc.pb.h"

namespace shardmlp {

// Owns a socket's descriptor, or none (-1).
class SocketDescriptor {
 public:
  explicit SocketDescriptor(int fd = -1) : fd_(fd) {}
  SocketDescriptor(SocketDescriptor&& other) noexcept;
  SocketDescriptor& operator=(SocketDescriptor&& other) noexcept;
  ~SocketDescriptor();
  int get() const { return fd_; }
  // Gives it up.
  int Release();

 private:
  int fd_;
};

// One connection, made when first used.
class Connection {
 public:
  // `socket`: the connected socket that `channel` runs over, where the channel was made from one.
  Connection(std::shared_ptr<grpc::Channel> channel, SocketDescriptor socket, std::string token_file);

  // To be called once for each call, ahead of its start; fails where the client's token can't be read.
  absl::Status Authorize(grpc::ClientContext& context) { return AddToken(token_file_, context); }

  // Stub: v1::Training::Stub, v1::Model::Stub, v1::Operation::Stub or grpc::GenericStub.
  template <typename Stub>
  Stub& stub() {
    return *std::get<std::unique_ptr<Stub>>(stubs_);
  }

  // Async: v1::Training::Stub::async and its like.
  template <typename Async>
  Async& async() {
    if constexpr (std::is_same_v<Async, class v1::Training::Stub::async>) {
      return *stub<v1::Training::Stub>().async();
    } else if constexpr (std::is_same_v<Async, class v1::Operation::Stub::async>) {
      return *stub<v1::Operation::Stub>().async();
    } else {
      return *stub<v1::Model::Stub>().async();
    }
  }

  // Cuts it off, so that a write which a stopped server doesn't take fails and lets go of its memory. gRPC itself has
  // no means to: even a cancelled call waits for such a write. On TCP the kernel does this, by the TCP_USER_TIMEOUT
  // that gRPC sets with keepalive, within kKeepaliveTimeout.
  void Break();

 private:
  SocketDescriptor socket_;
  const std::string token_file_;
  std::tuple<std::unique_ptr<v1::Training::Stub>, std::unique_ptr<v1::Model::Stub>,
             std::unique_ptr<v1::Operation::Stub>, std::unique_ptr<grpc::GenericStub>>
      stubs_;
};

// The connections of one client; calls take them in turn.
class Connections {
 public:
  Connections(std::string target, const ClientOptions& options);

  const std::string& target() const { return target_; }
  const ClientOptions& options() const { return options_; }

  // UNAVAILABLE where a Unix socket can't be connected, INVALID_ARGUMENT where a file of the credentials is wrong; a
  // TCP connection fails in the call.
  absl::StatusOr<std::shared_ptr<Connection>> Next() ABSL_LOCKS_EXCLUDED(mutex_);
  // Has another connection made in place of `connection` when its turn comes. Repeats do nothing.
  void Replace(const std::shared_ptr<Connection>& connection) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::string target_;
  const ClientOptions options_;
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);  // null: to be made
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardmlp
