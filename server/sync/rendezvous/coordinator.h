// Who is in, in which order, and what all have: rank 0's part of the rendezvous as a state machine. It knows
// connections by number and messages of the protocol; what carries them, and what time it is, is coordinator_server's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/sync/replicas.h"
#include "shardmlp/v1/rendezvous.pb.h"

namespace shardmlp {

// Where it may be that a replica holds what no other does, nothing goes on without it: the first generation, and the
// first after rank 0 was started again, has all ranks. Later ones have all ranks (kWait), or those of the last one's
// members that are left and whoever else waits, as long as one of them is as far as the last one was (kContinue).
//
// Thread-compatible. Makes no calls but to its Carrier, and bears being called by none of these.
class Coordinator {
 public:
  // How it reaches the connections that it was told of.
  class Carrier {
   public:
    virtual ~Carrier() = default;
    virtual void Send(int64_t connection, const v1::MeetResponse& response) = 0;
    // Ends the connection. Of this one nothing need be told any more.
    virtual void End(int64_t connection, const absl::Status& why) = 0;
  };

  // `own`: what rank 0 has, which all others must have too. `meet_timeout`: how long a member of a generation that is
  // to form may take to say where it is found, and then to connect to the others, before it is lost.
  Coordinator(v1::Hello own, OnLoss on_loss, absl::Duration meet_timeout, Carrier& carrier);

  // Connections have numbers above 0, each used once.
  void Receive(int64_t connection, const v1::MeetRequest& request);
  // The connection ended, or is to be given up, since nothing is heard from it.
  void Closed(int64_t connection, const absl::Status& why);
  // Time passes, by any clock that doesn't jump.
  void Tick(absl::Time now);

  // Who is missing, for people; empty where nobody is.
  std::string Missing() const;

 private:
  enum class Phase { kWaiting, kGathering, kConnecting, kFormed };
  // A connection that said hello.
  struct Peer {
    v1::Hello hello;
    std::optional<v1::Join> join;        // waits for a place
    std::vector<std::string> addresses;  // of its mesh, once gathered
    bool connected = false;              // to the others
    int64_t acknowledged = -1;
  };
  // Says hello for a rank that is taken. Refused once that one's replica has shown to live.
  struct Challenger {
    int64_t connection = 0;
    int signs_of_life = 0;
  };

  void ReceiveHello(int64_t connection, const v1::Hello& hello);
  void ReceiveFrom(int64_t connection, Peer& peer, const v1::MeetRequest& request);
  void ReceiveAddresses(int64_t connection, Peer& peer, const v1::MeshAddresses& addresses);
  void ReceiveConnected(int64_t connection, Peer& peer, const v1::MeshConnected& connected);
  void ReceiveFailed(int64_t connection, const Peer& peer, const v1::MeshFailed& failed);
  void ReceivePropose(int64_t connection, Peer& peer, const v1::Propose& propose);
  void ReceiveAcknowledge(int64_t connection, Peer& peer, const v1::Acknowledge& acknowledge);

  // Ends a connection and forgets it.
  void Drop(int64_t connection, const absl::Status& why);
  void Forget(int64_t connection, const std::string& why);
  void NoteAlive(int rank);

  bool IsMember(int64_t connection) const;
  // Whether a member of a generation that is to form has answered what it was asked last.
  bool HasAnswered(int64_t member) const;
  bool IsPresent(int64_t connection, int64_t generation, Phase phase) const;
  bool Joined(int rank) const;
  bool MayForm() const;
  bool SomeoneIsAsFar() const;
  // Does what has become due: forms a generation or ends one to let a rank in, and tells all who is missing.
  void Settle();
  void Form();
  void SendAddresses();
  void Announce();
  void EndGeneration(const std::string& why);
  void Send(const std::vector<int64_t>& connections, const v1::MeetResponse& response);

  const v1::Hello own_;
  const OnLoss on_loss_;
  const absl::Duration meet_timeout_;
  Carrier& carrier_;

  std::map<int64_t, Peer> peers_;
  std::vector<int64_t> seats_;             // by rank: its connection; 0: none
  std::map<int, Challenger> challengers_;  // by rank
  std::map<int, std::string> refused_;     // by rank, why; until it has a seat
  Phase phase_ = Phase::kWaiting;
  std::vector<int64_t> members_;                            // of the generation that forms or is formed, by rank
  int64_t generation_ = 0;                                  // the last that formed or was to
  std::pair<int64_t, Phase> timed_ = {0, Phase::kWaiting};  // what `since_` is of: a generation, and how far it was
  absl::Time since_ = absl::InfinitePast();
  bool has_formed_ = false;      // since this process started
  std::vector<int> last_ranks_;  // of the last that formed
  ReplicaState last_state_;      // which that one went on from
  int64_t next_index_ = 0;
  int64_t stable_ = -1;
  bool admits_ = false;
  std::string told_;  // the last Waiting
};

}  // namespace shardmlp
