// This replica's place in a set of replicas that changes: who is in it, one order for what its members agree on, and a
// ReplicaGroup for each generation of it.
//
// Rank 0 orders. A message that any member proposes is delivered to every member, the proposer too, in one order; where
// the generation ends first, some may have got it and others not, and who got it is ahead. So a member acts on a
// message when it is delivered, and tells nobody outside before it is stable: delivered to all. Whoever is behind then
// gets the state of who is ahead, and nothing that was told is lost while one member lives. A member that does not
// reach rank 0 agrees on nothing, so that no two halves of a partition do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/sync/replica_group.h"

namespace shardmlp {

struct ReplicaState {
  int64_t generation = 0;             // the last whose state it has; 0: it just started, or what it has is torn
  int64_t checkpoint_generation = 0;  // where it just started: in which the checkpoint was saved that it has; 0: none
  int64_t step = 0;
  int64_t attempt = 0;
  int64_t weights_version = 0;
  friend bool operator==(const ReplicaState&, const ReplicaState&) = default;
};

struct ReplicaMember {
  int rank = 0;
  ReplicaState state;
};

// Index of the member whose state all go on from: the newest generation, be it that of a checkpoint, which then is
// behind the states that lived through it; then the highest weights version; then the lowest rank. Of those that just
// started, the highest step goes before the weights version, which is random then. `members` is not empty and by rank.
int MostAdvanced(absl::Span<const ReplicaMember> members);

// What the members of a generation do after a loss.
enum class OnLoss {
  kWait,      // until all ranks are there again
  kContinue,  // with those that are left; who comes back is let in later (Replicas::Admit)
};

struct Generation {
  int64_t number = 0;                   // from 1; rises, across restarts of every member too
  std::vector<ReplicaMember> members;   // by rank; a member's index here is its rank in `group`
  int source = 0;                       // index of the member whose state all go on from
  std::shared_ptr<ReplicaGroup> group;  // for the engine's sync thread
};

// Called one at a time, in order, from threads of Replicas or from within Join and Propose; must not block. No lock of
// Replicas is held.
class ReplicaObserver {
 public:
  virtual ~ReplicaObserver() = default;
  virtual void Formed(const Generation& generation) = 0;
  // `index` counts the messages of the generation from 0.
  virtual void Agreed(int64_t index, int from_rank, const std::string& message) = 0;
  // Every message up to `index` has been delivered to every member.
  virtual void Stable(int64_t index) = 0;
  // The generation, of which Formed told, is over: a member was lost, or rank 0. Nothing of it follows; the group's
  // collectives fail. The owner answers with Join, once its state is settled. `heard_all`: whatever was agreed on in it
  // was delivered here first, to the last message; false where this member was cut off, and can't know what the others
  // heard.
  virtual void Lost(const absl::Status& why, bool heard_all) = 0;
  // No generation will follow: another model, layer range or dtype than rank 0's, a rank that is taken, a start that
  // took too long.
  virtual void Refused(const absl::Status& why) = 0;
};

// Thread-safe.
class Replicas {
 public:
  virtual ~Replicas() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Asks for a place in the next generation. Once at first, with the observer that hears of everything until Stop, and
  // once after each Lost.
  virtual void Join(const ReplicaState& state, ReplicaObserver& observer) = 0;
  // At most 1 MiB. Where the generation is over, nothing follows but the Lost that is on its way.
  virtual void Propose(int64_t generation, std::string message) = 0;
  // Rank 0's owner says whether `generation` may end now for a rank that came back and waits to be let in: true between
  // steps, false (as it is when a generation forms) while one would be thrown away. It ends with Lost, as after a loss.
  // Other ranks' word counts for nothing.
  virtual void Admit(int64_t generation, bool now) = 0;
  // This member can't do its part for now: the generation that is formed, if one is, ends with Lost for all, who hear
  // `why`, and what the others do next does not wait for it. It has no place from then on until it joins again.
  // Repeats, and calls between Join and Formed, do nothing.
  virtual void Leave(const absl::Status& why) = 0;
  // Who is missing, for people; empty where nobody is.
  virtual std::string Missing() const = 0;
  // Ends this member's part, from the outside as if it had died: what is wrong with this replica, the others don't go
  // on with. Returns after the last call of the observer.
  virtual void Stop(const absl::Status& why) = 0;
};

// The set of one. Touches no network, never loses anybody, and delivers before Propose returns.
std::unique_ptr<Replicas> MakeLocalReplicas();

}  // namespace shardmlp
