#include "client/cpp/connection.h"

#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "proto/http2.h"
#include "proto/tls.h"

namespace shardmlp {
namespace {

grpc::ChannelArguments Arguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  // Channels with equal arguments would share one connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Retries are ours: gRPC's own would keep copies of messages, and references to the caller's memory with them.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(absl::ToInt64Milliseconds(kKeepaliveInterval)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, static_cast<int>(absl::ToInt64Milliseconds(kKeepaliveTimeout)));
  // A server may compute for longer than any number of pings.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.connect_timeout)));
  arguments.SetMaxReceiveMessageSize(-1);
  return arguments;
}

absl::Status Unconnected(const std::string& path) {
  return absl::UnavailableError(absl::StrCat("connecting to unix:", path, ": ", std::strerror(errno)));
}

absl::StatusOr<SocketDescriptor> ConnectUnixSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("a Unix socket's path has at most ", sizeof(address.sun_path) - 1, " bytes, got ",
                              path.size(), ": ", path));
  }
  std::copy(path.begin(), path.end(), address.sun_path);
  SocketDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) return Unconnected(path);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Unconnected(path);
  }
  return socket;
}

// Over TCP.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& target, const ClientOptions& options) {
  const ClientCredentials& files = options.credentials;
  grpc::ChannelArguments arguments = Arguments(options);
  if (files.ca_file.empty()) {
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  }
  SHARDMLP_ASSIGN_OR_RETURN(
      const auto credentials,
      TlsChannelCredentials({.cert = files.cert_file, .key = files.key_file, .ca = files.ca_file}));
  if (!files.server_name.empty()) arguments.SetSslTargetNameOverride(files.server_name);
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

absl::StatusOr<std::shared_ptr<Connection>> Open(const std::string& target, const ClientOptions& options) {
  absl::string_view path = target;
  if (!absl::ConsumePrefix(&path, "unix:")) {
    SHARDMLP_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, OpenChannel(target, options));
    return std::make_shared<Connection>(std::move(channel), SocketDescriptor(), options.credentials.token_file);
  }
  // "unix:/path" and "unix:///path" are the same.
  absl::ConsumePrefix(&path, "//");
  SHARDMLP_ASSIGN_OR_RETURN(SocketDescriptor socket, ConnectUnixSocket(std::string(path)));
  SocketDescriptor ours(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  if (ours.get() < 0) return Unconnected(std::string(path));
  return std::make_shared<Connection>(
      grpc::CreateCustomInsecureChannelFromFd("localhost", socket.Release(), Arguments(options)), std::move(ours),
      options.credentials.token_file);
}

}  // namespace

SocketDescriptor::SocketDescriptor(SocketDescriptor&& other) noexcept : fd_(other.Release()) {}

SocketDescriptor& SocketDescriptor::operator=(SocketDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

SocketDescriptor::~SocketDescriptor() {
  if (fd_ >= 0) close(fd_);
}

int SocketDescriptor::Release() { return std::exchange(fd_, -1); }

Connection::Connection(std::shared_ptr<grpc::Channel> channel, SocketDescriptor socket, std::string token_file)
    : socket_(std::move(socket)),
      token_file_(std::move(token_file)),
      stubs_(v1::Training::NewStub(channel), v1::Model::NewStub(channel), v1::Operation::NewStub(channel),
             std::make_unique<grpc::GenericStub>(channel)) {}

void Connection::Break() {
  if (socket_.get() >= 0) shutdown(socket_.get(), SHUT_RDWR);
}

Connections::Connections(std::string target, const ClientOptions& options)
    : target_(std::move(target)), options_(options), connections_(std::max(options.connections, 1)) {}

absl::StatusOr<std::shared_ptr<Connection>> Connections::Next() {
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<Connection>& connection = connections_[next_];
  next_ = (next_ + 1) % connections_.size();
  if (connection == nullptr) {
    SHARDMLP_ASSIGN_OR_RETURN(connection, Open(target_, options_));
  }
  return connection;
}

void Connections::Replace(const std::shared_ptr<Connection>& connection) {
  absl::MutexLock lock(&mutex_);
  std::replace(connections_.begin(), connections_.end(), connection, std::shared_ptr<Connection>());
}

}  // namespace shardmlp
