// How many lines of one event a log has.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace shardmlp {

// Thread-safe. Each kind of each event may have a burst of lines, and goes on at a steady rate. Both are constants, so
// that there are few.
class LogLimit {
 public:
  LogLimit(double lines_a_second, int burst) : lines_a_second_(lines_a_second), burst_(burst) {}

  // None where a line of this kind of `event` is not to be written at `now`; else how many were not since the last that
  // was.
  std::optional<int64_t> Admit(absl::string_view event, absl::string_view kind, absl::Time now);

 private:
  struct Allowance {
    double lines;  // that may be written
    absl::Time at;
    int64_t suppressed = 0;
  };

  const double lines_a_second_;
  const double burst_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::pair<absl::string_view, absl::string_view>, Allowance> events_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp
