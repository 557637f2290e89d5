// Stands in for NCCL in a program that is built without it.
#include "kernels/status.h"
#include "server/sync/nccl_group.h"

namespace shardmlp {

absl::StatusOr<Transport> NcclTransport(const NcclOptions& /*options*/) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kDeviceFailed,
               "there is no NCCL in this program: it was built where none was found");
}

}  // namespace shardmlp
