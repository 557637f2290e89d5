// Element types on the wire.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/matrix.h"
#include "shardmlp/v1/compute.pb.h"

namespace shardmlp {

v1::DType ToProto(DType dtype);
// INVALID_ARGUMENT (INVALID_DTYPE) for one that is unspecified or unknown.
absl::StatusOr<DType> FromProto(v1::DType dtype);

}  // namespace shardmlp
