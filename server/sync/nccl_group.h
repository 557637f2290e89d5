// A ReplicaGroup over NCCL, from GPU memory to GPU memory. Where the program is built without NCCL, no_nccl.cc stands
// in.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/sync/replica_group.h"

namespace shardmlp {

struct NcclOptions {
  int rank = 0;
  int size = 0;    // two or more: one replica needs no communicator
  int device = 0;  // index of this rank's GPU among those that the process sees
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration timeout = absl::Minutes(5);  // of one collective
};

// Brings rank 0's bytes to every rank: called once on each, with the bytes on rank 0 and with none elsewhere, and
// returns rank 0's.
using ByteExchange = std::function<absl::StatusOr<std::string>(const std::string& bytes)>;

// Returns once all ranks are connected. Fails with UNAVAILABLE (REPLICA_LOST), or with what Abort was given; the
// calling thread watches the communicator while it waits, so that a peer that dies or hangs ends a collective too.
// Collectives sum f32 and f64, take dense matrices, and find them as they are once all work that was enqueued on them
// is done, which is the caller's to see to.
absl::StatusOr<std::unique_ptr<ReplicaGroup>> MakeNcclGroup(const NcclOptions& options, const ByteExchange& exchange);

}  // namespace shardmlp
