// Elements from one dtype to another, on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/matrix.h"

namespace shardmlp {

// to[i] = from[i] for `count` elements, each rounded once, to nearest even. The ranges may not overlap and need no
// alignment.
void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count);

// to[c][r] = from[r][c]: `from` [rows, cols] without padding, `to` [cols, rows], converted likewise.
void ConvertTransposed(const void* from, DType from_dtype, MatrixView to);

// The first of `count` elements that is NaN or infinite, or becomes infinite in `to_dtype`; -1 where there is none.
int64_t FirstNonFinite(const void* from, DType from_dtype, DType to_dtype, int64_t count);
// Element `index`, for messages.
double ElementAt(const void* from, DType dtype, int64_t index);

}  // namespace shardmlp
