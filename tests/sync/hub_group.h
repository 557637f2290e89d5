// A ReplicaGroup whose ranks are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "server/sync/replica_group.h"

namespace shardmlp::testing {

// One a rank. Sums in order of rank. A collective with other shapes than another rank's is INVALID_ARGUMENT on all.
// Where one rank aborts or is destroyed, the others' collectives fail with the same reason.
std::vector<std::shared_ptr<ReplicaGroup>> MakeHubGroup(int size);

}  // namespace shardmlp::testing
