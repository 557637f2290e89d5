// What both ends of the rendezvous's stream share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "server/sync/replicas.h"
#include "shardmlp/v1/rendezvous.pb.h"

namespace shardmlp {

// Of one that is proposed.
inline constexpr size_t kMaxMessageBytes = 1 << 20;
// Of one on the wire.
inline constexpr int kMaxWireBytes = 2 << 20;
// Of a fact in a hello, and of a reason; of an address.
inline constexpr size_t kMaxTextBytes = 1 << 10;
inline constexpr size_t kMaxAddressBytes = 256;
// Generations are told as doubles too.
inline constexpr int64_t kMaxGeneration = int64_t{1} << 53;
// Of what waits to be sent to one peer. One that takes so little is given up.
inline constexpr size_t kMaxQueuedBytes = 64 << 20;

inline ReplicaState StateOf(const v1::ReplicaPosition& position) {
  return {.generation = position.generation(),
          .checkpoint_generation = position.checkpoint_generation(),
          .step = position.step(),
          .attempt = position.attempt(),
          .weights_version = position.weights_version()};
}

inline v1::ReplicaPosition PositionOf(const ReplicaState& state) {
  v1::ReplicaPosition position;
  position.set_generation(state.generation);
  position.set_checkpoint_generation(state.checkpoint_generation);
  position.set_step(state.step);
  position.set_attempt(state.attempt);
  position.set_weights_version(state.weights_version);
  return position;
}

inline v1::MeetResponse WaitingMessage(const std::string& for_whom) {
  v1::MeetResponse response;
  response.mutable_waiting()->set_for_whom(for_whom);
  return response;
}

}  // namespace shardmlp
