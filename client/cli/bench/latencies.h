// How long calls took: a histogram of fixed size, whatever is added.
//
// As HdrHistogram does it, a bucket is as wide as 1/256 of its values or less. Thread-compatible; a value.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace shardmlp {

class Latencies {
 public:
  Latencies();

  // Below zero counts as zero.
  void Add(absl::Duration latency);

  int64_t count() const { return count_; }
  // Exact; zero where there is none.
  absl::Duration max() const { return absl::Nanoseconds(max_); }
  absl::Duration mean() const;
  // What the share `quantile` (0 to 1) of the calls did not exceed, by the nearest rank: of n in order the one at
  // ceil(quantile * n). At most 1/256 above it, and never above max(); zero where there is none.
  absl::Duration Quantile(double quantile) const;

 private:
  std::vector<int64_t> counts_;  // by bucket
  int64_t count_ = 0;
  int64_t max_ = 0;  // nanoseconds, as all here
  double sum_ = 0;
};

}  // namespace shardmlp
