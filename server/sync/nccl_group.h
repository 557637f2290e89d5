// PeerGroups over NCCL, from GPU memory to GPU memory. Where the program is built without NCCL, no_nccl.cc stands in.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/sync/peer_group.h"

namespace shardmlp {

struct NcclOptions {
  int device = 0;  // index of this rank's GPU among those that the process sees; no two ranks have one together
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration timeout = absl::Minutes(5);  // of one collective
};

// FAILED_PRECONDITION (DEVICE_FAILED) where there is no NCCL. The thread that connects, or calls a collective, watches
// the communicator while it waits, so that a peer that dies or hangs ends it too. Collectives sum f32 and f64, take
// dense matrices, and find them as they are once all work that was enqueued on them is done, which is the caller's to
// see to.
absl::StatusOr<Transport> NcclTransport(const NcclOptions& options);

}  // namespace shardmlp
