// A load of calls, and what came of it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cli/bench/latencies.h"
#include "client/cli/bench/pace.h"
#include "client/cli/layer_cost.h"

namespace shardmlp {

struct LoadCall {
  CallKind kind = CallKind::kForward;
  CallCost cost = {};
  absl::Status status = {};
};

// Makes one call after the other, on one thread.
class LoadClient {
 public:
  virtual ~LoadClient() = default;
  virtual LoadCall Run() = 0;
};

// Calls of one kind that were answered.
struct KindTotals {
  int64_t calls = 0;
  CallCost cost;        // of all of them
  Latencies latencies;  // from when a call was due to its answer
};

// Calls that failed for one reason.
struct FailureTotals {
  int64_t calls = 0;
  std::string first;  // what the first of them said
};

struct LoadTotals {
  KindTotals forward;
  KindTotals backward;
  std::map<std::string, FailureTotals> failures;  // by reason
  int64_t unsent_calls = 0;                       // that were due, and for which no client was free in time
  int64_t stopped_calls = 0;                      // under way when the load was stopped
  absl::Duration elapsed;                         // from the first call's due time to the last one's answer

  int64_t calls() const { return forward.calls + backward.calls; }
  int64_t failed_calls() const;
};

// "OVERLOADED": the reason that the server gave, of a call that was given up after tries too; the status's code where
// it gave none.
std::string FailureName(const absl::Status& failure);

struct LoadOptions {
  PaceOptions pace = {};
  LoadClock clock = SteadyClock();
  std::function<bool()> stopped = [] { return false; };  // thread-safe; asked all the time
  std::function<void(const LoadTotals&)> progress = {};  // called about once a second, on the caller's thread
};

// Each client on a thread of its own, until the pace ends; calls that are under way then are awaited. In a closed loop
// a client whose call failed pauses for kFailurePause, so that a server that refuses is not flooded.
LoadTotals RunLoad(absl::Span<const std::unique_ptr<LoadClient>> clients, const LoadOptions& options);

inline constexpr absl::Duration kFailurePause = absl::Milliseconds(100);

}  // namespace shardmlp
