// The threads that the CPU's loops run on: OpenMP's, the same team that oneDNN uses.
//
// Ranges run as VectorCall runs loops; vector_call.h is the one of this processor's folder (CMake's choice). Whether
// idle threads spin is the process's choice (OMP_WAIT_POLICY).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "vector_call.h"

namespace shardmlp {

class Team {
 public:
  // 0: as many as OpenMP takes by default.
  explicit Team(int threads) : threads_(threads > 0 ? threads : omp_get_max_threads()) {}

  int threads() const { return threads_; }

  // Makes as many threads as `operations` multiply-adds are worth the team's size in libraries that the calling thread
  // calls.
  void Enter(int64_t operations) const {
    omp_set_num_threads(static_cast<int>(std::clamp<int64_t>(operations / kOperationsPerThread, 1, threads_)));
  }

  // f(begin, end) on contiguous ranges that make up [0, count), at most one a thread; `item_cost` is the number of
  // elements that one item stands for, and decides whether threads are worth waking. f must not depend on where ranges
  // end.
  template <typename F>
  void Split(int64_t count, int64_t item_cost, const F& f) const {
    const int64_t worthwhile = std::max<int64_t>(1, count * item_cost / kElementsPerThread);
    const int ranges = static_cast<int>(std::min({static_cast<int64_t>(threads_), count, worthwhile}));
    if (ranges <= 1) return VectorCall(f, 0, count);
#pragma omp parallel for num_threads(ranges) schedule(static)
    for (int i = 0; i < ranges; ++i) VectorCall(f, count * i / ranges, count * (i + 1) / ranges);
  }

 private:
  static constexpr int64_t kElementsPerThread = 16384;
  static constexpr int64_t kOperationsPerThread = 1 << 20;

  int threads_;
};

}  // namespace shardmlp
