#include "client/cli/bench/latencies.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace shardmlp {
namespace {

// A value's bucket: its leading bits, and how many it has beyond them.
constexpr int kBits = 9;
constexpr int kMostBits = 63;  // of an int64 from 0
constexpr int64_t kHalf = int64_t{1} << (kBits - 1);
constexpr int64_t kBuckets = (kMostBits - kBits) * kHalf + 2 * kHalf;

int64_t BucketOf(int64_t value) {
  const int beyond = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(value))) - kBits);
  return beyond * kHalf + (value >> beyond);
}

// The largest value of a bucket.
int64_t LastOf(int64_t bucket) {
  if (bucket < 2 * kHalf) return bucket;
  const int64_t beyond = bucket / kHalf - 1;
  const uint64_t next = static_cast<uint64_t>(bucket - beyond * kHalf + 1) << beyond;
  return static_cast<int64_t>(next - 1);
}

}  // namespace

Latencies::Latencies() : counts_(kBuckets) {}

void Latencies::Add(absl::Duration latency) {
  const int64_t value = std::max<int64_t>(0, absl::ToInt64Nanoseconds(latency));
  ++counts_[BucketOf(value)];
  ++count_;
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
}

absl::Duration Latencies::mean() const {
  return count_ == 0 ? absl::ZeroDuration() : absl::Nanoseconds(sum_ / static_cast<double>(count_));
}

absl::Duration Latencies::Quantile(double quantile) const {
  if (count_ == 0) return absl::ZeroDuration();
  const auto rank = std::clamp<int64_t>(std::llround(std::ceil(quantile * static_cast<double>(count_))), 1, count_);
  int64_t seen = 0;
  for (int64_t bucket = 0; bucket < kBuckets; ++bucket) {
    seen += counts_[bucket];
    if (seen >= rank) return absl::Nanoseconds(std::min(LastOf(bucket), max_));
  }
  return max();
}

}  // namespace shardmlp
