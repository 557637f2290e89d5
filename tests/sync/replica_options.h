// Options of replicas whose losses are found soon.
#pragma once

#include <string>

#include "server/sync/rendezvous/replicas_options.h"

namespace shardmlp::testing {

// The loss time-out leaves room for a machine that is busy with other tests.
inline ReplicasOptions FastOptions(int rank, int size, const std::string& coordinator) {
  ReplicasOptions options;
  options.rank = rank;
  options.size = size;
  options.coordinator = coordinator;
  options.model = "tiny";
  options.layers = "0-3";
  options.dtype = "f32";
  options.heartbeat = absl::Milliseconds(50);
  options.loss_timeout = absl::Seconds(3);
  options.log_interval = absl::Milliseconds(50);
  return options;
}

}  // namespace shardmlp::testing
