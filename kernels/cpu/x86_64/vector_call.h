// Runs a loop compiled for wider vectors than the baseline, where the processor has them.
#pragma once

#include <cstdint>

namespace shardmlp {

template <typename Loop>
[[gnu::flatten, gnu::target("avx2,fma")]] void CallAvx2(const Loop& loop, int64_t begin, int64_t end) {
  loop(begin, end);
}

// loop(begin, end), inlined with all that it calls.
template <typename Loop>
void VectorCall(const Loop& loop, int64_t begin, int64_t end) {
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    CallAvx2(loop, begin, end);
  } else {
    loop(begin, end);
  }
}

}  // namespace shardmlp
