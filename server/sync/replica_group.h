// The replicas of a server, as the step protocol sees them: a fixed set of ranks that sum and broadcast together.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/matrix.h"

namespace shardmlp {

// One generation of peers. A collective is called by every rank with equal shapes and in the same order, from one
// thread (the engine's sync thread, never an rpc handler), and blocks until done. After a failure every later call
// fails too, on every rank; the group is of no more use, and its generation ends (replicas.h). Abort may be called from
// any thread.
class ReplicaGroup {
 public:
  virtual ~ReplicaGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether collectives take device memory (NCCL) or staging memory (Gloo).
  virtual bool device_memory() const = 0;

  // Each matrix = its sum over all ranks, bit-identical on all of them.
  virtual absl::Status AllReduceSum(absl::Span<const MatrixView> matrices) = 0;
  // Each matrix = rank `root`'s.
  virtual absl::Status Broadcast(int root, absl::Span<const MatrixView> matrices) = 0;
  // Makes a collective in flight, and all later ones, fail with `reason` on this rank within seconds.
  virtual void Abort(absl::Status reason) = 0;
};

// The group of one. Touches no network.
std::unique_ptr<ReplicaGroup> MakeLocalGroup();

}  // namespace shardmlp
