#include "server/sync/rendezvous/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"
#include "server/sync/rendezvous/messages.h"

namespace shardmlp {
namespace {

// The first may have been sent before the replica died.
constexpr int kSignsOfLife = 2;

absl::Status Invalid(std::string message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}
absl::Status Conflict(std::string message) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kReplicaConflict, message);
}

// What `hello` has other than rank 0; empty where nothing.
std::string Differences(const v1::Hello& hello, const v1::Hello& own) {
  std::vector<std::string> differences;
  const auto compare = [&](absl::string_view what, const auto& theirs, const auto& ours) {
    if (theirs == ours) return;
    differences.push_back(absl::StrCat("rank ", hello.rank(), " has ", what, " ", theirs, ", rank 0 has ", ours));
  };
  compare("number of replicas", hello.size(), own.size());
  compare("model", hello.model(), own.model());
  compare("layers", hello.layers(), own.layers());
  compare("dtype", hello.dtype(), own.dtype());
  compare("sums by", hello.transport(), own.transport());
  return absl::StrJoin(differences, "; ");
}

}  // namespace

Coordinator::Coordinator(v1::Hello own, OnLoss on_loss, absl::Duration meet_timeout, Carrier& carrier)
    : own_(std::move(own)), on_loss_(on_loss), meet_timeout_(meet_timeout), carrier_(carrier), seats_(own_.size()) {}

void Coordinator::Receive(int64_t connection, const v1::MeetRequest& request) {
  const auto peer = peers_.find(connection);
  if (request.has_hello() != (peer == peers_.end())) {
    Drop(connection, Invalid("expected one hello, and first"));
  } else if (request.has_hello()) {
    ReceiveHello(connection, request.hello());
  } else {
    const int rank = peer->second.hello.rank();
    if (seats_[rank] == connection) NoteAlive(rank);
    ReceiveFrom(connection, peer->second, request);
  }
  Settle();
}

void Coordinator::ReceiveHello(int64_t connection, const v1::Hello& hello) {
  for (const std::string* fact : {&hello.model(), &hello.layers(), &hello.dtype(), &hello.transport()}) {
    if (fact->size() <= kMaxTextBytes) continue;
    return Drop(connection,
                Invalid(absl::StrCat("a fact of ", fact->size(), " bytes, at most ", kMaxTextBytes, " expected")));
  }
  const int rank = hello.rank();
  const bool is_rank = rank >= 0 && rank < own_.size();
  if (const std::string differences = Differences(hello, own_); !differences.empty()) {
    if (is_rank && seats_[rank] == 0) refused_[rank] = differences;
    return Drop(connection, Conflict(differences));
  }
  if (!is_rank) return Drop(connection, Conflict(absl::StrCat("rank ", rank, " of ", own_.size(), " replicas")));
  if (seats_[rank] != 0) {
    if (!challengers_.try_emplace(rank, Challenger{connection}).second) {
      return Drop(connection, Conflict(absl::StrCat("rank ", rank, " is taken, and another waits for it")));
    }
  } else {
    seats_[rank] = connection;
    refused_.erase(rank);
  }
  Peer& peer = peers_[connection];
  peer.hello = hello;
  if (!told_.empty()) carrier_.Send(connection, WaitingMessage(told_));
}

void Coordinator::ReceiveFrom(int64_t connection, Peer& peer, const v1::MeetRequest& request) {
  switch (request.message_case()) {
    case v1::MeetRequest::kJoin:
      if (IsMember(connection)) return Drop(connection, Invalid("a join from a member"));
      for (const int64_t number : {request.join().last_generation(), request.join().position().generation(),
                                   request.join().position().checkpoint_generation()}) {
        if (number < 0 || number > kMaxGeneration) {
          return Drop(connection, Invalid(absl::StrCat("generation ", number)));
        }
      }
      peer.join = request.join();
      return;
    case v1::MeetRequest::kAddresses: return ReceiveAddresses(connection, peer, request.addresses());
    case v1::MeetRequest::kConnected: return ReceiveConnected(connection, peer, request.connected());
    case v1::MeetRequest::kFailed: return ReceiveFailed(connection, peer, request.failed());
    case v1::MeetRequest::kPropose: return ReceivePropose(connection, peer, request.propose());
    case v1::MeetRequest::kAcknowledge: return ReceiveAcknowledge(connection, peer, request.acknowledge());
    case v1::MeetRequest::kAdmit:
      if (peer.hello.rank() == 0 && IsPresent(connection, request.admit().generation(), Phase::kFormed)) {
        admits_ = request.admit().now();
      }
      return;
    case v1::MeetRequest::kLeave:
      return Drop(connection, Error(absl::StatusCode::kCancelled, Reason::kCancelled,
                                    absl::StrCat("it stopped: ", request.leave().reason().substr(0, kMaxTextBytes))));
    case v1::MeetRequest::kHeartbeat: return;
    default: return Drop(connection, Invalid("a message of no kind that is known"));
  }
}

void Coordinator::ReceiveAddresses(int64_t connection, Peer& peer, const v1::MeshAddresses& addresses) {
  if (!IsPresent(connection, addresses.generation(), Phase::kGathering)) return;
  if (static_cast<size_t>(addresses.addresses_size()) != members_.size()) {
    return Drop(connection,
                Invalid(absl::StrCat(addresses.addresses_size(), " addresses for ", members_.size(), " members")));
  }
  for (const std::string& address : addresses.addresses()) {
    if (address.size() <= kMaxAddressBytes) continue;
    return Drop(connection, Invalid(absl::StrCat("an address of ", address.size(), " bytes, at most ", kMaxAddressBytes,
                                                 " expected")));
  }
  peer.addresses.assign(addresses.addresses().begin(), addresses.addresses().end());
  const auto gathered = [this](int64_t member) { return !peers_.at(member).addresses.empty(); };
  if (std::all_of(members_.begin(), members_.end(), gathered)) SendAddresses();
}

void Coordinator::ReceiveConnected(int64_t connection, Peer& peer, const v1::MeshConnected& connected) {
  if (!IsPresent(connection, connected.generation(), Phase::kConnecting)) return;
  peer.connected = true;
  const auto is_connected = [this](int64_t member) { return peers_.at(member).connected; };
  if (std::all_of(members_.begin(), members_.end(), is_connected)) Announce();
}

void Coordinator::ReceiveFailed(int64_t connection, const Peer& peer, const v1::MeshFailed& failed) {
  if (failed.generation() != generation_ || !IsMember(connection)) return;
  const std::string why = failed.error().substr(0, kMaxTextBytes);
  if (phase_ == Phase::kFormed) {
    return EndGeneration(absl::StrCat("a collective failed on rank ", peer.hello.rank(), ": ", why));
  }
  // It comes again, but not at once.
  Drop(connection, Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, why));
}

void Coordinator::ReceivePropose(int64_t connection, Peer& peer, const v1::Propose& propose) {
  if (propose.message().size() > kMaxMessageBytes) {
    return Drop(connection, Invalid(absl::StrCat("a message of ", propose.message().size(), " bytes, at most ",
                                                 kMaxMessageBytes, " expected")));
  }
  if (!IsPresent(connection, propose.generation(), Phase::kFormed)) return;
  v1::MeetResponse response;
  v1::Agreed& agreed = *response.mutable_agreed();
  agreed.set_generation(generation_);
  agreed.set_index(next_index_++);
  agreed.set_rank(peer.hello.rank());
  agreed.set_message(propose.message());
  Send(members_, response);
}

void Coordinator::ReceiveAcknowledge(int64_t connection, Peer& peer, const v1::Acknowledge& acknowledge) {
  if (!IsPresent(connection, acknowledge.generation(), Phase::kFormed)) return;
  if (acknowledge.index() <= peer.acknowledged || acknowledge.index() >= next_index_) {
    return Drop(connection, Invalid(absl::StrCat("message ", acknowledge.index(), " was acknowledged after ",
                                                 peer.acknowledged, " of ", next_index_)));
  }
  peer.acknowledged = acknowledge.index();
  int64_t least = next_index_ - 1;
  for (const int64_t member : members_) least = std::min(least, peers_.at(member).acknowledged);
  if (least == stable_) return;
  stable_ = least;
  v1::MeetResponse response;
  response.mutable_stable()->set_generation(generation_);
  response.mutable_stable()->set_index(stable_);
  Send(members_, response);
}

void Coordinator::Closed(int64_t connection, const absl::Status& why) {
  Forget(connection, std::string(why.message()));
  Settle();
}

void Coordinator::Drop(int64_t connection, const absl::Status& why) {
  carrier_.End(connection, why);
  Forget(connection, std::string(why.message()));
}

void Coordinator::Forget(int64_t connection, const std::string& why) {
  const auto peer = peers_.find(connection);
  if (peer == peers_.end()) return;
  const int rank = peer->second.hello.rank();
  const bool was_member = IsMember(connection);
  peers_.erase(peer);
  const auto challenger = challengers_.find(rank);
  if (challenger != challengers_.end() && challenger->second.connection == connection) {
    challengers_.erase(challenger);
    return;
  }
  seats_[rank] = 0;
  if (challenger != challengers_.end()) {
    seats_[rank] = challenger->second.connection;
    challengers_.erase(challenger);
  }
  if (was_member) EndGeneration(absl::StrCat("rank ", rank, " was lost: ", why));
}

void Coordinator::NoteAlive(int rank) {
  const auto challenger = challengers_.find(rank);
  if (challenger == challengers_.end() || ++challenger->second.signs_of_life < kSignsOfLife) return;
  Drop(challenger->second.connection, Conflict(absl::StrCat("rank ", rank, " is taken by a replica that lives")));
}

}  // namespace shardmlp
