// Percentiles of latencies, against all of them in order.
#include "client/cli/bench/latencies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace shardmlp {
namespace {

constexpr double kWidth = 1.0 / 256;

TEST(LatenciesTest, PercentilesAreThoseOfTheNearestRank) {
  std::vector<int> milliseconds;
  for (int i = 1; i <= 1000; ++i) milliseconds.push_back(i);
  std::shuffle(milliseconds.begin(), milliseconds.end(), std::mt19937(1));
  Latencies latencies;
  for (const int ms : milliseconds) latencies.Add(absl::Milliseconds(ms));
  EXPECT_EQ(latencies.count(), 1000);
  EXPECT_EQ(latencies.max(), absl::Milliseconds(1000));
  EXPECT_EQ(latencies.mean(), absl::Microseconds(500500));
  // numpy.percentile(range(1, 1001), [0, 50, 90, 99, 99.9, 100], method="inverted_cdf")
  const std::pair<double, double> expected[] = {{0, 1}, {0.5, 500}, {0.9, 900}, {0.99, 990}, {0.999, 999}, {1, 1000}};
  for (const auto& [quantile, ms] : expected) {
    const double got = absl::ToDoubleMilliseconds(latencies.Quantile(quantile));
    EXPECT_GE(got, ms) << quantile;
    EXPECT_LE(got, ms * (1 + kWidth)) << quantile;
  }
  EXPECT_EQ(latencies.Quantile(1), latencies.max());
}

// From nanoseconds to hours.
TEST(LatenciesTest, AnyValueIsKeptToItsLeadingBits) {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> exponent(0, 43);
  std::vector<int64_t> values(20000);
  Latencies latencies;
  for (int64_t& value : values) {
    value = std::llround(std::exp2(exponent(random)));
    latencies.Add(absl::Nanoseconds(value));
  }
  std::sort(values.begin(), values.end());
  for (size_t rank = 1; rank <= values.size(); rank += 37) {
    const double quantile = static_cast<double>(rank) / static_cast<double>(values.size());
    const auto exact = static_cast<double>(values[std::llround(std::ceil(quantile * 20000)) - 1]);
    const auto got = static_cast<double>(absl::ToInt64Nanoseconds(latencies.Quantile(quantile)));
    EXPECT_GE(got, exact) << rank;
    EXPECT_LE(got, exact * (1 + kWidth)) << rank;
  }
}

TEST(LatenciesTest, TheEndsOfTheRange) {
  Latencies latencies;
  EXPECT_EQ(latencies.Quantile(0.5), absl::ZeroDuration());
  EXPECT_EQ(latencies.max(), absl::ZeroDuration());
  EXPECT_EQ(latencies.mean(), absl::ZeroDuration());
  latencies.Add(absl::Nanoseconds(-5));
  EXPECT_EQ(latencies.Quantile(1), absl::ZeroDuration());
  latencies.Add(absl::Nanoseconds(511));
  EXPECT_EQ(latencies.Quantile(1), absl::Nanoseconds(511)) << "small ones are exact";
  latencies.Add(absl::InfiniteDuration());
  EXPECT_GT(latencies.Quantile(1), absl::Hours(24 * 365 * 200));
  EXPECT_EQ(latencies.Quantile(0.66), absl::Nanoseconds(511));
}

}  // namespace
}  // namespace shardmlp
