// When a generation forms and ends.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"
#include "server/sync/rendezvous/coordinator.h"
#include "server/sync/rendezvous/messages.h"

namespace shardmlp {
namespace {

std::string Ranks(const std::vector<std::string>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

// Whether `a` has all that `b` has.
bool IsAsFar(const ReplicaState& a, const ReplicaState& b) {
  if (a.generation != b.generation) return a.generation > b.generation;
  return a.generation == 0 ? a.step >= b.step : a.weights_version >= b.weights_version;
}

}  // namespace

bool Coordinator::IsMember(int64_t connection) const {
  return std::find(members_.begin(), members_.end(), connection) != members_.end();
}

bool Coordinator::IsPresent(int64_t connection, int64_t generation, Phase phase) const {
  return phase_ == phase && generation == generation_ && IsMember(connection);
}

bool Coordinator::Joined(int rank) const { return seats_[rank] != 0 && peers_.at(seats_[rank]).join.has_value(); }

bool Coordinator::MayForm() const {
  const auto joined = [this](int rank) { return Joined(rank); };
  const auto joined_or_gone = [this](int rank) { return seats_[rank] == 0 || Joined(rank); };
  std::vector<int> all(seats_.size());
  for (size_t rank = 0; rank < all.size(); ++rank) all[rank] = static_cast<int>(rank);
  if (std::all_of(all.begin(), all.end(), joined)) return true;
  return on_loss_ == OnLoss::kContinue && has_formed_ && Joined(0) &&
         std::all_of(last_ranks_.begin(), last_ranks_.end(), joined_or_gone) && SomeoneIsAsFar();
}

bool Coordinator::SomeoneIsAsFar() const {
  return std::any_of(peers_.begin(), peers_.end(), [this](const auto& entry) {
    const Peer& peer = entry.second;
    return seats_[peer.hello.rank()] == entry.first && peer.join &&
           IsAsFar(StateOf(peer.join->position()), last_state_);
  });
}

void Coordinator::Settle() {
  for (int rank = 0; rank < own_.size() && phase_ == Phase::kFormed && admits_; ++rank) {
    if (Joined(rank)) EndGeneration(absl::StrCat("rank ", rank, " came back"));
  }
  if (phase_ == Phase::kWaiting && MayForm()) Form();
  if (std::string missing = Missing(); missing != told_) {
    told_ = std::move(missing);
    for (const auto& [connection, peer] : peers_) carrier_.Send(connection, WaitingMessage(told_));
  }
}

bool Coordinator::HasAnswered(int64_t member) const {
  const Peer& peer = peers_.at(member);
  return phase_ == Phase::kGathering ? !peer.addresses.empty() : peer.connected;
}

void Coordinator::Tick(absl::Time now) {
  const bool meets = phase_ == Phase::kGathering || phase_ == Phase::kConnecting;
  if (const std::pair stage(generation_, phase_); stage != std::exchange(timed_, stage)) since_ = now;
  if (!meets || now - since_ < meet_timeout_) return;
  const absl::Status late =
      Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost,
            absl::StrCat("it did not ", phase_ == Phase::kGathering ? "say where it is found" : "connect to the others",
                         " within ", absl::FormatDuration(meet_timeout_)));
  std::vector<int64_t> missing = members_;
  std::erase_if(missing, [this](int64_t member) { return HasAnswered(member); });
  for (const int64_t member : missing) Drop(member, late);
  Settle();
}

void Coordinator::Form() {
  members_.clear();
  for (const int64_t seat : seats_) {
    if (seat == 0 || !peers_.at(seat).join) continue;
    members_.push_back(seat);
    Peer& peer = peers_.at(seat);
    generation_ = std::max({generation_, peer.join->last_generation(), peer.join->position().generation(),
                            peer.join->position().checkpoint_generation()});
    peer.addresses.clear();
    peer.connected = false;
  }
  ++generation_;
  if (members_.size() == 1) return Announce();
  phase_ = Phase::kGathering;
  for (size_t index = 0; index < members_.size(); ++index) {
    v1::MeetResponse response;
    v1::Gather& gather = *response.mutable_gather();
    gather.set_generation(generation_);
    gather.set_member_count(static_cast<int>(members_.size()));
    gather.set_index(static_cast<int>(index));
    carrier_.Send(members_[index], response);
  }
}

void Coordinator::SendAddresses() {
  phase_ = Phase::kConnecting;
  for (size_t index = 0; index < members_.size(); ++index) {
    v1::MeetResponse response;
    v1::Connect& connect = *response.mutable_connect();
    connect.set_generation(generation_);
    for (const int64_t other : members_) connect.add_addresses(peers_.at(other).addresses[index]);
    carrier_.Send(members_[index], response);
  }
}

void Coordinator::Announce() {
  v1::MeetResponse response;
  response.mutable_formed()->set_generation(generation_);
  last_ranks_.clear();
  std::vector<ReplicaMember> members;
  for (const int64_t member : members_) {
    Peer& peer = peers_.at(member);
    v1::Member& announced = *response.mutable_formed()->add_members();
    announced.set_rank(peer.hello.rank());
    *announced.mutable_position() = peer.join->position();
    members.push_back({.rank = peer.hello.rank(), .state = StateOf(peer.join->position())});
    last_ranks_.push_back(peer.hello.rank());
    peer.join.reset();
    peer.acknowledged = -1;
  }
  last_state_ = members[MostAdvanced(members)].state;
  phase_ = Phase::kFormed;
  has_formed_ = true;
  next_index_ = 0;
  stable_ = -1;
  admits_ = false;
  Send(members_, response);
}

void Coordinator::EndGeneration(const std::string& why) {
  v1::MeetResponse response;
  response.mutable_lost()->set_generation(generation_);
  response.mutable_lost()->set_reason(why);
  phase_ = Phase::kWaiting;
  std::erase_if(members_, [this](int64_t member) { return !peers_.contains(member); });
  Send(std::exchange(members_, {}), response);
}

void Coordinator::Send(const std::vector<int64_t>& connections, const v1::MeetResponse& response) {
  for (const int64_t connection : connections) carrier_.Send(connection, response);
}

std::string Coordinator::Missing() const {
  std::vector<std::string> absent, unready, waiting, unconnected;
  for (size_t rank = 0; rank < seats_.size(); ++rank) {
    const std::string name = absl::StrCat(rank);
    const auto peer = peers_.find(seats_[rank]);
    if (peer == peers_.end()) {
      absent.push_back(name);
    } else if (phase_ == Phase::kWaiting && !peer->second.join) {
      unready.push_back(name);
    } else if (phase_ == Phase::kFormed && peer->second.join) {
      waiting.push_back(name);
    } else if (IsMember(peer->first) && (phase_ == Phase::kGathering || phase_ == Phase::kConnecting) &&
               !HasAnswered(peer->first)) {
      unconnected.push_back(name);
    }
  }
  std::vector<std::string> parts;
  if (!absent.empty()) parts.push_back(absl::StrCat(Ranks(absent), " of ", seats_.size(), " missing"));
  if (!unready.empty()) parts.push_back(absl::StrCat(Ranks(unready), " not ready to join"));
  if (!unconnected.empty()) parts.push_back(absl::StrCat(Ranks(unconnected), " not connected to the others yet"));
  if (!waiting.empty()) parts.push_back(absl::StrCat(Ranks(waiting), " waiting to be let in"));
  for (const auto& [rank, why] : refused_) parts.push_back(absl::StrCat("refused: ", why));
  return absl::StrJoin(parts, "; ");
}

}  // namespace shardmlp
