// Elements from one dtype to another, on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/matrix.h"

namespace shardmlp {

// to[i] = from[i] for `count` elements, to nearest even; f64 goes to bf16 and f16 through f32, as PyTorch does it. The
// ranges may not overlap and need no alignment.
void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count);

}  // namespace shardmlp
