// Finding NaN and infinity in received rows.
#pragma once

#include <cstdint>

#include "kernels/matrix.h"

namespace shardmlp {

// The first row of `m` (host memory) that holds a NaN or an infinity; -1 where none does.
int64_t FirstNonFiniteRow(ConstMatrixView m);

}  // namespace shardmlp
