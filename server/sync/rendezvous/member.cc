#include "server/sync/rendezvous/member.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "proto/tls.h"
#include "server/sync/rendezvous/messages.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kReopenDelay = absl::Milliseconds(500);
constexpr absl::Duration kLeaveTimeout = absl::Seconds(1);

absl::Status LostError(absl::string_view message) {
  return Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, message);
}

// A connection of its own: one that leads nowhere any more would be found out only late.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ChannelTo(const std::string& coordinator, const TlsFiles& tls) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!tls.ca.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(credentials, TlsChannelCredentials(tls));
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetMaxReceiveMessageSize(kMaxWireBytes);
  return grpc::CreateCustomChannel(coordinator, credentials, arguments);
}

}  // namespace

Member::Member(const ReplicasOptions& options, std::unique_ptr<CoordinatorServer> server)
    : options_(options), server_(std::move(server)), loop_(options.heartbeat, [this] { Tick(); }) {}

Member::~Member() {
  loop_.Run([this] { Finish(nullptr); });
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &Member::IsOver));
}

void Member::Join(const ReplicaState& state, ReplicaObserver& observer) {
  loop_.Post([this, state, &observer] {
    if (phase_ != Phase::kIdle && phase_ != Phase::kLost) return;
    if (phase_ == Phase::kIdle) {
      joined_at_ = SteadyNow();
      next_log_ = joined_at_ + options_.log_interval;
    }
    phase_ = Phase::kJoins;
    observer_ = &observer;
    state_ = state;
    if (stream_ != nullptr) return SendJoin();
    if (MayOpen()) Open();
  });
}

void Member::Propose(int64_t generation, std::string message) {
  loop_.Post([this, generation, message = std::move(message)] {
    if (phase_ != Phase::kFormed || generation != generation_) return;
    v1::MeetRequest request;
    request.mutable_propose()->set_generation(generation);
    request.mutable_propose()->set_message(message);
    stream_->Send(std::move(request));
  });
}

void Member::Admit(int64_t generation, bool now) {
  if (options_.rank != 0) return;
  loop_.Post([this, generation, now] {
    if (phase_ != Phase::kFormed || generation != generation_) return;
    v1::MeetRequest request;
    request.mutable_admit()->set_generation(generation);
    request.mutable_admit()->set_now(now);
    stream_->Send(std::move(request));
  });
}

void Member::Leave(const absl::Status& why) {
  loop_.Post([this, why] {
    if (phase_ != Phase::kFormed && phase_ != Phase::kLost) return;
    // The coordinator ends the stream, and Join opens another.
    if (stream_ != nullptr && !std::exchange(leaves_, true)) SayLeave(why);
    Lose(why, /*heard_all=*/false);
  });
}

std::string Member::Missing() const {
  absl::MutexLock lock(&mutex_);
  return missing_;
}

void Member::Stop(const absl::Status& why) {
  loop_.Run([&] { Finish(&why); });
}

void Member::Finish(const absl::Status* why) {
  observer_ = nullptr;
  if (phase_ != Phase::kOver) {
    phase_ = Phase::kOver;
    DropGroup(why == nullptr ? absl::CancelledError("this replica is destroyed") : *why);
  }
  if (stream_ == nullptr) {
    absl::MutexLock lock(&mutex_);
    over_ = true;
  } else if (why == nullptr) {
    stream_->Cancel(absl::CancelledError("this replica is destroyed"));
  } else if (leave_by_ == absl::InfiniteFuture()) {
    SayLeave(*why);
    leave_by_ = SteadyNow() + kLeaveTimeout;
  }
}

void Member::Tick() {
  const absl::Time now = SteadyNow();
  if (stream_ != nullptr) {
    if (stream_->Silence() > options_.loss_timeout) {
      stream_->Cancel(
          LostError(absl::StrCat("nothing was heard from it for ", absl::FormatDuration(options_.loss_timeout))));
    } else if (now >= leave_by_) {
      stream_->Cancel(absl::CancelledError("this replica stopped"));
    } else if (!stream_->TakeSent()) {
      v1::MeetRequest request;
      request.mutable_heartbeat();
      stream_->Send(std::move(request));
    }
  } else if (phase_ == Phase::kJoins && MayOpen() && now >= next_open_) {
    Open();
  }
  if (phase_ == Phase::kFormed && mesh_ != nullptr) CheckMesh(now);
  if (phase_ == Phase::kJoins && generation_ == 0 && now >= joined_at_ + options_.start_timeout) {
    Refuse(Error(
        absl::StatusCode::kDeadlineExceeded, Reason::kReplicaLost,
        absl::StrCat("replicas did not start within ", absl::FormatDuration(options_.start_timeout), ": ", Missing())));
  }
  if (now >= next_log_) Log(now);
}

void Member::CheckMesh(absl::Time now) {
  if (mesh_->failure().ok() || now < say_failed_at_) return;
  const bool is_due = say_failed_at_ != absl::InfinitePast();
  // Where it failed because a member is gone, that will be heard first.
  say_failed_at_ = is_due ? absl::InfiniteFuture() : now + options_.loss_timeout;
  if (is_due) SayFailed(generation_, mesh_->failure());
}

void Member::Log(absl::Time now) {
  next_log_ = now + options_.log_interval;
  if (phase_ == Phase::kOver) return;
  if (const std::string missing = Missing(); !missing.empty()) options_.log(absl::StrCat("Replicas: ", missing));
}

void Member::Open() {
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = ChannelTo(options_.coordinator, options_.tls);
  if (!channel.ok()) return Unreachable(absl::StrCat("can't be called: ", channel.status().message()));
  stream_ = std::make_unique<MemberStream>(
      *channel, loop_,
      MemberStream::Calls{.received = [this](const v1::MeetResponse& response) { Received(response); },
                          .ended = [this](const absl::Status& why) { Ended(why); }});
  v1::MeetRequest request;
  *request.mutable_hello() = HelloOf(options_);
  stream_->Send(std::move(request));
  SendJoin();
}

void Member::SendJoin() {
  v1::MeetRequest request;
  *request.mutable_join()->mutable_position() = PositionOf(state_);
  request.mutable_join()->set_last_generation(generation_);
  stream_->Send(std::move(request));
}

void Member::Received(const v1::MeetResponse& response) {
  if (phase_ == Phase::kOver) return;
  switch (response.message_case()) {
    case v1::MeetResponse::kWaiting: return SetMissing(response.waiting().for_whom());
    case v1::MeetResponse::kGather: return Gather(response.gather());
    case v1::MeetResponse::kConnect: return Connect(response.connect());
    case v1::MeetResponse::kFormed: return Form(response.formed());
    case v1::MeetResponse::kAgreed: return Agree(response.agreed());
    case v1::MeetResponse::kStable:
      if (phase_ == Phase::kFormed) observer_->Stable(response.stable().index());
      return;
    case v1::MeetResponse::kLost: return Lose(LostError(response.lost().reason()), /*heard_all=*/true);
    default: return;
  }
}

void Member::Ended(const absl::Status& why) {
  const bool answered = stream_->answers();
  stream_.reset();
  const bool left = std::exchange(leaves_, false);
  if (phase_ == Phase::kOver) {
    absl::MutexLock lock(&mutex_);
    over_ = true;
    return;
  }
  if (ReasonOf(why) == Reason::kReplicaConflict) return Refuse(why);
  if (left) return SetMissing(absl::StrCat("this replica, rank ", options_.rank, ", has left the others"));
  Unreachable(absl::StrCat(answered ? "was lost: " : "is missing: ", why.ok() ? "it ended the stream" : why.message()));
}

void Member::Unreachable(absl::string_view why) {
  const std::string what = absl::StrCat("rank 0 at ", options_.coordinator, " ", why);
  SetMissing(what);
  next_open_ = SteadyNow() + kReopenDelay;
  Lose(LostError(what), /*heard_all=*/false);
}

void Member::Lose(const absl::Status& why, bool heard_all) {
  DropGroup(why);
  if (phase_ != Phase::kFormed) return;
  phase_ = Phase::kLost;
  observer_->Lost(why, heard_all);
}

void Member::DropGroup(const absl::Status& why) {
  if (mesh_ != nullptr) mesh_->Abort(why);
  if (group_ != nullptr) group_->Abort(why);
  gathers_ = 0;
  say_failed_at_ = absl::InfinitePast();
  mesh_.reset();
  group_.reset();
}

void Member::Refuse(const absl::Status& why) {
  Lose(why, /*heard_all=*/false);
  ReplicaObserver* const observer = observer_;
  const absl::Status stopped = absl::CancelledError("refused");
  Finish(&stopped);
  if (observer != nullptr) observer->Refused(why);
}

void Member::Form(const v1::Formed& formed) {
  if (phase_ != Phase::kJoins) return;
  Generation generation;
  generation.number = generation_ = formed.generation();
  for (const v1::Member& member : formed.members()) {
    generation.members.push_back({.rank = member.rank(), .state = StateOf(member.position())});
  }
  generation.source = MostAdvanced(generation.members);
  gathers_ = 0;
  group_ = mesh_;
  if (group_ == nullptr) group_ = MakeLocalGroup();
  generation.group = group_;
  phase_ = Phase::kFormed;
  observer_->Formed(generation);
}

void Member::Agree(const v1::Agreed& agreed) {
  if (phase_ != Phase::kFormed) return;
  observer_->Agreed(agreed.index(), agreed.rank(), agreed.message());
  if (phase_ != Phase::kFormed) return;  // the observer stopped it
  v1::MeetRequest request;
  request.mutable_acknowledge()->set_generation(generation_);
  request.mutable_acknowledge()->set_index(agreed.index());
  stream_->Send(std::move(request));
}

void Member::Gather(const v1::Gather& gather) {
  if (phase_ != Phase::kJoins) return;
  DropGroup(absl::CancelledError("another generation is to form"));
  gathers_ = gather.generation();
  const auto listen = [this, gather] { return options_.transport.listen(gather.index(), gather.member_count()); };
  RunOnMesh(listen, [this, generation = gather.generation()](absl::StatusOr<std::shared_ptr<PeerGroup>> mesh) {
    if (gathers_ != generation) return;
    if (!mesh.ok()) return SayFailed(generation, mesh.status());
    mesh_ = *std::move(mesh);
    v1::MeetRequest request;
    request.mutable_addresses()->set_generation(generation);
    for (const std::string& address : mesh_->addresses()) request.mutable_addresses()->add_addresses(address);
    stream_->Send(std::move(request));
  });
}

void Member::Connect(const v1::Connect& connect) {
  if (gathers_ != connect.generation() || mesh_ == nullptr) return;
  const auto connect_all = [mesh = mesh_, connect] {
    const std::vector<std::string> peers(connect.addresses().begin(), connect.addresses().end());
    return mesh->Connect(peers);
  };
  RunOnMesh(connect_all, [this, generation = connect.generation()](const absl::Status& status) {
    if (gathers_ != generation) return;
    if (!status.ok()) return SayFailed(generation, status);
    v1::MeetRequest request;
    request.mutable_connected()->set_generation(generation);
    stream_->Send(std::move(request));
  });
}

template <typename Work, typename Done>
void Member::RunOnMesh(Work work, Done done) {
  ++mesh_jobs_;
  mesh_loop_.Post([this, work = std::move(work), done = std::move(done)]() mutable {
    loop_.Post([this, result = work(), done = std::move(done)]() mutable {
      --mesh_jobs_;
      done(std::move(result));
    });
  });
}

void Member::SayFailed(int64_t generation, const absl::Status& why) {
  v1::MeetRequest request;
  request.mutable_failed()->set_generation(generation);
  request.mutable_failed()->set_error(std::string(why.message().substr(0, kMaxTextBytes)));
  stream_->Send(std::move(request));
}

void Member::SayLeave(const absl::Status& why) {
  v1::MeetRequest request;
  request.mutable_leave()->set_reason(std::string(why.message().substr(0, kMaxTextBytes)));
  stream_->Send(std::move(request));
}

void Member::SetMissing(std::string missing) {
  absl::MutexLock lock(&mutex_);
  missing_ = std::move(missing);
}

}  // namespace shardmlp
