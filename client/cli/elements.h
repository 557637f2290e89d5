// Numbers to and from the bytes of a tensor.
#pragma once

#include <string>
#include <vector>

#include "kernels/matrix.h"

namespace shardmlp {

// Every element exactly. `bytes` holds whole elements.
std::vector<double> DecodeElements(const std::string& bytes, DType dtype);
// Every value must be one that `dtype` has.
std::string EncodeElements(const std::vector<double>& values, DType dtype);
// Half a unit in the last place of `value`, above zero, in `dtype`: what is nearer to it than that is rounded to it.
double HalfUnit(double value, DType dtype);

}  // namespace shardmlp
