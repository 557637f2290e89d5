#include "proto/dtype.h"

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF32: return v1::DTYPE_F32;
    case DType::kBF16: return v1::DTYPE_BF16;
    case DType::kF16: return v1::DTYPE_F16;
    case DType::kF64: return v1::DTYPE_F64;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<DType> FromProto(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32: return DType::kF32;
    case v1::DTYPE_BF16: return DType::kBF16;
    case v1::DTYPE_F16: return DType::kF16;
    case v1::DTYPE_F64: return DType::kF64;
    default:
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidDType,
                   absl::StrCat("dtype is ", static_cast<int>(dtype), ", expected DTYPE_F32, BF16, F16 or F64"),
                   {{"dtype", absl::StrCat(static_cast<int>(dtype))}});
  }
}

}  // namespace shardmlp
