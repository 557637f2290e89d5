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

}  // namespace shardmlp
