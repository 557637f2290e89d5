// Runs a loop as it was compiled: for processors whose baseline has the vectors that loops need.
#pragma once

#include <cstdint>

namespace shardmlp {

template <typename Loop>
void VectorCall(const Loop& loop, int64_t begin, int64_t end) {
  loop(begin, end);
}

}  // namespace shardmlp
