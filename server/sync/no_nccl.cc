// Stands in for NCCL in a program that is built without it.
#include "kernels/status.h"
#include "server/sync/nccl_group.h"

namespace shardmlp {

absl::StatusOr<std::unique_ptr<ReplicaGroup>> MakeNcclGroup(const NcclOptions& /*options*/,
                                                            const ByteExchange& /*exchange*/) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kDeviceFailed,
               "there is no NCCL in this program: it was built where none was found");
}

}  // namespace shardmlp
