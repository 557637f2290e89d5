#include "client/cpp/client.h"

#include <limits>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/connection.h"
#include "client/cpp/proto_types.h"
#include "client/cpp/read_tensor.h"
#include "client/cpp/unary_call.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kCloseTimeout = absl::Seconds(2);  // of what nobody waits for

absl::StatusOr<ServedModel> ReadModel(Connections& connections, const RetryOptions& retry, bool checksums) {
  const ClientOptions& options = connections.options();
  v1::GetModelRequest request;
  request.set_checksums(checksums);
  SHARDMLP_ASSIGN_OR_RETURN(const v1::GetModelResponse response,
                            CallWithRetries(connections, retry, "GetModel", &v1::Model::Stub::async::GetModel, request,
                                            checksums ? options.checkpoint_timeout : options.connect_timeout));
  return FromProto(response);
}

// A session that the server may have opened, though its answer did not come: the same opening is answered with it.
void CloseUnanswered(Connections& connections, const v1::OpenSessionRequest& opening) {
  grpc::ClientContext open;
  const auto opened = CallOnce(connections, open, "OpenSession", &v1::Training::Stub::async::OpenSession, opening,
                               kCloseTimeout, /*interrupted=*/nullptr);
  if (!opened.ok()) return;  // it ends with its lease
  v1::CloseSessionRequest request;
  request.set_session_id(opened->session_id());
  grpc::ClientContext close;
  CallOnce(connections, close, "CloseSession", &v1::Training::Stub::async::CloseSession, request, kCloseTimeout,
           /*interrupted=*/nullptr)
      .status()
      .IgnoreError();
}

absl::Duration ToDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

}  // namespace

Client::Client(std::unique_ptr<Connections> connections, ServedModel model)
    : connections_(std::move(connections)), model_(std::move(model)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target, const ClientOptions& options) {
  if (target.empty() || options.connections < 1) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("connecting to \"", target, "\" over ", options.connections,
                              " connections, expected host:port or unix:/path, and at least 1"));
  }
  const ClientCredentials& credentials = options.credentials;
  if (credentials.cert_file.empty() != credentials.key_file.empty() ||
      (credentials.ca_file.empty() && !(credentials.cert_file + credentials.server_name).empty())) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 "a certificate goes with its key, and both, as a server's name, with a CA");
  }
  auto connections = std::make_unique<Connections>(target, options);
  RetryOptions retry = options.retry;
  retry.budget = options.connect_timeout;
  SHARDMLP_ASSIGN_OR_RETURN(ServedModel model, ReadModel(*connections, retry, /*checksums=*/false));
  return std::make_unique<Client>(std::move(connections), std::move(model));
}

absl::StatusOr<ServedModel> Client::GetModel(bool checksums) {
  return ReadModel(*connections_, connections_->options().retry, checksums);
}

absl::StatusOr<std::vector<ClientSeries>> Client::GetMetrics() {
  const ClientOptions& options = connections_->options();
  SHARDMLP_ASSIGN_OR_RETURN(
      const v1::GetMetricsResponse response,
      CallWithRetries(*connections_, options.retry, "GetMetrics", &v1::Operation::Stub::async::GetMetrics,
                      v1::GetMetricsRequest(), options.connect_timeout));
  return FromProto(response);
}

absl::StatusOr<ClientDrain> Client::Drain(absl::Duration timeout) {
  grpc::ClientContext context;
  SHARDMLP_ASSIGN_OR_RETURN(const v1::DrainResponse response,
                            CallOnce(*connections_, context, "Drain", &v1::Operation::Stub::async::Drain,
                                     v1::DrainRequest(), timeout, connections_->options().interrupted));
  return FromProto(response);
}

absl::StatusOr<std::unique_ptr<Session>> Client::OpenSession(const SessionOptions& options) {
  v1::OpenSessionRequest request;
  request.set_run_id(options.run_id);
  request.set_role(options.role == ClientRole::kTrain ? v1::SESSION_ROLE_TRAIN : v1::SESSION_ROLE_READ);
  request.set_trainer_count(options.trainer_count);
  request.set_trainer_rank(options.trainer_rank);
  absl::BitGen random;
  request.set_opening_id(absl::Uniform<int64_t>(random, 1, std::numeric_limits<int64_t>::max()));
  const absl::StatusOr<v1::OpenSessionResponse> response =
      CallWithRetries(*connections_, connections_->options().retry, "OpenSession",
                      &v1::Training::Stub::async::OpenSession, request, connections_->options().connect_timeout);
  if (!response.ok()) {
    if (absl::IsCancelled(response.status()) || absl::IsDeadlineExceeded(response.status())) {
      CloseUnanswered(*connections_, request);
    }
    return response.status();
  }
  const absl::Duration lease = ToDuration(response->lease());
  if (lease <= absl::ZeroDuration()) {
    return Error(absl::StatusCode::kInternal, Reason::kInvalidArgument,
                 absl::StrCat("the server granted a lease of ", absl::FormatDuration(lease)));
  }
  return std::make_unique<Session>(*connections_, model_, response->session_id(), lease,
                                   FromProto(response->position()), response->run_under_way());
}

absl::StatusOr<int64_t> Client::ReadTensor(const std::string& name, absl::Span<char> to) {
  const ClientTensor* const tensor = model_.FindTensor(name);
  if (tensor == nullptr) {
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownTensor,
                 absl::StrCat("the server has no tensor ", name, " among its ", model_.tensors.size()));
  }
  if (static_cast<int64_t>(to.size()) != tensor->byte_count()) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
                 absl::StrCat("reading ", name, " of ", tensor->byte_count(), " bytes into ", to.size()));
  }
  return WithRetries(Retries(connections_->options().retry, *connections_, "ReadTensor"),
                     [&] { return ReadTensorOnce(*connections_, name, to); });
}

absl::StatusOr<ClientCheckpoint> Client::SaveCheckpoint(const std::string& name) {
  v1::SaveCheckpointRequest request;
  request.set_name(name);
  SHARDMLP_ASSIGN_OR_RETURN(
      const v1::SaveCheckpointResponse response,
      CallWithRetries(*connections_, connections_->options().retry, "SaveCheckpoint",
                      &v1::Model::Stub::async::SaveCheckpoint, request, connections_->options().checkpoint_timeout));
  return FromProto(response.checkpoint());
}

absl::StatusOr<ClientPosition> Client::RestoreCheckpoint(const std::string& name) {
  v1::RestoreCheckpointRequest request;
  request.set_name(name);
  SHARDMLP_ASSIGN_OR_RETURN(
      const v1::RestoreCheckpointResponse response,
      CallWithRetries(*connections_, connections_->options().retry, "RestoreCheckpoint",
                      &v1::Model::Stub::async::RestoreCheckpoint, request, connections_->options().checkpoint_timeout));
  return FromProto(response.position());
}

absl::StatusOr<std::vector<ClientCheckpoint>> Client::ListCheckpoints() {
  SHARDMLP_ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse response,
                            CallWithRetries(*connections_, connections_->options().retry, "ListCheckpoints",
                                            &v1::Model::Stub::async::ListCheckpoints, v1::ListCheckpointsRequest(),
                                            connections_->options().stall_timeout));
  std::vector<ClientCheckpoint> checkpoints;
  for (const v1::CheckpointInfo& checkpoint : response.checkpoints()) {
    checkpoints.push_back(FromProto(checkpoint));
  }
  return checkpoints;
}

absl::StatusOr<ClientCheckpoint> Client::DeleteCheckpoint(const std::string& name) {
  v1::DeleteCheckpointRequest request;
  request.set_name(name);
  bool again = false;
  return WithRetries(Retries(connections_->options().retry, *connections_, "DeleteCheckpoint"),
                     [&]() -> absl::StatusOr<ClientCheckpoint> {
                       grpc::ClientContext context;
                       const absl::StatusOr<v1::DeleteCheckpointResponse> response = CallOnce(
                           *connections_, context, "DeleteCheckpoint", &v1::Model::Stub::async::DeleteCheckpoint,
                           request, connections_->options().checkpoint_timeout, connections_->options().interrupted);
                       // An earlier try has deleted it.
                       if (std::exchange(again, true) && ReasonOf(response.status()) == Reason::kUnknownCheckpoint) {
                         return ClientCheckpoint{.name = name};
                       }
                       if (!response.ok()) return response.status();
                       return FromProto(response->checkpoint());
                     });
}

}  // namespace shardmlp
