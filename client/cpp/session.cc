#include "client/cpp/session.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/connection.h"
#include "client/cpp/heartbeat.h"
#include "client/cpp/proto_types.h"
#include "client/cpp/retry.h"
#include "client/cpp/shard_call.h"
#include "client/cpp/shard_plan.h"
#include "client/cpp/unary_call.h"
#include "kernels/status.h"
#include "proto/wire.h"
#include "shardmlp/v1/compute.pb.h"
#include "shardmlp/v1/model.grpc.pb.h"
#include "shardmlp/v1/training.grpc.pb.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kCloseBudget = absl::Seconds(2);
constexpr size_t kMaxReleasedTickets = 4096;  // that one call tells of

v1::KeepInput ToProto(ClientKeepInput keep_input) {
  return keep_input == ClientKeepInput::kPinned ? v1::KEEP_INPUT_PINNED : v1::KEEP_INPUT_IF_ROOM;
}

absl::StatusOr<const ClientLayer*> FindLayer(const ServedModel& model, int layer) {
  if (const ClientLayer* found = model.FindLayer(layer); found != nullptr) return found;
  return Error(absl::StatusCode::kNotFound, Reason::kUnknownLayer,
               absl::StrCat("layer ", layer, " is not among the ", model.layers.size(), " that the server has"));
}

// The stream's first and last messages. Request: v1::ForwardRequest or v1::BackwardRequest, with its header set.
template <typename Request>
void SetEnds(const Request& request, ShardCall& call) {
  call.header = MakeWireMessage(request);
  Request end;
  end.mutable_end()->set_row_count(request.header().row_count());
  call.end = MakeWireMessage(end);
}

// Sends `call` until it is answered or Retries says to stop. End: v1::ForwardEnd or v1::BackwardEnd.
template <typename End>
absl::StatusOr<End> RunWithRetries(Connections& connections, const std::string& name, const ShardCall& call) {
  return WithRetries(Retries(connections.options().retry, connections, name), [&]() -> absl::StatusOr<End> {
    SHARDMLP_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, connections.Next());
    const absl::StatusOr<std::string> body = RunShardCall(*connection, call, connections.options());
    if (IsConnectionLost(body.status())) connections.Replace(connection);
    if (!body.ok()) return Annotate(body.status(), name);
    End end;
    if (!end.ParseFromString(*body) || end.row_count() != call.inputs.front().rows) {
      return Error(absl::StatusCode::kInternal, Reason::kInvalidRows,
                   absl::StrCat(name, ": the server's end counts ", end.row_count(), " rows, expected ",
                                call.inputs.front().rows));
    }
    return end;
  });
}

}  // namespace

Session::Session(Connections& connections, const ServedModel& model, int64_t id, absl::Duration lease,
                 const ClientPosition& position, bool run_under_way)
    : connections_(connections),
      model_(model),
      id_(id),
      run_under_way_(run_under_way),
      position_(position),
      heartbeat_(std::make_unique<Heartbeat>(connections, id, lease)) {}

Session::~Session() { Close().IgnoreError(); }

ClientPosition Session::position() const {
  absl::MutexLock lock(&mutex_);
  return position_;
}

int64_t Session::pending_row_count() const {
  absl::MutexLock lock(&mutex_);
  int64_t count = 0;
  for (const auto& [layer, rows] : rows_) count += rows;
  return count;
}

ClientPosition Session::MoveTo(const ClientPosition& position) {
  absl::MutexLock lock(&mutex_);
  position_ = position;
  rows_.clear();
  return position;
}

void Session::Release(int64_t ticket) {
  absl::MutexLock lock(&mutex_);
  released_tickets_.push_back(ticket);
}

std::vector<int64_t> Session::ReleasedTickets() const {
  absl::MutexLock lock(&mutex_);
  const size_t count = std::min(released_tickets_.size(), kMaxReleasedTickets);
  return {released_tickets_.begin(), released_tickets_.begin() + count};
}

void Session::Forget(const std::vector<int64_t>& tickets) {
  if (tickets.empty()) return;
  absl::MutexLock lock(&mutex_);
  std::erase_if(released_tickets_, [&](int64_t ticket) { return absl::c_linear_search(tickets, ticket); });
}

absl::StatusOr<Forwarded> Session::Forward(int layer, ConstMatrixView x, MatrixView y, const ForwardOptions& options) {
  SHARDMLP_ASSIGN_OR_RETURN(const ClientLayer* const found, FindLayer(model_, layer));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("x", x, x.rows, found->hidden_size, x.dtype));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("y", y, x.rows, found->output_size, x.dtype));

  v1::ForwardRequest request;
  v1::ForwardHeader& header = *request.mutable_header();
  header.set_session_id(id_);
  header.set_layer(layer);
  header.set_row_count(x.rows);
  header.set_dtype(ToProto(x.dtype));
  if (options.keep_input.has_value()) {
    header.set_keep_input(ToProto(*options.keep_input));
    header.set_call_id(next_call_id_.fetch_add(1));
  }
  const std::vector<int64_t> released = ReleasedTickets();
  header.mutable_released_tickets()->Add(released.begin(), released.end());

  ShardCall call;
  call.method = "/shardmlp.v1.Compute/Forward";
  SetEnds(request, call);
  call.inputs = {x};
  call.output = y;
  call.hooks = options.hooks;
  SHARDMLP_ASSIGN_OR_RETURN(call.rows_per_shard, ShardRowCount(model_, found->hidden_size * SizeOf(x.dtype),
                                                               connections_.options().shard_bytes));
  SHARDMLP_ASSIGN_OR_RETURN(
      const v1::ForwardEnd end,
      RunWithRetries<v1::ForwardEnd>(connections_, absl::StrCat("Forward of layer ", layer), call));
  Forget(released);
  return Forwarded{end.weights_version(), end.ticket(), end.gate_up_kept()};
}

absl::Status Session::Backward(int layer, int64_t weights_version, ConstMatrixView x, ConstMatrixView dy, MatrixView dx,
                               const BackwardOptions& options) {
  const auto& [weight_gradient, ticket, hooks] = options;
  SHARDMLP_ASSIGN_OR_RETURN(const ClientLayer* const found, FindLayer(model_, layer));
  const bool x_dropped = x.data == nullptr && !x.empty() && ticket != 0;
  if (!x_dropped) SHARDMLP_RETURN_IF_ERROR(CheckMatrix("x", x, x.rows, found->hidden_size, x.dtype));
  SHARDMLP_RETURN_IF_ERROR(CheckMatrix("dy", dy, x.rows, found->output_size, x.dtype));
  if (!dx.empty()) SHARDMLP_RETURN_IF_ERROR(CheckMatrix("dx", dx, x.rows, found->hidden_size, x.dtype));
  if (dx.empty() && !weight_gradient) return absl::OkStatus();

  const ClientPosition sent_to = position();
  v1::BackwardHeader header;
  header.set_session_id(id_);
  header.set_layer(layer);
  header.set_row_count(x.rows);
  header.set_dtype(ToProto(x.dtype));
  header.set_call_id(next_call_id_.fetch_add(1));
  header.set_step(sent_to.step);
  header.set_attempt(sent_to.attempt);
  header.set_weights_version(weights_version);
  header.set_input_gradient(!dx.empty());
  header.set_weight_gradient(weight_gradient);
  header.set_ticket(ticket);
  const ConstMatrixView sent_x = ticket == 0 ? x : ConstMatrixView(nullptr, x.rows, 0, x.dtype);
  absl::Status status = RunBackward(header, sent_x, dy, dx, hooks);
  if (ticket != 0 && !x_dropped && ReasonOf(status) == Reason::kTicketMissing) {
    header.clear_ticket();
    status = RunBackward(header, x, dy, dx, hooks);
  }
  SHARDMLP_RETURN_IF_ERROR(status);
  if (!weight_gradient) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  const bool open = position_.step == sent_to.step && position_.attempt == sent_to.attempt;
  if (open) rows_[layer] += x.rows;
  return absl::OkStatus();
}

absl::Status Session::RunBackward(const v1::BackwardHeader& header, ConstMatrixView x, ConstMatrixView dy,
                                  MatrixView dx, const RowHooks& hooks) {
  v1::BackwardRequest request;
  *request.mutable_header() = header;
  const std::vector<int64_t> released = ReleasedTickets();
  request.mutable_header()->mutable_released_tickets()->Add(released.begin(), released.end());
  ShardCall call;
  call.method = "/shardmlp.v1.Compute/Backward";
  SetEnds(request, call);
  call.inputs = {x, dy};
  call.output = dx;
  call.hooks = hooks;
  SHARDMLP_ASSIGN_OR_RETURN(call.rows_per_shard, ShardRowCount(model_, (x.cols + dy.cols) * SizeOf(x.dtype),
                                                               connections_.options().shard_bytes));
  SHARDMLP_RETURN_IF_ERROR(
      RunWithRetries<v1::BackwardEnd>(connections_, absl::StrCat("Backward of layer ", header.layer()), call).status());
  Forget(released);
  return absl::OkStatus();
}

absl::StatusOr<SealedStep> Session::SealStep() {
  v1::SealStepRequest request;
  request.set_session_id(id_);
  {
    absl::MutexLock lock(&mutex_);
    request.set_step(position_.step);
    request.set_attempt(position_.attempt);
    for (const auto& [layer, rows] : rows_) {
      v1::LayerRows& to = *request.add_layers();
      to.set_layer(layer);
      to.set_row_count(rows);
    }
  }
  const absl::StatusOr<v1::SealStepResponse> response =
      CallWithRetries(connections_, connections_.options().retry, "SealStep", &v1::Training::Stub::async::SealStep,
                      request, connections_.options().seal_timeout);
  if (absl::IsDeadlineExceeded(response.status())) return NameMissing(response.status(), request.step());
  SHARDMLP_RETURN_IF_ERROR(response.status());
  const auto& sums = response->tensor_sums_of_squares();
  return SealedStep{.tensor_sums_of_squares = {sums.begin(), sums.end()},
                    .finite = response->finite(),
                    .non_finite_origin = response->non_finite_origin()};
}

absl::Status Session::NameMissing(const absl::Status& timed_out, int64_t step) {
  grpc::ClientContext context;
  const auto model =
      CallOnce(connections_, context, "GetModel", &v1::Model::Stub::async::GetModel, v1::GetModelRequest(),
               connections_.options().connect_timeout, connections_.options().interrupted);
  const absl::StatusOr<ServedModel> served = model.ok() ? FromProto(*model) : model.status();
  if (!served.ok()) return timed_out;
  const std::string missing = served->MissingTrainers();
  if (missing.empty()) return timed_out;
  return Error(absl::StatusCode::kUnavailable, Reason::kTrainerMissing,
               absl::StrCat("SealStep: not every trainer sealed step ", step, " within ",
                            absl::FormatDuration(connections_.options().seal_timeout), "; missing: ", missing),
               {{"missing", missing}});
}

absl::StatusOr<ClientPosition> Session::CommitStep(const CommitOptions& options) {
  v1::CommitStepRequest request = ToProto(options);
  const ClientPosition open = position();
  request.set_session_id(id_);
  request.set_step(open.step);
  request.set_attempt(open.attempt);
  SHARDMLP_ASSIGN_OR_RETURN(
      const v1::CommitStepResponse response,
      CallWithRetries(connections_, connections_.options().retry, "CommitStep", &v1::Training::Stub::async::CommitStep,
                      request, connections_.options().seal_timeout));
  return MoveTo(FromProto(response.position()));
}

absl::StatusOr<ClientPosition> Session::DiscardStep(const std::string& reason, absl::Duration within) {
  v1::DiscardStepRequest request;
  const ClientPosition open = position();
  request.set_session_id(id_);
  request.set_step(open.step);
  request.set_attempt(open.attempt);
  request.set_reason(reason.substr(0, 256));
  RetryOptions retry = connections_.options().retry;
  retry.budget = std::min(retry.budget, within);
  const absl::StatusOr<v1::DiscardStepResponse> response =
      CallWithRetries(connections_, retry, "DiscardStep", &v1::Training::Stub::async::DiscardStep, request,
                      std::min(connections_.options().seal_timeout, within));
  SHARDMLP_RETURN_IF_ERROR(response.status());
  return MoveTo(FromProto(response->position()));
}

absl::StatusOr<ClientPosition> Session::Resync() {
  v1::RenewSessionRequest request;
  request.set_session_id(id_);
  SHARDMLP_ASSIGN_OR_RETURN(
      const v1::RenewSessionResponse response,
      CallWithRetries(connections_, connections_.options().retry, "RenewSession",
                      &v1::Training::Stub::async::RenewSession, request, connections_.options().stall_timeout));
  return MoveTo(FromProto(response.position()));
}

absl::Status Session::Close() {
  std::unique_ptr<Heartbeat> heartbeat;
  {
    absl::MutexLock lock(&mutex_);
    heartbeat = std::move(heartbeat_);
  }
  if (heartbeat == nullptr) return absl::OkStatus();
  heartbeat.reset();
  // A few tries, so that a lost answer does not keep this place taken; a server that can't be reached ends the session
  // by itself, when the lease ends.
  RetryOptions retry = connections_.options().retry;
  retry.budget = std::min(retry.budget, kCloseBudget);
  v1::CloseSessionRequest request;
  request.set_session_id(id_);
  return CallWithRetries(connections_, retry, "CloseSession", &v1::Training::Stub::async::CloseSession, request,
                         connections_.options().connect_timeout)
      .status();
}

}  // namespace shardmlp
