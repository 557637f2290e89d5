#include "server/sync/rendezvous/coordinator_server.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "proto/builder_options.h"
#include "proto/status_bridge.h"
#include "proto/tls.h"
#include "server/sync/rendezvous/messages.h"

namespace shardmlp {
namespace {

// Streams beyond what the replicas need: of those that are refused, or were lost and not noticed yet.
constexpr int kSpareStreams = 64;
constexpr int kMaxStreams = 8;  // of a connection; a replica has one, and another while it connects again
constexpr int kMaxThreads = 4;  // that gRPC may start beside its own

absl::Status Silent(absl::Duration how_long) {
  return Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost,
               absl::StrCat("nothing was heard from it for ", absl::FormatDuration(how_long)));
}

}  // namespace

v1::Hello HelloOf(const ReplicasOptions& options) {
  v1::Hello hello;
  hello.set_rank(options.rank);
  hello.set_size(options.size);
  hello.set_model(options.model);
  hello.set_layers(options.layers);
  hello.set_dtype(options.dtype);
  hello.set_transport(options.transport.name);
  return hello;
}

// What gRPC calls posts to the loop, and all else is the loop's. Lives until gRPC is done with it.
class CoordinatorServer::Stream final : public grpc::ServerBidiReactor<v1::MeetRequest, v1::MeetResponse> {
 public:
  Stream(CoordinatorServer& server, int64_t connection, grpc::CallbackServerContext& context)
      : server_(server), connection_(connection), context_(context) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    server_.loop_.Post([this, ok] { Read(ok); });
  }
  // A write that failed is no news: so does the read.
  void OnWriteDone(bool) override {
    server_.loop_.Post([this] { Written(); });
  }
  void OnDone() override {
    {
      absl::MutexLock lock(&mutex_);
      is_done_ = true;
    }
    server_.loop_.Post([this, &server = server_] {
      server.streams_.erase(connection_);
      absl::MutexLock lock(&server.mutex_);
      --server.open_count_;
    });
  }

  void Send(const v1::MeetResponse& response) {
    if (end_) return;
    queued_bytes_ += response.ByteSizeLong();
    queue_.push_back(response);
    Write();
    if (queued_bytes_ > kMaxQueuedBytes && !overflows_) {
      overflows_ = true;
      GiveUp(Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, "it takes nothing of what is sent to it"));
    }
  }

  void End(const absl::Status& why) {
    if (end_) return;
    end_ = why;
    if (!writes_) Finish(ToGrpcStatus(*end_));
  }

  // As End, without waiting for what is being written.
  void Cancel(const absl::Status& why) {
    End(why);
    absl::MutexLock lock(&mutex_);
    if (!is_done_) context_.TryCancel();
  }

  void Tick() {
    if (SteadyNow() - heard_ > server_.options_.loss_timeout) {
      server_.coordinator_.Closed(connection_, Silent(server_.options_.loss_timeout));
      Cancel(Silent(server_.options_.loss_timeout));
    } else if (!std::exchange(sent_, false) && queue_.empty()) {
      v1::MeetResponse response;
      response.mutable_heartbeat();
      Send(response);
    }
  }

 private:
  void Read(bool ok) {
    if (!ok) {
      server_.coordinator_.Closed(connection_, absl::UnavailableError("its connection ended"));
      return End(absl::CancelledError("the stream was ended"));
    }
    if (end_) return;
    heard_ = SteadyNow();
    server_.coordinator_.Receive(connection_, request_);
    if (!end_) StartRead(&request_);
  }

  void Write() {
    if (writes_ || queue_.empty()) return;
    writes_ = true;
    StartWrite(&queue_.front());
  }

  void Written() {
    writes_ = false;
    sent_ = true;
    if (end_) return Finish(ToGrpcStatus(*end_));
    queued_bytes_ -= queue_.front().ByteSizeLong();
    queue_.pop_front();
    Write();
  }

  // Later: the coordinator, which sends, must not be called now.
  void GiveUp(const absl::Status& why) {
    server_.loop_.Post([&server = server_, connection = connection_, why] {
      server.coordinator_.Closed(connection, why);
      if (Stream* const stream = server.Find(connection)) stream->Cancel(why);
    });
  }

  CoordinatorServer& server_;
  const int64_t connection_;
  grpc::CallbackServerContext& context_;  // until OnDone
  v1::MeetRequest request_;
  std::deque<v1::MeetResponse> queue_;  // the first is being written, where one is
  bool writes_ = false;
  size_t queued_bytes_ = 0;
  bool overflows_ = false;
  bool sent_ = false;  // since the last tick
  absl::Time heard_ = SteadyNow();
  std::optional<absl::Status> end_;

  absl::Mutex mutex_;
  bool is_done_ ABSL_GUARDED_BY(mutex_) = false;  // and the context gone
};

CoordinatorServer::CoordinatorServer(const ReplicasOptions& options)
    : options_(options),
      // The others are to find out by themselves first that they can't connect.
      coordinator_(HelloOf(options), options.on_loss, options.connect_timeout + options.loss_timeout, *this),
      loop_(options.heartbeat, [this] { Tick(); }) {}

absl::StatusOr<std::unique_ptr<CoordinatorServer>> CoordinatorServer::Listen(const ReplicasOptions& options) {
  std::unique_ptr<CoordinatorServer> server(new CoordinatorServer(options));
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("rendezvous");
  // A whole message of each stream that may be open; beyond it gRPC ends whichever it likes.
  quota.Resize(static_cast<size_t>(options.size + kSpareStreams) * kMaxWireBytes).SetMaxThreads(kMaxThreads);
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  // Meet alone: reflection has a thread for each who asks, and health would say SERVING while the model loads.
  builder.SetOption(std::make_unique<WithoutReflection>());
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
  // A second rank 0 must not share the port.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(kMaxWireBytes);
  int port = 0;
  const bool tls = !options.tls.ca.empty();
  builder.AddListeningPort(options.coordinator,
                           tls ? TlsServerCredentials(options.tls) : grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(server.get());
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || port <= 0) {
    return Error(absl::StatusCode::kUnavailable, Reason::kReplicaConflict,
                 absl::StrCat("rank 0 can't listen for the other replicas at ", options.coordinator,
                              ": another listens there, or it is no address of this machine"));
  }
  return server;
}

CoordinatorServer::~CoordinatorServer() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &CoordinatorServer::NoneIsOpen));
}

grpc::ServerBidiReactor<v1::MeetRequest, v1::MeetResponse>* CoordinatorServer::Meet(
    grpc::CallbackServerContext* context) {
  bool is_spare = false;
  int64_t connection = 0;
  {
    absl::MutexLock lock(&mutex_);
    is_spare = ++open_count_ <= options_.size + kSpareStreams;
    connection = ++last_connection_;
  }
  auto stream = std::make_unique<Stream>(*this, connection, *context);
  Stream* const reactor = stream.get();
  loop_.Post([this, is_spare, connection, stream = std::move(stream)]() mutable {
    if (!is_spare) stream->End(absl::ResourceExhaustedError("too many streams"));
    streams_.emplace(connection, std::move(stream));
  });
  return reactor;
}

CoordinatorServer::Stream* CoordinatorServer::Find(int64_t connection) {
  const auto stream = streams_.find(connection);
  return stream == streams_.end() ? nullptr : stream->second.get();
}

void CoordinatorServer::Send(int64_t connection, const v1::MeetResponse& response) {
  if (Stream* const stream = Find(connection)) stream->Send(response);
}

void CoordinatorServer::End(int64_t connection, const absl::Status& why) {
  if (why.code() == absl::StatusCode::kFailedPrecondition) options_.log(absl::StrCat("Refused: ", why.message()));
  if (Stream* const stream = Find(connection)) stream->End(why);
}

void CoordinatorServer::Tick() {
  for (const auto& [connection, stream] : streams_) stream->Tick();
  coordinator_.Tick(SteadyNow());
}

}  // namespace shardmlp
