// Replicas of several processes, found by rank and the address of rank 0's coordinator.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/tls.h"
#include "server/sync/peer_group.h"
#include "server/sync/replicas.h"

namespace shardmlp {

struct ReplicasOptions {
  int rank = 0;
  int size = 1;
  // Of rank 0, where its coordinator listens and the others call; the same on all: "host:port".
  std::string coordinator;
  // Between replicas and the coordinator, both ways. No ca: plaintext, and who reaches the coordinator could take part.
  // The sums are plaintext in any case.
  TlsFiles tls = {};
  OnLoss on_loss = OnLoss::kWait;  // rank 0's counts

  // What must be the same on all; a replica that differs is refused.
  std::string model;   // names the model and its shapes
  std::string layers;  // "0-15"
  std::string dtype;
  // How they sum; must be the same too. Without `listen`: by Gloo, at `sync_host`.
  Transport transport = {"gloo", nullptr};

  // Where the other replicas connect for Gloo's sums. Empty: the address from which this machine reaches the
  // coordinator.
  std::string sync_host;
  absl::Duration start_timeout = absl::Minutes(10);  // until the first generation forms
  absl::Duration heartbeat = absl::Seconds(1);
  absl::Duration loss_timeout = absl::Seconds(5);  // without a word a replica is lost
  absl::Duration connect_timeout = absl::Seconds(20);
  absl::Duration sum_timeout = absl::Seconds(60);  // of a wait for a peer in a sum, where no loss was noticed
  absl::Duration log_interval = absl::Seconds(10);
  // Gets a line about who is missing at each interval, and one for each replica that is refused. Called from threads of
  // Replicas; must not block.
  std::function<void(absl::string_view)> log = [](absl::string_view) {};
};

// INVALID_ARGUMENT, naming what is wrong.
absl::Status Validate(const ReplicasOptions& options);

// Those of one process where `size` is 1. Rank 0 listens before this returns: UNAVAILABLE where it can't.
absl::StatusOr<std::unique_ptr<Replicas>> MakeReplicas(const ReplicasOptions& options);

}  // namespace shardmlp
