// The threads that the CPU's loops run on: OpenMP's, the same team that oneDNN uses.
//
// Whether idle threads spin is the process's choice (OMP_WAIT_POLICY).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace shardmlp {

class Team {
 public:
  // 0: as many as OpenMP takes by default.
  explicit Team(int threads) : threads_(threads > 0 ? threads : omp_get_max_threads()) {}

  int threads() const { return threads_; }

  // Makes `threads` the team's size in libraries that the calling thread calls.
  void Enter() const { omp_set_num_threads(threads_); }

  // f(begin, end) on contiguous ranges that make up [0, count), at most one a thread; `item_cost` is the number of
  // elements that one item stands for, and decides whether threads are worth waking. f must not depend on where ranges
  // end.
  template <typename F>
  void Split(int64_t count, int64_t item_cost, const F& f) const {
    const int64_t worthwhile = std::max<int64_t>(1, count * item_cost / kElementsPerThread);
    const int ranges = static_cast<int>(std::min({static_cast<int64_t>(threads_), count, worthwhile}));
    if (ranges <= 1) return f(int64_t{0}, count);
#pragma omp parallel for num_threads(ranges) schedule(static)
    for (int i = 0; i < ranges; ++i) f(count * i / ranges, count * (i + 1) / ranges);
  }

 private:
  static constexpr int64_t kElementsPerThread = 16384;

  int threads_;
};

}  // namespace shardmlp
