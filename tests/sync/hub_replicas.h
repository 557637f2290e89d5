// Replicas of one process, for tests, over the real coordinator: no network and no time, and what is delivered when is
// the test's to say.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "server/sync/replicas.h"

namespace shardmlp::testing {

// A set of `size` ranks. Rank 0's server has the coordinator (server/sync/rendezvous), which says who is in a
// generation and in which order they hear of what; this carries its messages, and is each rank's end of the connection.
//
// Observers are called from within the calls of any rank and of this, one at a time each; unless held, until nothing is
// left to deliver. Thread-safe.
class HubReplicas {
 public:
  HubReplicas(int size, OnLoss on_loss);
  ~HubReplicas();

  // A server of `rank` that just started. What had the rank before is dead from then on. To destroy it without Stop is
  // to kill it. May outlive the hub.
  std::unique_ptr<Replicas> Start(int rank);

  // From now on observers hear of something only by Deliver and DeliverAll.
  void Hold();
  // Delivers what is left, and from now on everything at once.
  void Release();
  // The next call of `rank`'s observer (Formed, Agreed, Stable or Lost). False where there is none.
  bool Deliver(int rank);
  // All calls of all observers, those that come of these too.
  void DeliverAll();

  // `rank`, other than 0, and rank 0 can't reach each other, or where it is 0, nobody else can: what is on the way is
  // lost.
  void Cut(int rank);
  void Mend(int rank);
  // As kill -9: its observer hears nothing more.
  void Kill(int rank);

  // The one that is formed; 0: none.
  int64_t generation() const;

 private:
  class Hub;
  class Member;

  const std::shared_ptr<Hub> hub_;
};

}  // namespace shardmlp::testing
