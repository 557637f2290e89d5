// The wish of a client that the server drains, on its way to the server, and what came of it, on its way back.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/engine/step_types.h"
#include "server/model/checkpoint.h"

namespace shardmlp {

// What a drain left.
struct DrainSummary {
  StepPosition position;
  std::optional<CheckpointInfo> checkpoint;  // what was saved
  bool cut_off = false;                      // calls or reads were still open when its time was over
  bool step_undecided = false;               // so was a sealed step
};

// Thread-safe.
class DrainRequest {
 public:
  // From now on asked(). `done` gets what comes of it, at once where it has.
  void Ask(Done<DrainSummary> done) {
    std::optional<absl::StatusOr<DrainSummary>> outcome;
    {
      absl::MutexLock lock(&mutex_);
      asked_ = true;
      outcome = outcome_;
      if (!outcome.has_value()) waiting_.push_back(std::move(done));
    }
    if (outcome.has_value()) done(*std::move(outcome));
  }

  bool asked() const {
    absl::MutexLock lock(&mutex_);
    return asked_;
  }

  // Tells all who asked, and will. The first outcome stands.
  void End(const absl::StatusOr<DrainSummary>& outcome) {
    std::vector<Done<DrainSummary>> waiting;
    {
      absl::MutexLock lock(&mutex_);
      if (outcome_.has_value()) return;
      outcome_ = outcome;
      waiting.swap(waiting_);
    }
    for (Done<DrainSummary>& done : waiting) done(outcome);
  }

 private:
  mutable absl::Mutex mutex_;
  bool asked_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Done<DrainSummary>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<DrainSummary>> outcome_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp
