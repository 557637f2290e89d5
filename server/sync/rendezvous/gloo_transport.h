// Sums over Gloo, at an address that the others of a set of replicas can reach.
#pragma once

#include "server/sync/peer_group.h"
#include "server/sync/rendezvous/replicas_options.h"

namespace shardmlp {

// Listens at options.sync_host, or where that is empty, at the address that leads to the coordinator, which is looked
// for when the first group is made.
Transport GlooTransport(const ReplicasOptions& options);

}  // namespace shardmlp
