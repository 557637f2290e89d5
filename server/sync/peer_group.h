// ReplicaGroups whose ranks have still to find each other, and who makes them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/sync/replica_group.h"

namespace shardmlp {

// Of two ranks or more: bring each rank the others' addresses, Connect; then ReplicaGroup's contract. Fails with
// UNAVAILABLE (REPLICA_LOST), or with what Abort was given.
class PeerGroup : public ReplicaGroup {
 public:
  // Where each rank finds this one, by rank; some may be empty, as this one's own is. Bytes, meaningful to its own kind
  // alone.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // `peers`: where this rank finds each of the others, by rank. Returns once all are connected, or time is out. To be
  // called once, ahead of any collective; it and they may be called by different threads, one at a time.
  virtual absl::Status Connect(absl::Span<const std::string> peers) = 0;
  // Of the first call that failed, or Abort's. From any thread.
  virtual absl::Status failure() const = 0;

 protected:
  std::vector<std::string> addresses_;
};

// A way to sum, which must be the same on all ranks.
struct Transport {
  std::string name;  // "gloo"
  // Rank `rank` of `size` in a new group. Called from one thread.
  std::function<absl::StatusOr<std::shared_ptr<PeerGroup>>(int rank, int size)> listen;
};

}  // namespace shardmlp
