// When the calls of a load are due.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace shardmlp {

// Thread-safe, and never goes back. Tests have one that they move by hand.
struct LoadClock {
  std::function<absl::Duration()> now;  // since some moment
  std::function<void(absl::Duration)> sleep;
};
LoadClock SteadyClock();

struct PaceOptions {
  // Calls a second, due evenly whether or not the ones before are answered (an open loop); 0: a client's next call is
  // due once its last was answered (a closed loop).
  double rate = 0;
  int64_t call_count = std::numeric_limits<int64_t>::max();
  absl::Duration duration = absl::InfiniteDuration();
};

// Deals out calls to clients, from its construction on. Thread-safe.
class Pace {
 public:
  // `stopped` is asked every kInterruptInterval at least while a call is waited for; thread-safe.
  Pace(const PaceOptions& options, const LoadClock& clock, std::function<bool()> stopped);

  // Waits until the next call is due, and says when that was, by the clock: earlier than now where every client was
  // busy then, so that a slow server does not make its own load lighter. None once all were dealt out, the duration is
  // over, or it is stopped.
  std::optional<absl::Duration> Next() ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls that were due by now and within the duration, and were never dealt out: no client was free for them.
  int64_t UnsentCount() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration Elapsed() const { return clock_.now() - start_; }
  bool open_loop() const { return options_.rate > 0; }

 private:
  // After the start.
  absl::Duration DueTime(int64_t call) const;

  const PaceOptions options_;
  const LoadClock clock_;
  const std::function<bool()> stopped_;
  const absl::Duration start_;
  mutable absl::Mutex mutex_;
  int64_t dealt_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardmlp
