#include "client/cli/bench/load.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kProgressInterval = absl::Seconds(1);

// What all clients count into.
class Tally {
 public:
  explicit Tally(size_t clients) : working_(clients) {}

  void Add(const LoadCall& call, absl::Duration latency, bool stopped) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (!call.status.ok()) return AddFailure(call.status, stopped);
    KindTotals& kind = call.kind == CallKind::kForward ? totals_.forward : totals_.backward;
    ++kind.calls;
    kind.cost.rows += call.cost.rows;
    kind.cost.flops += call.cost.flops;
    kind.cost.sent_bytes += call.cost.sent_bytes;
    kind.cost.received_bytes += call.cost.received_bytes;
    kind.latencies.Add(latency);
  }
  void ClientIsDone() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --working_;
  }
  // Whether all clients are done.
  bool AwaitDone(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(this, &Tally::done), timeout);
  }
  LoadTotals totals() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return totals_;
  }

 private:
  void AddFailure(const absl::Status& failure, bool stopped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (stopped && absl::IsCancelled(failure)) {
      ++totals_.stopped_calls;
      return;
    }
    FailureTotals& totals = totals_.failures[FailureName(failure)];
    if (totals.calls++ == 0) totals.first = std::string(failure.message());
  }
  bool done() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return working_ == 0; }

  mutable absl::Mutex mutex_;
  size_t working_ ABSL_GUARDED_BY(mutex_);
  LoadTotals totals_ ABSL_GUARDED_BY(mutex_);
};

void RunClient(LoadClient& client, Pace& pace, const LoadOptions& options, Tally& tally) {
  while (const std::optional<absl::Duration> due = pace.Next()) {
    const LoadCall call = client.Run();
    tally.Add(call, options.clock.now() - *due, options.stopped());
    if (!call.status.ok() && !pace.open_loop() && !options.stopped()) options.clock.sleep(kFailurePause);
  }
  tally.ClientIsDone();
}

}  // namespace

int64_t LoadTotals::failed_calls() const {
  int64_t calls = 0;
  for (const auto& [reason, totals] : failures) calls += totals.calls;
  return calls;
}

std::string FailureName(const absl::Status& failure) {
  Reason reason = ReasonOf(failure);
  if (reason == Reason::kUnreachable) {
    for (const auto& [key, value] : MetadataOf(failure)) {
      if (key != "last") continue;
      if (const Reason last = ReasonFromName(value); last != Reason::kUnspecified) reason = last;
    }
  }
  return reason == Reason::kUnspecified ? absl::StatusCodeToString(failure.code()) : std::string(Name(reason));
}

LoadTotals RunLoad(absl::Span<const std::unique_ptr<LoadClient>> clients, const LoadOptions& options) {
  Tally tally(clients.size());
  Pace pace(options.pace, options.clock, options.stopped);
  std::vector<std::thread> threads;
  for (const std::unique_ptr<LoadClient>& client : clients) {
    threads.emplace_back([&] { RunClient(*client, pace, options, tally); });
  }
  while (!tally.AwaitDone(kProgressInterval)) {
    if (!options.progress) continue;
    LoadTotals so_far = tally.totals();
    so_far.elapsed = pace.Elapsed();
    options.progress(so_far);
  }
  for (std::thread& thread : threads) thread.join();
  LoadTotals totals = tally.totals();
  totals.elapsed = pace.Elapsed();
  totals.unsent_calls = pace.UnsentCount();
  return totals;
}

}  // namespace shardmlp
