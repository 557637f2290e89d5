// What observing costs: nanoseconds of each observation, alone and with a thread more at the same series, and all that
// a shard brings about over the least that a shard of the preferred size takes, which is to be copied in and out once.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "server/metrics.h"
#include "server/rpc/message_limits.h"

namespace shardmlp {
namespace {

constexpr int kRounds = 9;
constexpr int kObservations = 200'000;

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Of one run of `work`, over rounds of `count`.
double Nanoseconds(int count, const std::function<void()>& work) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const absl::Time start = absl::Now();
    for (int i = 0; i < count; ++i) work();
    rounds.push_back(absl::ToDoubleNanoseconds(absl::Now() - start) / count);
  }
  return Median(rounds);
}

double NanosecondsBesideAnother(const std::function<void()>& work) {
  double other = 0;
  std::thread beside([&] { other = Nanoseconds(kObservations, work); });
  const double own = Nanoseconds(kObservations, work);
  beside.join();
  return (own + other) / 2;
}

void Measure() {
  Metrics metrics;
  RpcMetrics& method = metrics.ForMethod("shardmlp.v1.Compute", "Backward", RpcKind::kBidiStream);
  const absl::Time past = absl::Now();
  // As the code does it: with the clock's reading.
  const auto stage = [&] { metrics.ObserveStage(Pass::kBackward, Stage::kCompute, absl::Now() - past); };
  const auto counter = [&] { metrics.AddRows(Pass::kBackward, 512); };
  const auto gauge = [&] { metrics.SetOpenCalls(3); };
  const auto rpc = [&] {
    method.Started();
    method.Handled(absl::StatusCode::kOk, absl::Milliseconds(3));
  };
  // At most, of one shard that is a tile and a call of its own: receive, send and four stages; bytes in and out; rows,
  // operations, open calls, and the rpc.
  const auto shard = [&] {
    for (int i = 0; i < 6; ++i) metrics.ObserveStage(Pass::kBackward, static_cast<Stage>(i), absl::Now() - past);
    metrics.AddPayloadBytes(1 << 20, 0);
    metrics.AddPayloadBytes(0, 1 << 20);
    metrics.AddRows(Pass::kBackward, 512);
    metrics.AddFlops(9e9, 2e9);
    metrics.SetOpenCalls(1);
    metrics.SetOpenCalls(0);
    rpc();
  };
  std::vector<char> from(MessageLimits().preferred_shard_bytes, 1);
  std::vector<char> to(from.size());
  const auto copies = [&] {
    std::memcpy(to.data(), from.data(), from.size());
    std::memcpy(from.data(), to.data(), to.size());
  };
  const double shard_nanoseconds = Nanoseconds(kObservations / 10, shard);
  const double copy_nanoseconds = Nanoseconds(200, copies);
  std::printf("metrics_stage_ns %.1f\nmetrics_stage_contended_ns %.1f\n", Nanoseconds(kObservations, stage),
              NanosecondsBesideAnother(stage));
  std::printf("metrics_counter_ns %.1f\nmetrics_counter_contended_ns %.1f\n", Nanoseconds(kObservations, counter),
              NanosecondsBesideAnother(counter));
  std::printf("metrics_gauge_ns %.1f\nmetrics_rpc_ns %.1f\n", Nanoseconds(kObservations, gauge),
              Nanoseconds(kObservations, rpc));
  std::printf("metrics_shard_ns %.0f\nmetrics_shard_copies_ns %.0f\nmetrics_over_shard_copies %.4f\n",
              shard_nanoseconds, copy_nanoseconds, shard_nanoseconds / copy_nanoseconds);
}

}  // namespace
}  // namespace shardmlp

int main() {
  shardmlp::Measure();
  return 0;
}
