#include "client/cli/bench/pace.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/time/clock.h"
#include "client/cpp/options.h"

namespace shardmlp {

LoadClock SteadyClock() {
  return {.now = [] { return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch()); },
          .sleep = [](absl::Duration duration) { absl::SleepFor(duration); }};
}

Pace::Pace(const PaceOptions& options, const LoadClock& clock, std::function<bool()> stopped)
    : options_(options), clock_(clock), stopped_(std::move(stopped)), start_(clock_.now()) {}

absl::Duration Pace::DueTime(int64_t call) const { return absl::Seconds(static_cast<double>(call) / options_.rate); }

std::optional<absl::Duration> Pace::Next() {
  absl::Duration due = Elapsed();
  {
    absl::MutexLock lock(&mutex_);
    if (stopped_() || dealt_ >= options_.call_count || due >= options_.duration) return std::nullopt;
    if (open_loop()) due = DueTime(dealt_);
    if (due >= options_.duration) return std::nullopt;
    ++dealt_;
  }
  for (absl::Duration left = due - Elapsed(); left > absl::ZeroDuration(); left = due - Elapsed()) {
    if (stopped_()) {
      absl::MutexLock lock(&mutex_);
      --dealt_;
      return std::nullopt;
    }
    clock_.sleep(std::min(left, kInterruptInterval));
  }
  return start_ + due;
}

int64_t Pace::UnsentCount() const {
  if (!open_loop()) return 0;
  const double seconds = absl::ToDoubleSeconds(std::min(Elapsed(), options_.duration));
  const auto due = static_cast<int64_t>(std::min(std::ceil(seconds * options_.rate), 0x1p62));
  absl::MutexLock lock(&mutex_);
  return std::max<int64_t>(0, std::min(due, options_.call_count) - dealt_);
}

}  // namespace shardmlp
